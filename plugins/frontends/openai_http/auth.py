"""API keys: deny by default, one rule for every path (bugs P7; security rule 7).

The decision is made on the path that the router will match, so no Host header, encoding or absolute-form target can
make the two disagree.
"""

from __future__ import annotations

import hashlib
import hmac
import os
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


class ApiKeys:
    """Digests of the accepted keys; the keys themselves are not kept."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, settings: Settings) -> ApiKeys:
        """From the environment and the key file; never from the command line, which `ps` shows."""
        keys = [key.strip() for key in os.environ.get(settings.api_key_env, "").split(",")]
        if settings.api_key_file is not None:
            keys += _read_keys(settings.api_key_file)
        return cls(key for key in keys if key)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: bytes) -> bool:
        """Compares with every key, in the same time whether one matches or not."""
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _read_keys(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"frontend.api_key_file: cannot read {path}: {type(error).__name__}") from None
    keys = [line.split("#", 1)[0].strip() for line in lines]
    if not any(keys):
        raise ConfigError(f"frontend.api_key_file: {path} holds no key; write one per line or set it to null")
    return keys


def tenant_of(key: bytes) -> str:
    """A short name for the key's owner, not to be turned back into the key or its stored digest."""
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
        key = bearer_key(scope)
        accepted = self._keys.accepts(key)
        if accepted:
            scope[TENANT] = tenant_of(key)
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
