"""`OpenAIHttp`: the frontend that config group `frontend` builds under the name `openai_http`."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp

from core.stages.frontend import FrontendContext
from plugins.frontends.openai_http import settings as settings_module
from plugins.frontends.openai_http.app import build_app
from plugins.frontends.openai_http.auth import ApiKeys
from plugins.frontends.openai_http.server import listen, make_server, url_of
from plugins.frontends.openai_http.service import Service

log = logging.getLogger("nonet.http")


class OpenAIHttp:
    """OpenAI-compatible HTTP API on FastAPI and uvicorn. Raises ConfigError for a bad key file or address."""

    Settings = settings_module.Settings

    def __init__(self, settings: settings_module.Settings, context: FrontendContext):
        self._settings = settings
        self._service = Service.build(settings, context)
        self._keys = ApiKeys.load(settings)
        self.app: ASGIApp = build_app(self._service, self._keys)
        self.url: str | None = None  # while serving

    async def run(self) -> None:
        """Serve until a signal or `stop`; return when drained (`drain.Drain` has the table)."""
        settings = self._settings
        if not settings.loopback and not self._keys:
            log.warning(
                "ANYONE who reaches %s:%d can use this server: no API key is set. Set %s or frontend.host=127.0.0.1.",
                settings.host,
                settings.port,
                settings.api_key_env,
            )
        listener = listen(settings.host, settings.port)
        url = url_of(listener, settings.root_path)
        server = make_server(self.app, settings, self._service.drain, lambda: self._announce(url))
        try:
            await server.serve(sockets=[listener])
        except asyncio.CancelledError:
            await server.abandon()
            raise
        finally:
            listener.close()
            self.url = None

    def stop(self) -> None:
        """As one SIGTERM; call it again to stop at once."""
        self._service.drain.signal()

    def _announce(self, url: str) -> None:
        self.url = url
        print(f"Nonet serving {self._service.served[0]} on {url}", flush=True)
