"""Plugins that fail on purpose: one wrong thing is done to the request called `victim`, by a wrapper of one component.

The wrappers of stages 2 to 6, 8 and 9 are here; `core.testing.harness.faulty_model` has those that run with the model. What a
wrapper does is one of `KINDS`: it raises, returns the wrong shape or type, returns NaN, blocks, or changes what is not its
own, in each of several ways in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from core.batch import SamplerOutput, SchedulerOutput, Verdict
from core.outputs import TokenDelta
from core.request import FinishReason, Request, RequestStatus
from core.stages.detokenizer import TextDelta
from core.stages.reasoning_parser import SplitText
from core.stages.renderer import RenderedPrompt, TextPrompt
from core.stages.tool_parser import ParsedText, ToolCallDelta

KINDS = ("raise", "wrong shape", "NaN", "block", "mutate")
VICTIM = "victim"
AFTER_TOKENS = 3  # output tokens of the victim, before its fault
NAN = math.nan

Changes = Mapping[str, Callable[[], object]]  # what is changed -> how; a fault of the kind "mutate" makes one of them


@dataclass(slots=True)
class Fault:
    """What goes wrong, and how often it has. `change`: which of the wrapper's changes a fault of the kind "mutate" makes."""

    kind: str
    block_s: float = 5.0
    change: int = 0
    fired: int = 0
    changes: tuple[str, ...] = ()  # all that there are, once it has been met
    victim_rows: slice | None = None  # of the T axis in the forward pass in hand: for what is told of no request
    _blocked: bool = False

    def strike(self, changes: Changes) -> str:
        """Raise, block (once) or change something; for the two others the wrapper makes the value. Returns the kind."""
        self.fired += 1
        if self.kind == "raise":
            raise RuntimeError("a fault was injected")
        if self.kind == "mutate" and changes:
            self.changes = tuple(changes)
            changes[self.changes[self.change]]()
        if self.kind == "block" and not self._blocked:
            self._blocked = True
            time.sleep(self.block_s)
        return self.kind


def is_victim(request_id: str) -> bool:
    return VICTIM in request_id


def is_due(request: Request) -> bool:
    return is_victim(request.request_id) and request.num_output_tokens >= AFTER_TOKENS


def changes_of(request: Request) -> Changes:
    """What a plugin that is shown a request may do to it."""
    return {
        "an output id more": lambda: request.output_token_ids.append(1),
        "another list of output ids": lambda: setattr(request, "output_token_ids", []),
        "another prompt": lambda: setattr(request, "prompt_token_ids", [1]),
        "num_computed_tokens": lambda: setattr(request, "num_computed_tokens", 0),
        "status": lambda: setattr(request, "status", RequestStatus.FINISHED_STOPPED),
    }


@dataclass(slots=True)
class Wrapper:
    """A component that is itself but for what a subclass overrides."""

    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(slots=True)
class FaultyRenderer(Wrapper):
    def render(self, prompt: Any) -> Any:
        if not (isinstance(prompt, TextPrompt) and prompt.text.startswith(VICTIM)):
            return self.inner.render(prompt)
        kind = self.fault.strike(
            {
                "text": lambda: object.__setattr__(prompt, "text", "another prompt"),
                "add_special_tokens": lambda: object.__setattr__(prompt, "add_special_tokens", None),
            }
        )
        rendered: RenderedPrompt = self.inner.render(prompt)
        if kind == "wrong shape":
            return [rendered.token_ids]
        if kind == "NaN":
            return replace(rendered, token_ids=[*rendered.token_ids, NAN])  # type: ignore[list-item]
        return rendered


@dataclass(slots=True)
class FaultyAdmission:
    inner: Any
    fault: Fault

    def check_room(self, num_choices: int, load: Any) -> None:
        self.inner.check_room(num_choices, load)

    def admit(self, request: Any, prompt_token_ids: list[int], params: Any, load: Any) -> Any:
        admitted = self.inner.admit(request, prompt_token_ids, params, load)
        if not is_victim(request.request_id):
            return admitted
        kind = self.fault.strike(
            {
                "prompt": lambda: prompt_token_ids.append(1),
                "logit_bias": lambda: params.logit_bias.update({1: 100.0}),
            }
        )
        if kind == "wrong shape":
            return admitted[0]
        if kind == "NaN":
            return tuple(msgspec.structs.replace(message, arrival_time=NAN) for message in admitted)
        return admitted


@dataclass(slots=True)
class FaultyScheduler(Wrapper):
    def schedule(self) -> Any:
        plan: SchedulerOutput = self.inner.schedule()
        due = [part for part in plan.scheduled if is_due(part.request)]
        if not due:
            return plan
        kind = self.fault.strike(changes_of(due[0].request))
        if kind == "wrong shape":
            return replace(plan, scheduled=(*plan.scheduled, due[0]))
        if kind == "NaN":
            bad = msgspec.structs.replace(due[0], num_tokens=NAN)
            return replace(plan, scheduled=tuple(bad if part is due[0] else part for part in plan.scheduled))
        return plan


@dataclass(slots=True)
class FaultyPrefill:
    inner: Any
    fault: Fault

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> Any:
        if is_victim(request.request_id):
            kind = self.fault.strike(changes_of(request))
            if kind in ("wrong shape", "NaN"):
                return (remaining,) if kind == "wrong shape" else NAN
        return self.inner.num_tokens(request, remaining, token_budget)


@dataclass(slots=True)
class FaultyDecode:
    inner: Any
    fault: Fault

    def propose(self, requests: Sequence[Request]) -> Any:
        drafts: Mapping[str, tuple[int, ...]] = self.inner.propose(requests)
        for request in requests:
            if is_due(request):
                kind = self.fault.strike(changes_of(request))
                wrong = {"wrong shape": ("one", 2), "NaN": (NAN,)}.get(kind)
                if wrong is not None:
                    return {**drafts, request.request_id: wrong}
        return drafts


@dataclass(slots=True)
class FaultyDetokenizer(Wrapper):
    _seen: dict[str, int] = field(default_factory=dict)

    def push(self, deltas: Sequence[TokenDelta]) -> Any:
        for delta in deltas:
            self._seen[delta.request_id] = self._seen.get(delta.request_id, 0) + len(delta.token_ids)
        due = [d for d in deltas if is_victim(d.request_id) and self._seen[d.request_id] > AFTER_TOKENS]
        kind = self.fault.strike(_changes_of_delta(due[0])) if due else ""
        texts: list[TextDelta] = self.inner.push(deltas)
        if kind not in ("wrong shape", "NaN"):
            return texts
        wrong: Any = {"text": 17} if kind == "wrong shape" else {"token_ids": (NAN,)}
        return [replace(text, **wrong) if is_victim(text.request_id) else text for text in texts]


def _changes_of_delta(delta: TokenDelta) -> Changes:
    return {
        "an id more": lambda: delta.token_ids.append(1),
        "no ids": delta.token_ids.clear,
        "an end": lambda: setattr(delta, "finish_reason", FinishReason.STOP),
    }


@dataclass(slots=True)
class FaultyCompletion:
    inner: Any
    fault: Fault

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
        verdicts = dict(self.inner.judge(output, sampled))
        for part in output.scheduled:
            request = part.request
            if is_due(request) and request.request_id in verdicts:
                kind = self.fault.strike(changes_of(request))
                wrong: Any = {"wrong shape": "stop", "NaN": Verdict((NAN,))}.get(kind)  # type: ignore[arg-type]
                if wrong is not None:
                    verdicts[request.request_id] = wrong
        return verdicts


@dataclass(slots=True)
class FaultyCache(Wrapper):
    def allocate(self, request: Request, num_tokens: int) -> Any:
        if is_due(request):
            kind = self.fault.strike(changes_of(request))
            if kind in ("wrong shape", "NaN"):
                return "yes" if kind == "wrong shape" else NAN
        return self.inner.allocate(request, num_tokens)


@dataclass(slots=True)
class FaultyToolParser:
    """Its victim is the request with a tool of that name: a parser is told of no request."""

    inner: Any
    fault: Fault

    def stream(self, tools: Any) -> Any:
        stream = self.inner.stream(tools)
        if any(is_victim(tool["function"]["name"]) for tool in tools):
            return FaultyToolStream(stream, self.fault, tools)
        return stream


@dataclass(slots=True)
class FaultyToolStream:
    inner: Any
    fault: Fault
    tools: Any
    _num_pieces: int = 0

    def push(self, text: str) -> Any:
        self._num_pieces += 1
        parsed = self.inner.push(text)
        if self._num_pieces <= AFTER_TOKENS:
            return parsed
        kind = self.fault.strike(
            {"tools": self.tools.clear, "a tool": lambda: self.tools[0]["function"].update(name="other")}
        )
        wrong: Any = {"wrong shape": {"content": text}, "NaN": _CALL_OF_NAN}.get(kind)
        return parsed if wrong is None else wrong

    def finish(self) -> Any:
        return self.inner.finish()


_CALL_OF_NAN = ParsedText("", (ToolCallDelta(0, name="f", arguments=NAN),))  # type: ignore[arg-type]


@dataclass(slots=True)
class FaultyReasoningParser(Wrapper):
    """Its victim is the answer to a prompt that ends so: a parser is told of no request, and is given nothing to change."""

    def stream(self, prompt: str) -> Any:
        stream = self.inner.stream(prompt)
        return FaultySplit(stream, self.fault) if is_victim(prompt) else stream


@dataclass(slots=True)
class FaultySplit:
    inner: Any
    fault: Fault
    _num_pieces: int = 0

    def push(self, text: str) -> Any:
        self._num_pieces += 1
        split = self.inner.push(text)
        if self._num_pieces <= AFTER_TOKENS:
            return split
        kind = self.fault.strike({})
        wrong: Any = {"wrong shape": text, "NaN": SplitText(NAN)}.get(kind)  # type: ignore[arg-type]
        return split if wrong is None else wrong

    def finish(self) -> Any:
        return self.inner.finish()


@dataclass(slots=True)
class FaultyPredictor(Wrapper):
    def remaining(self, request: Request) -> Any:
        if is_victim(request.request_id):
            kind = self.fault.strike(changes_of(request))
            if kind in ("wrong shape", "NaN"):
                return "many" if kind == "wrong shape" else NAN
        return self.inner.remaining(request)


@dataclass(slots=True)
class FaultyObserver:
    inner: Any
    fault: Fault

    def step_finished(self, stats: Any) -> Any:
        if not stats.num_requests:
            return None
        kind = self.fault.strike(
            {
                "a number": lambda: setattr(stats, "num_requests", 10**9),
                "a number, around the lock": lambda: object.__setattr__(stats, "num_requests", 10**9),
            }
        )
        return {"wrong shape": [stats], "NaN": NAN}.get(kind)

    def request_finished(self, record: Any) -> None:
        if self.fault.kind != "mutate":
            self.fault.strike({})

    def close(self) -> None:
        self.inner.close()
