"""What the server says about itself: health, models, version, plugins, metrics; and the one admin verb."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from core.errors import RequestError
from core.outputs import PluginIncident
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
        """200 only while the engine's loop turns. The detail stays in the log: this path is public.

        What was switched off is named, and does not change the status: requests that do not need it are served.
        """
        health = self._service.health()
        body: dict[str, Any] = {"status": health.status, "step_age": round(health.step_age, 3)}
        switched_off = sorted(f"{i.group}={i.name}" for i in self._service.front.incidents() if i.quarantined)
        if switched_off:
            body["quarantined"] = switched_off
        return json_response(body, status=200 if health.status == "ok" else 503)

    async def models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self._service.served]})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(check_model(request.path_params["name"], self._service.served)))

    async def version(self, _request: Request) -> Response:
        return json_response({"version": nonet_version()})

    async def plugins(self, _request: Request) -> Response:
        """The selected components with plugin, wheel, version and settings, in stage order, and how they do."""
        description = self._service.context.description
        latest = {(incident.group, incident.name): incident for incident in self._service.front.incidents()}
        rows = [{**_public(row), **_state(latest.get((row["stage"], row["name"])))} for row in description.rows()]
        return json_response({"pipeline_hash": description.pipeline_hash, "plugins": _encodable(rows)})

    async def metrics(self, _request: Request) -> Response:
        await self._service.front.flush_observers()  # a client that has its answer finds it counted
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def reset_prefix_cache(self, _request: Request) -> Response:
        """Registered only with `admin: true`. Requests in flight go on with the blocks they have, and share none of them."""
        if not await self._service.front.reset_prefix_cache():
            message = "This cache cannot be reset while requests hold its blocks; try again when idle."
            raise RequestError(message, code="cache_in_use", status=409)
        return json_response({"reset": True, "requests_in_flight": self._service.front.load().in_flight})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "nonet",
            "root": self._service.served[0],
            "max_model_len": self._service.front.model.max_model_len,
        }


def _public(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "settings": {key: value for key, value in row["settings"].items() if key not in _HIDDEN}}


def _encodable(value: Any) -> Any:
    """Values and reasons may be a stranger's: lone surrogates, which have no UTF-8 form, become "?"."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list():
            return [_encodable(item) for item in value]
        case _:
            return value


def _state(latest: PluginIncident | None) -> dict[str, Any]:
    """`failures` since the start, and the reason of the last one."""
    if latest is None:
        return {"status": "running", "failures": 0, "reason": None}
    status = "quarantined" if latest.quarantined else "running"
    return {"status": status, "failures": latest.failures, "reason": latest.reason}
