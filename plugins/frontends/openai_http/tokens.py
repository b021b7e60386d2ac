"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from core.errors import RequestError
from core.stages.renderer import Prompt, TextPrompt
from plugins.frontends.openai_http.convert import check_model
from plugins.frontends.openai_http.errors import json_response
from plugins.frontends.openai_http.messages import chat_prompt
from plugins.frontends.openai_http.schema import TokenizeBody
from plugins.frontends.openai_http.service import Service


class Tokens:
    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, service.bodies.tokenize)
        check_model(body.model, service.served)
        rendered = await service.front.render(self._prompt(body))
        answer: dict[str, Any] = {
            "count": len(rendered.token_ids),
            "max_model_len": service.front.model.max_model_len,
            "tokens": rendered.token_ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in rendered.token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, service.bodies.detokenize)
        check_model(body.model, service.served)
        return json_response({"prompt": await service.text_of(body.tokens, "tokens")})

    def _prompt(self, body: TokenizeBody) -> Prompt:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Send either `prompt` or `messages`.", param="prompt", code="missing_field")
        if body.messages is not None:
            if body.add_special_tokens:
                message = "`add_special_tokens` has no effect on `messages`: the chat template writes them."
                raise RequestError(message, param="add_special_tokens", code="unsupported")
            return chat_prompt(body, body.messages, self._service.settings.bounds)
        return TextPrompt(body.prompt or "", body.add_special_tokens is not False)
