"""The ASGI application: FastAPI's routes inside our middleware.

Outermost first: `Envelope` (request id, metrics, last net), `HeaderLimits`, CORS for listed origins, `Auth`, `Origins`,
`BodyLimit`, then the routes. A request without a key is told 401 before anything else about it is judged.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from core.errors import NonetError
from core.version import nonet_version
from plugins.frontends.openai_http.auth import ApiKeys, Auth
from plugins.frontends.openai_http.envelope import Envelope
from plugins.frontends.openai_http.errors import answer_error
from plugins.frontends.openai_http.generation import Generation
from plugins.frontends.openai_http.limits import BodyLimit, HeaderLimits
from plugins.frontends.openai_http.metrics import HttpMetrics
from plugins.frontends.openai_http.origins import Origins
from plugins.frontends.openai_http.service import Service
from plugins.frontends.openai_http.status import Status
from plugins.frontends.openai_http.tokens import Tokens

_REF = "#/components/schemas/{model}"


def build_app(service: Service, keys: ApiKeys) -> ASGIApp:
    metrics = HttpMetrics(service.front, service.context.metrics, lambda: service.health().status)
    routes = _routes(service, metrics)
    settings = service.settings
    app: ASGIApp = BodyLimit(routes, settings.limits)
    app = Origins(app, settings)
    app = Auth(app, keys)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-request-id"),
            expose_headers=("x-request-id", "retry-after"),
        )
    paths = frozenset(route.path for route in routes.routes if isinstance(route, APIRoute))
    return Envelope(HeaderLimits(app, settings.limits), paths, metrics.observe)


def _routes(service: Service, metrics: HttpMetrics) -> FastAPI:
    app = FastAPI(title="Nonet", version=nonet_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(NonetError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    _add_posts(app, service)
    _add_status(app, service, Status(service, metrics))
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    generation, tokens, bodies = Generation(service), Tokens(service), service.bodies
    schemas: dict[str, Any] = {}
    for path, endpoint, body in (
        ("/v1/chat/completions", generation.chat, bodies.chat),
        ("/v1/completions", generation.completions, bodies.completion),
        ("/tokenize", tokens.tokenize, bodies.tokenize),
        ("/detokenize", tokens.detokenize, bodies.detokenize),
    ):
        app.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, openapi_extra=_documented(body, schemas)
        )
    _publish(app, schemas)


def _add_status(app: FastAPI, service: Service, status: Status) -> None:
    app.add_api_route("/health", status.health, methods=["GET"], response_model=None)
    app.add_api_route("/health", status.health, methods=["HEAD"], response_model=None, include_in_schema=False)
    for path, endpoint in (
        ("/v1/models", status.models),
        ("/v1/models/{name:path}", status.model),
        ("/version", status.version),
        ("/plugins", status.plugins),
        ("/metrics", status.metrics),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    if service.settings.admin:
        app.add_api_route("/reset_prefix_cache", status.reset_prefix_cache, methods=["POST"], response_model=None)


def _documented(body: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """The body's JSON schema for the OpenAPI document; the endpoints parse it themselves, strictly."""
    schema = body.model_json_schema(ref_template=_REF)
    schemas |= schema.pop("$defs", {})
    schemas[body.__name__] = schema
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _publish(app: FastAPI, schemas: dict[str, Any]) -> None:
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
