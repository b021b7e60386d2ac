"""What the server says about itself: health, models, version, plugins, metrics; and the one admin verb."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from core.errors import RequestError
from core.version import nonet_version
from plugins.frontends.openai_http.convert import check_model
from plugins.frontends.openai_http.errors import json_response
from plugins.frontends.openai_http.metrics import HttpMetrics
from plugins.frontends.openai_http.service import Service

_HIDDEN = ("api_key_file", "api_key_env")


class Status:
    def __init__(self, service: Service, metrics: HttpMetrics):
        self._service = service
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self, _request: Request) -> Response:
        """200 only while the engine's loop turns. The detail stays in the log: this path is public."""
        health = self._service.health()
        body = {"status": health.status, "step_age": round(health.step_age, 3)}
        return json_response(body, status=200 if health.status == "ok" else 503)

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._service.served]})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(check_model(request.path_params["name"], self._service.served)))

    async def version(self, _request: Request) -> Response:
        return json_response({"version": nonet_version()})

    async def plugins(self, _request: Request) -> Response:
        """The selected plugins with wheel and version, in stage order."""
        rows = self._service.context.description.rows()
        return json_response({"plugins": [self._public(row) for row in rows]})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def reset_prefix_cache(self, _request: Request) -> Response:
        """Registered only with `admin: true`."""
        if not await self._service.front.reset_prefix_cache():
            raise RequestError("The prefix cache is in use; try again when idle.", code="cache_in_use", status=409)
        return json_response({"reset": True})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nonet",
            "root": self._service.served[0],
            "max_model_len": self._service.front.model.max_model_len,
        }

    def _public(self, row: dict[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in row.get("settings", {}).items() if key not in _HIDDEN}
        return {**row, "settings": settings}
