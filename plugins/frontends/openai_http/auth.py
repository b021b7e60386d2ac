"""API keys: deny by default, one rule for every path (bugs P7; security rule 7).

The decision is made on the path that the router will match, so no Host header, encoding or absolute-form target can
make the two disagree.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import ConfigError
from plugins.frontends.openai_http.errors import Failure
from plugins.frontends.openai_http.limits import refuse
from plugins.frontends.openai_http.settings import Settings

PUBLIC_PATHS = frozenset({"/health"})
TENANT = "nonet.tenant"  # key in the ASGI scope
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiKeys:
    """Digests of the accepted keys with the tenants that they stand for; the keys themselves are not kept."""

    def __init__(self, entries: Iterable[tuple[str, str]]):
        """`entries`: tenant and key. An empty tenant is named after its key."""
        self._tenants = {
            hashlib.sha256(key.encode()).digest(): name or tenant_of(key.encode()) for name, key in entries
        }

    @classmethod
    def load(cls, settings: Settings) -> ApiKeys:
        """From the environment and the key file; never from the command line, which `ps` shows. Raises ConfigError."""
        variable = settings.api_key_env
        words = [word.strip() for word in os.environ.get(variable, "").split(",")]
        entries = [_entry(word, f"{variable}: entry {number}") for number, word in enumerate(words, 1) if word]
        if settings.api_key_file is not None:
            entries += _read_keys(settings.api_key_file)
        return cls(_once(entries))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, key: bytes) -> str | None:
        """Whose key it is; None for one that is not accepted. Compares with every key, in the same time whether one
        matches or not."""
        given = hashlib.sha256(key).digest()
        matches = [tenant for digest, tenant in self._tenants.items() if hmac.compare_digest(given, digest)]
        return matches[0] if matches else None


def _read_keys(path: str) -> list[tuple[str, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"frontend.api_key_file: cannot read {path}: {type(error).__name__}") from None
    words = [line.split("#", 1)[0].strip() for line in lines]
    if not any(words):
        raise ConfigError(f"frontend.api_key_file: {path} holds no key; write one per line or set it to null")
    return [
        _entry(word, f"frontend.api_key_file: line {number} of {path}") for number, word in enumerate(words, 1) if word
    ]


def _entry(text: str, place: str) -> tuple[str, str]:
    """`KEY`, or `NAME KEY`. No error says what stands there: it holds a key."""
    *name, key = text.split()
    if len(name) > 1 or not all(map(_NAME.fullmatch, name)):
        wanted = "a key, or a name, white space and a key; a name has up to 64 of A-Z a-z 0-9 . _ -"
        raise ConfigError(f"{place} is not what it should be: {wanted}")
    return "".join(name), key


def _once(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Raises ConfigError where a key stands for two tenants. A tenant may have several keys."""
    names: dict[str, str] = {}
    for name, key in entries:
        if names.setdefault(key, name) != name:
            both = " and ".join(name or "no name" for name in (names[key], name))
            raise ConfigError(f"API keys: one key has {both}; give it to one tenant")
    return entries


def tenant_of(key: bytes) -> str:
    """A short name for the owner of a key without a name, not to be turned back into the key or its stored digest."""
    return hashlib.sha256(b"nonet tenant\0" + key).hexdigest()[:16]


def bearer_key(scope: Scope) -> bytes:
    """The key of the one Authorization header; empty for none, several, or another scheme."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""


class Auth:
    """ASGI middleware: 401 unless the path is public or the key is right; writes the tenant into the scope."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, public: frozenset[str] = PUBLIC_PATHS):
        self._app = app
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._keys.tenant(bearer_key(scope))
        if tenant is not None:
            scope[TENANT] = tenant
        elif self._keys and get_route_path(scope) not in self._public:
            await refuse(_UNAUTHORIZED, scope, receive, send)
            return
        await self._app(scope, receive, send)


_UNAUTHORIZED = Failure(
    401,
    "Missing or wrong API key: send it as `Authorization: Bearer <key>`.",
    "authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
