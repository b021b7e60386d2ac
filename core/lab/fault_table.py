"""What a failing plugin does to others: each stage × each kind of fault, with 32 requests running.

In each cell one request (`victim`) meets the fault. Promised: every other request ends with the tokens it gets alone, the
victim fails with an error that names the plugin or is not hurt, and nothing that requests held is left behind. A cell of
the kind "mutate" is run once for each thing that the stage could change, and shows the worst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from core.errors import NonetError
from core.session import Session, open_session
from core.stages.frontend import GenerateRequest
from core.stages.reasoning_parser import ReasoningStream
from core.stages.tool_parser import ToolStream
from core.testing.harness.faulty import AFTER_TOKENS, KINDS, NAN, VICTIM, Changes, Fault
from core.testing.harness.faulty_pipelines import PLUGIN, WRAPPERS, with_fault
from core.testing.harness.pipelines import RunningPipeline, call, joined

GROUPS = ("frontend", *WRAPPERS)
NUM_REQUESTS = 32
MAX_TOKENS = 20  # a new KV block is needed after the fault is due
NEEDS = {
    "logits_processors": ("logits_processors=[min_tokens]",),
    "observers": ("observers=[prometheus]",),
    "tool_parser": ("tool_parser=hermes",),
    "reasoning_parser": ("reasoning_parser=think",),
    "predictor": ("scheduler=srtf",),
}
HURT_NOBODY = ("observers", "predictor")
"""Whatever these do, requests end as they would; what a predictor does wrong is reported."""
LEFT_OUT = frozenset({("quant", "mutate"), ("quant", "wrong shape"), ("quant", "block")})
"""A quantization is a part of the model's own code, and checks around each of its products would cost every step: a changed input
cannot be told from a wrong product (`plugins check` has a test for it), and a wrong shape or a block fails or is reported as the
model's, alone."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One stage, one kind of fault."""

    group: str
    kind: str
    fired: int  # how often the fault was met
    others_equal: int  # of `NUM_REQUESTS` - 1: those that ended with the tokens of a solo run
    victim: str  # "unhurt", or the error that it ended with
    incident: str  # what the pipeline says of the plugin
    whole: str  # "" where nothing is left behind
    seconds: float
    change: str = ""  # what was changed, of the kind "mutate"

    @property
    def problem(self) -> str:
        """ "" where all is as promised."""
        if not self.fired:
            return "the fault was not met"
        if self.others_equal != NUM_REQUESTS - 1:
            return f"{NUM_REQUESTS - 1 - self.others_equal} of the others were hurt"
        if self.whole:
            return self.whole
        if self.victim != "unhurt" and self.group != "frontend" and PLUGIN.distribution not in self.victim:
            return f"the error does not name the plugin: {self.victim}"
        if self.victim == "unhurt" and self.kind in ("raise", "wrong shape", "NaN") and self.group not in HURT_NOBODY:
            return "the victim noticed nothing"
        if self.group == "predictor" and self.kind in ("raise", "wrong shape", "NaN") and not self.incident:
            return "the fault was not reported"
        if self.kind == "block" and self.group != "frontend" and not self.incident:
            return f"the block was not reported: {self.incident or 'no incident'}"
        return ""

    @property
    def word(self) -> str:
        if self.problem:
            return "BROKEN"
        return "unhurt" if self.victim == "unhurt" else "fails alone"


def requests() -> list[GenerateRequest]:
    """31 requests and, among them, the victim."""
    calls = [call(f"r{index}", f"story number {index}", MAX_TOKENS) for index in range(NUM_REQUESTS - 1)]
    return [*calls[:16], call(VICTIM, f"{VICTIM} of a fault", MAX_TOKENS), *calls[16:]]


@asynccontextmanager
async def _running(session: Session) -> AsyncIterator[RunningPipeline]:
    pipeline = RunningPipeline(session)
    await pipeline.front.start(lambda what, done, total: None)
    try:
        yield pipeline
    finally:
        await pipeline.front.close()


async def solo_tokens(session: Session) -> dict[str, list[int]]:
    """By request id: what each gets when it runs alone."""
    async with _running(session) as pipeline:
        return {r.request_id: (await pipeline.answer(r)).token_ids for r in requests()}


async def run_cell(session: Session, group: str, kind: str, solo: Mapping[str, list[int]], block_s: float) -> Cell:
    """Every change that the stage could make in turn, where `kind` is "mutate"."""
    fault = Fault(kind, block_s)
    cells = [await _run_fault(session, group, fault, solo)]
    for change in range(1, len(fault.changes)):
        cells.append(await _run_fault(session, group, Fault(kind, block_s, change), solo))
    worst = max(cells, key=lambda cell: (bool(cell.problem), cell.victim != "unhurt"))
    return replace(worst, seconds=sum(cell.seconds for cell in cells))


async def _run_fault(session: Session, group: str, fault: Fault, solo: Mapping[str, list[int]]) -> Cell:
    with ExitStack() as stack:
        if group in WRAPPERS:
            description = stack.enter_context(with_fault(session.description, group, fault))
            session = replace(session, description=description)
        return await _measured(session, group, fault, solo)


async def _incidents(pipeline: RunningPipeline, fault: Fault) -> list[str]:
    """What is said of the plugin. An observer runs beside the requests: its block may be told after they have ended."""
    deadline = time.monotonic() + (fault.block_s + 1.0 if fault.kind == "block" else 0.1)
    while True:
        await asyncio.sleep(0.1)
        found = [i.reason for i in pipeline.front.incidents() if PLUGIN.distribution in f"{i.plugin} {i.reason}"]
        if found or time.monotonic() > deadline:
            return found


async def _measured(session: Session, group: str, fault: Fault, solo: Mapping[str, list[int]]) -> Cell:
    started = time.perf_counter()
    async with _running(session) as pipeline:
        runs = {r.request_id: _answer(pipeline, r, fault, group) for r in requests()}
        found = dict(zip(runs, await asyncio.gather(*runs.values(), return_exceptions=True), strict=True))
        incidents = await _incidents(pipeline, fault)
        whole = await _leftovers(pipeline)
    return Cell(
        group=group,
        kind=fault.kind,
        fired=fault.fired,
        others_equal=sum(found[name] == solo[name] for name in solo if name != VICTIM),
        victim=_outcome(found[VICTIM], solo[VICTIM]),
        incident="; ".join(incidents),
        whole=whole,
        seconds=time.perf_counter() - started,
        change=fault.changes[fault.change] if fault.changes else "",
    )


async def _answer(pipeline: RunningPipeline, request: GenerateRequest, fault: Fault, group: str) -> list[int]:
    if group == "frontend" and request.request_id == VICTIM:
        return await _faulty_call(pipeline, request, fault)
    if group == "tool_parser":
        return await _parsed_call(pipeline, request, _tool_stream(pipeline, request))
    if group == "reasoning_parser":
        return await _parsed_call(pipeline, request, pipeline.front.reasoning_parser.stream(request.request_id))
    return (await pipeline.answer(request)).token_ids


def _tool_stream(pipeline: RunningPipeline, request: GenerateRequest) -> ToolStream:
    tool = {"type": "function", "function": {"name": request.request_id, "parameters": {"type": "object"}}}
    return pipeline.front.tool_parser.stream([tool])


async def _parsed_call(
    pipeline: RunningPipeline, request: GenerateRequest, stream: ToolStream | ReasoningStream
) -> list[int]:
    """As a frontend streams a chat: each delta's text through the stream of its choice."""
    outputs, content = [], ""
    async with aclosing(pipeline.front.generate(request)) as deltas:
        async for output in deltas:
            outputs.append(output)
            content += "".join(stream.push(part.text).content for part in output.outputs)
    content += stream.finish().content
    answer = joined(outputs)
    assert content == answer.text, f"the content is {content!r}, the text {answer.text!r}"
    return answer.token_ids


async def _faulty_call(pipeline: RunningPipeline, request: GenerateRequest, fault: Fault) -> list[int]:
    """A frontend's own faults: it makes a wrong request, or misbehaves while it is answered."""
    wrong: Any = {"wrong shape": {"prompt": 17}, "NaN": {"priority": NAN}}.get(fault.kind)
    if wrong is not None:
        fault.strike({})
        request = replace(request, **wrong)
    outputs = []
    async with aclosing(pipeline.front.generate(request)) as deltas:
        async for output in deltas:
            outputs.append(output)
            if wrong is None and len(outputs) == AFTER_TOKENS:
                fault.strike(_changes_of(request, output))
    return joined(outputs).token_ids


def _changes_of(request: GenerateRequest, output: Any) -> Changes:
    return {
        "the prompt it was handed": lambda: output.prompt_token_ids.clear(),
        "another prompt in its request": lambda: object.__setattr__(request, "prompt", None),
        "params of its request": lambda: request.params.logit_bias.update({1: NAN}),
    }


def _outcome(found: object, alone: list[int]) -> str:
    if isinstance(found, BaseException):
        return str(found) if isinstance(found, NonetError) else f"{type(found).__name__}: {found}"
    return "unhurt" if found == alone else f"other tokens: {found}"


async def _leftovers(pipeline: RunningPipeline) -> str:
    try:
        await pipeline.assert_whole()
    except AssertionError as error:
        return f"left behind: {error or 'blocks'}"
    return ""


def check_config(overrides: Sequence[str], groups: Sequence[str] = GROUPS) -> None:
    """Raises ConfigError or PluginError for overrides that a row of the table could not be run with. Reads no model."""
    for group in ("", *groups):
        open_session([*overrides, *_fixed(5.0), *NEEDS.get(group, ())])


async def fault_table(
    overrides: Sequence[str], groups: Sequence[str] = GROUPS, kinds: Sequence[str] = KINDS, block_s: float = 5.0
) -> list[Cell]:
    """Every cell. `overrides` choose the model; it runs in float32, so that tokens can be compared."""
    fixed = _fixed(block_s)
    cells, solo = [], await solo_tokens(open_session([*overrides, *fixed]))
    for group in groups:
        session = open_session([*overrides, *fixed, *NEEDS.get(group, ())])
        cells += [
            await run_cell(session, group, kind, solo, block_s) for kind in kinds if (group, kind) not in LEFT_OUT
        ]
    return cells


def _fixed(block_s: float) -> tuple[str, ...]:
    return (
        "process.separate=false",
        "model.dtype=float32",
        f"plugins.block_timeout={block_s / 2}",
        "plugins.on_failure=disable",
    )


def as_table(cells: Sequence[Cell]) -> str:
    """Stages down, kinds across; below it what is broken, and one line of figures."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    lines = [f"{'stage':<20}" + "".join(f"{kind:<14}" for kind in kinds)]
    for group in dict.fromkeys(cell.group for cell in cells):
        words = {cell.kind: cell.word for cell in cells if cell.group == group}
        lines.append(f"{group:<20}" + "".join(f"{words.get(kind, '-'):<14}" for kind in kinds))
    broken = [cell for cell in cells if cell.problem]
    lines += [
        f"{cell.group} × {cell.kind}{f' of {cell.change}' * bool(cell.change)}: {cell.problem}" for cell in broken
    ]
    unhurt = sum(cell.others_equal for cell in cells)
    lines.append(
        f"{len(cells)} cells, {len(cells) - len(broken)} as promised; {unhurt} of {len(cells) * (NUM_REQUESTS - 1)} "
        "other requests ended with the tokens of a solo run"
    )
    return "\n".join(lines)
