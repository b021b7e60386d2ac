"""uvicorn with our shutdown: signals start a drain (`drain.Drain`) instead of closing the listener at once."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from core.errors import ConfigError
from plugins.frontends.openai_http.drain import Drain
from plugins.frontends.openai_http.protocol import Http11, HttpConfig
from plugins.frontends.openai_http.settings import Settings

CLOSE_SECONDS = 2  # for writing the last events once the drain is over


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ConfigError in one line where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"frontend.host: cannot resolve {host!r}: {error.strerror}") from None
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        advice = "; choose another with frontend.port=…" if port else ""
        raise ConfigError(f"frontend.port: cannot listen on {host}:{port}: {error.strerror}{advice}") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, root_path: str = "") -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}{root_path}" if ":" in host else f"http://{host}:{port}{root_path}"


class Server(uvicorn.Server):
    """Serves until the drain is over; returns then. It never re-raises a signal, so the process exits with 0."""

    def __init__(self, config: HttpConfig, drain: Drain, announce: Callable[[], None]):
        super().__init__(config)
        self._drain = drain
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain.signal()

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self._drain.expired()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.force_exit = self._drain.signals > 1
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def abandon(self) -> None:
        """Whoever ran the server cancelled it: close what is open."""
        self._drain.signal()
        self._drain.expired()
        if self.started:
            await self.shutdown()


def make_server(app: ASGIApp, settings: Settings, drain: Drain, announce: Callable[[], None]) -> Server:
    config = HttpConfig(
        app,
        settings.limits,
        http=Http11,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=settings.access_log,
        proxy_headers=False,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=settings.limits.idle_seconds,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=settings.limits.header_bytes,
    )
    return Server(config, drain, announce)
