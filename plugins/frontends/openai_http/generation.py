"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from fastapi import Request, Response

from core.stages.renderer import Prompt, TextPrompt, TokenPrompt
from plugins.frontends.openai_http.answer import Head
from plugins.frontends.openai_http.chat import ChatShape
from plugins.frontends.openai_http.completions import CompletionShape
from plugins.frontends.openai_http.convert import chat_request, check_model, completion_requests
from plugins.frontends.openai_http.messages import chat_prompt, prompts
from plugins.frontends.openai_http.response_format import grammar_of
from plugins.frontends.openai_http.schema import CompletionBody
from plugins.frontends.openai_http.service import Service, includes_usage
from plugins.frontends.openai_http.tools import GrammarParsers, calls_of, grammar_beside_calls, tool_use
from plugins.frontends.reasoning import reasoning_of, with_shown


class Generation:
    def __init__(self, service: Service):
        self._service = service

    async def chat(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, service.bodies.chat)
        model = check_model(body.model, service.served)
        prompt = chat_prompt(body, body.messages, service.settings.bounds)
        parser = service.front.tool_parser
        calls = calls_of(parser, prompt.tools or (), body.n or 1)
        known = GrammarParsers(service.context.grammar_parser, service.context.grammar_parsers)
        asked = grammar_beside_calls(tool_use(body), parser, grammar_of(body), known)
        generate = chat_request(body, prompt, service.caller(request, "chatcmpl"), service.defaults, asked)
        markers = (*service.front.reasoning_parser.special_tokens, *(parser.special_tokens if calls else ()))
        generate = with_shown(generate, service.tokenizer, markers)
        shape = ChatShape(
            Head(generate.request_id, model),
            service.tokenizer,
            n=generate.params.n,
            num_top=generate.params.logprobs,
            num_prompt_top=body.prompt_logprobs,
            include_usage=includes_usage(body),
            return_token_ids=bool(body.return_token_ids),
            calls=calls,
            reasoning=[reasoning_of(service.front, generate) for _ in range(generate.params.n)],
        )
        return service.answer([generate], shape, body)

    async def completions(self, request: Request) -> Response:
        service = self._service
        body = await service.read(request, service.bodies.completion)
        model = check_model(body.model, service.served)
        add_special = body.add_special_tokens is not False
        asked = prompts(body.prompt, service.settings.bounds, add_special)
        caller = service.caller(request, "cmpl")
        generates = completion_requests(body, asked, caller, service.defaults, grammar_of(body))
        shape = CompletionShape(
            Head(caller.request_id, model),
            service.tokenizer,
            n=generates[0].params.n,
            num_kept=body.n or 1,
            num_top=body.logprobs,
            num_prompt_top=body.prompt_logprobs,
            include_usage=includes_usage(body),
            return_token_ids=bool(body.return_token_ids),
            echo=await self._echo(body, asked),
        )
        return service.answer(generates, shape, body)

    async def _echo(self, body: CompletionBody, asked: list[Prompt]) -> list[str]:
        return [await self._text(prompt) for prompt in asked] if body.echo else []

    async def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        assert isinstance(prompt, TokenPrompt)
        return await self._service.text_of(prompt.token_ids, "prompt")
