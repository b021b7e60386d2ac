"""What the endpoints share, built once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from core.errors import RequestError
from core.model.tokenizer import Tokenizer
from core.stages.frontend import FrontendContext, FrontHalf, GenerateRequest, Health
from plugins.frontends.openai_http.answer import Shape
from plugins.frontends.openai_http.auth import TENANT
from plugins.frontends.openai_http.calls import Call
from plugins.frontends.openai_http.convert import Caller, sampling_defaults
from plugins.frontends.openai_http.drain import Drain
from plugins.frontends.openai_http.envelope import RECEIVED, trace_context
from plugins.frontends.openai_http.parse import read_body
from plugins.frontends.openai_http.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampling,
    TokenizeBody,
    bounded,
)
from plugins.frontends.openai_http.settings import Settings
from plugins.frontends.openai_http.sse import AnswerResponse, Delivery

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Bodies:
    """The request models with this server's bounds."""

    chat: type[ChatBody]
    completion: type[CompletionBody]
    tokenize: type[TokenizeBody]
    detokenize: type[DetokenizeBody]


@dataclass(frozen=True, slots=True)
class Service:
    settings: Settings
    context: FrontendContext
    drain: Drain
    served: tuple[str, ...]  # model names, the canonical one first
    bodies: Bodies
    defaults: Mapping[str, float]  # sampling fields where the body says nothing

    @classmethod
    def build(cls, settings: Settings, context: FrontendContext) -> Service:
        model = context.front.model
        served = context.served_names or (model.name,)
        bounds = settings.bounds
        bodies = Bodies(
            bounded(ChatBody, bounds),
            bounded(CompletionBody, bounds),
            bounded(TokenizeBody, bounds),
            DetokenizeBody,
        )
        config = model.generation_config if settings.default_sampling == "model" else {}
        return cls(settings, context, Drain(context.drain_timeout), served, bodies, sampling_defaults(config))

    @property
    def front(self) -> FrontHalf:
        return self.context.front

    @property
    def spent(self) -> Callable[[float], None]:
        """Takes seconds that this frontend itself was busy: stage 1's share of `nonet_stage_seconds`."""
        metrics = self.context.metrics
        return metrics.add_frontend_seconds if metrics is not None else _ignore

    @property
    def tokenizer(self) -> Tokenizer:
        return self.front.renderer.tokenizer

    def health(self) -> Health:
        health = self.front.health()
        return Health("draining", health.step_age) if self.drain.draining else health

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The checked body. Raises RequestError."""
        return await read_body(request, model, self.settings.limits.json_depth, self.spent)

    def caller(self, request: Request, prefix: str) -> Caller:
        scope = request.scope
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        return Caller(request_id, scope.get(TENANT, ""), scope.get(RECEIVED), trace_context(scope))

    def answer(self, requests: Sequence[GenerateRequest], shape: Shape, body: Sampling) -> AnswerResponse:
        delivery = Delivery(
            stream=bool(body.stream),
            include_usage=includes_usage(body),
            keep_alive_seconds=self.settings.keep_alive_seconds,
            write_seconds=self.settings.limits.write_seconds,
        )
        return AnswerResponse(Call(self.front, requests, self.drain), shape, delivery, self.spent)

    async def text_of(self, token_ids: Sequence[int], param: str) -> str:
        """Raises RequestError for an id past the vocabulary."""
        size = max(self.front.model.vocab_size, self.tokenizer.vocab_size)
        if max(token_ids, default=0) >= size:
            raise RequestError(f"`{param}` holds a token id that is not below {size}.", param=param)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, False)


def _ignore(seconds: float) -> None:
    """Nobody counts."""


def includes_usage(body: Sampling) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
