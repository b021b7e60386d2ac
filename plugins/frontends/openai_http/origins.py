"""Browsers: no page may reach a local server by DNS rebinding or a cross-origin call (bugs P9)."""

from __future__ import annotations

from starlette.types import ASGIApp, Scope

from plugins.frontends.openai_http.errors import Failure
from plugins.frontends.openai_http.limits import HeaderGuard, header_values
from plugins.frontends.openai_http.settings import Settings

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(value: bytes) -> str:
    """The name in a Host header without port and brackets, lower case; `?` for one that is not well-formed."""
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else "?"
    name, colon, port = text.partition(":")
    return name if not colon or port.isdigit() else "?"


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isdigit()


class Origins(HeaderGuard):
    """ASGI middleware: refuses unknown Host names (always when bound to loopback) and unlisted Origins, for every verb."""

    def __init__(self, app: ASGIApp, settings: Settings):
        super().__init__(app)
        hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        if settings.loopback:
            hosts |= LOOPBACK_HOSTS | {settings.host.lower()}
        self._hosts = hosts
        self._origins = frozenset(settings.allowed_origins)

    def _failure(self, scope: Scope) -> Failure | None:
        hosts = header_values(scope, b"host")
        if len(hosts) > 1 or (self._hosts and any(host_name(host) not in self._hosts for host in hosts)):
            text = "This Host name is not served; add it to frontend.allowed_hosts."
            return Failure(403, text, code="host_not_allowed")
        for origin in header_values(scope, b"origin"):
            if origin.decode("latin-1") not in self._origins:
                text = "This Origin may not call the server; add it to frontend.allowed_origins."
                return Failure(403, text, code="origin_not_allowed")
        return None
