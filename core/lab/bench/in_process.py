"""The engine in this process, with the whole pipeline before and behind it."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field

from core.errors import NonetError
from core.front.front import Front
from core.lab.bench.calls import Call, WorkItem
from core.lab.bench.steps import StepLog
from core.outputs import RequestOutput
from core.request import GrammarSpec, SamplingParams
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt


@dataclass(slots=True)
class FrontTarget:
    """See `core.lab.bench.calls.Target`. `log` is one of the front's taps."""

    front: Front
    log: StepLog
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def vocab_size(self) -> int:
        return self.front.model.vocab_size

    def counting(self) -> None:
        self.log.steps.clear()

    async def call(self, call: Call) -> None:
        item = call.item
        call.num_prompt_tokens = len(item.prompt_token_ids)
        name = f"bench-{next(self._numbers)}"
        request = GenerateRequest(name, TokenPrompt(item.prompt_token_ids), params(item), max_tokens=item.output_len)
        call.sent = time.perf_counter()
        try:
            async with aclosing(self.front.generate(request)) as outputs:
                async for output in outputs:
                    _take(call, output)
        except NonetError as error:
            call.error = str(error)
        call.ended = time.perf_counter()


def params(item: WorkItem) -> SamplingParams:
    grammar = None
    if item.schema is not None:
        grammar = GrammarSpec(kind="json_schema", source=json.dumps(item.schema), any_whitespace=False)
    return SamplingParams(temperature=item.temperature, seed=item.seed, ignore_eos=grammar is None, grammar=grammar)


def _take(call: Call, output: RequestOutput) -> None:
    if num := sum(len(choice.token_ids) for choice in output.outputs):
        call.arrivals.append(time.perf_counter())
        call.num_tokens += num
        call.num_first_tokens = num if len(call.arrivals) == 1 else call.num_first_tokens
    if output.usage is not None:
        call.num_cached_tokens = output.usage.cached_tokens
