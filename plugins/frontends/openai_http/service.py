"""What the endpoints share, built once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from core.errors import RequestError
from core.model.tokenizer import Tokenizer
from core.stages.frontend import FrontendContext, FrontHalf, GenerateRequest, Health
from plugins.frontends.openai_http.answer import Shape
from plugins.frontends.openai_http.auth import TENANT
from plugins.frontends.openai_http.calls import Call
from plugins.frontends.openai_http.convert import Caller, Defaults
from plugins.frontends.openai_http.drain import Drain
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
    defaults: Defaults

    @classmethod
    def build(cls, settings: Settings, context: FrontendContext) -> Service:
        model = context.front.model
        one = settings.served_model_name
        served = (one,) if one is not None else context.served_names or (model.name,)
        bounds = settings.bounds
        bodies = Bodies(
            bounded(ChatBody, bounds),
            bounded(CompletionBody, bounds),
            bounded(TokenizeBody, bounds),
            DetokenizeBody,
        )
        config = model.generation_config if settings.default_sampling == "model" else {}
        defaults = Defaults.of_model(settings.default_max_tokens, config)
        return cls(settings, context, Drain(context.drain_timeout), served, bodies, defaults)

    @property
    def front(self) -> FrontHalf:
        return self.context.front

    @property
    def tokenizer(self) -> Tokenizer:
        return self.front.renderer.tokenizer

    def health(self) -> Health:
        health = self.front.health()
        return Health("draining", health.step_age) if self.drain.draining else health

    def caller(self, request: Request, prefix: str) -> Caller:
        return Caller(f"{prefix}-{uuid.uuid4().hex}", request.scope.get(TENANT, ""))

    def answer(self, requests: Sequence[GenerateRequest], shape: Shape, body: Sampling) -> AnswerResponse:
        delivery = Delivery(
            stream=bool(body.stream),
            include_usage=includes_usage(body),
            keep_alive_seconds=self.settings.keep_alive_seconds,
            write_seconds=self.settings.limits.write_seconds,
        )
        return AnswerResponse(Call(self.front, requests, self.drain), shape, delivery)

    async def text_of(self, token_ids: Sequence[int], param: str) -> str:
        """Raises RequestError for an id past the vocabulary."""
        size = max(self.front.model.vocab_size, self.tokenizer.vocab_size)
        if max(token_ids, default=0) >= size:
            raise RequestError(f"`{param}` holds a token id that is not below {size}.", param=param)
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, False)


def includes_usage(body: Sampling) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
