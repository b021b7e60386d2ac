"""Plugins that fail on purpose: a wrapper per stage that does one wrong thing to the request called `victim`.

Each wraps the configured component, so that all other requests go through the real one. What a wrapper does is one of
`KINDS`: it raises, returns the wrong shape or type, returns NaN, blocks, or changes what is not its own.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core.batch import ModelBatch, SampledRow, SamplerOutput, SamplingMetadata, SchedulerOutput, Verdict
from core.hookspecs import Component
from core.model.interface import StepResult
from core.outputs import TokenDelta
from core.pipeline import Part, PipelineDescription
from core.plugins import PluginRecord, import_target
from core.request import Request
from core.stages.detokenizer import TextDelta
from core.stages.renderer import RenderedPrompt, TextPrompt

KINDS = ("raise", "wrong shape", "NaN", "block", "mutate")
VICTIM = "victim"
AFTER_TOKENS = 3  # output tokens of the victim, before its fault
NAN = math.nan


@dataclass(slots=True)
class Fault:
    """What goes wrong, and how often it has."""

    kind: str
    block_s: float = 5.0
    fired: int = 0
    _blocked: bool = False

    def strike(self, mutate: Callable[[], object]) -> str:
        """Raise, block (once) or mutate; for the two others the wrapper makes the value. Returns the kind."""
        self.fired += 1
        if self.kind == "raise":
            raise RuntimeError("a fault was injected")
        if self.kind == "mutate":
            mutate()
        if self.kind == "block" and not self._blocked:
            self._blocked = True
            time.sleep(self.block_s)
        return self.kind


def is_victim(request_id: str) -> bool:
    return VICTIM in request_id


def is_due(request: Request) -> bool:
    return is_victim(request.request_id) and request.num_output_tokens >= AFTER_TOKENS


@dataclass(slots=True)
class FaultyRenderer:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def render(self, prompt: Any) -> Any:
        if not (isinstance(prompt, TextPrompt) and prompt.text.startswith(VICTIM)):
            return self.inner.render(prompt)
        kind = self.fault.strike(lambda: object.__setattr__(prompt, "text", "another prompt"))
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
        kind = self.fault.strike(lambda: prompt_token_ids.append(1))
        if kind == "wrong shape":
            return admitted[0]
        if kind == "NaN":
            return tuple(_with(message, arrival_time=NAN) for message in admitted)
        return admitted


def _with(message: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(message, **changes)


@dataclass(slots=True)
class FaultyScheduler:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self) -> Any:
        plan: SchedulerOutput = self.inner.schedule()
        due = [part for part in plan.scheduled if is_due(part.request)]
        if not due:
            return plan
        kind = self.fault.strike(lambda: due[0].request.output_token_ids.append(1))
        if kind == "wrong shape":
            return replace(plan, scheduled=(*plan.scheduled, due[0]))
        if kind == "NaN":
            bad = replace(due[0], num_tokens=NAN)  # type: ignore[arg-type]
            return replace(plan, scheduled=tuple(bad if part is due[0] else part for part in plan.scheduled))
        return plan


@dataclass(slots=True)
class FaultyPrefill:
    inner: Any
    fault: Fault

    def num_tokens(self, request: Request, remaining: int, token_budget: int) -> Any:
        if is_victim(request.request_id):
            kind = self.fault.strike(lambda: request.prompt_token_ids.append(1))
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
                kind = self.fault.strike(lambda request=request: request.output_token_ids.append(1))  # type: ignore[misc]
                wrong = {"wrong shape": ("one", 2), "NaN": (NAN,)}.get(kind)
                if wrong is not None:
                    return {**drafts, request.request_id: wrong}
        return drafts


@dataclass(slots=True)
class FaultySampler:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> Any:
        due = _due_rows(metadata)
        if not due:
            return self.inner.sample(logits, metadata)
        row = metadata.rows[due[0]]
        kind = self.fault.strike(lambda: row.output_token_ids.append(1))
        sampled: SamplerOutput = self.inner.sample(logits, metadata)
        wrong: Any = {"wrong shape": [["one"]], "NaN": (NAN,)}.get(kind)
        if wrong is None:
            return sampled
        return replace(sampled, token_ids={**sampled.token_ids, row.request_id: wrong})


def _due_rows(metadata: SamplingMetadata) -> list[int]:
    return [
        index for index, row in enumerate(metadata.rows) if is_victim(row.request_id) and row.position >= AFTER_TOKENS
    ]


@dataclass(slots=True)
class FaultyDetokenizer:
    inner: Any
    fault: Fault
    _seen: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def push(self, deltas: Sequence[TokenDelta]) -> Any:
        for delta in deltas:
            self._seen[delta.request_id] = self._seen.get(delta.request_id, 0) + len(delta.token_ids)
        due = [d for d in deltas if is_victim(d.request_id) and self._seen[d.request_id] > AFTER_TOKENS]
        kind = self.fault.strike(lambda: due[0].token_ids.append(1)) if due else ""
        texts: list[TextDelta] = self.inner.push(deltas)
        if kind not in ("wrong shape", "NaN"):
            return texts
        wrong: Any = {"text": 17} if kind == "wrong shape" else {"token_ids": (NAN,)}
        return [replace(text, **wrong) if is_victim(text.request_id) else text for text in texts]


@dataclass(slots=True)
class FaultyCompletion:
    inner: Any
    fault: Fault

    def judge(self, output: SchedulerOutput, sampled: SamplerOutput) -> Any:
        verdicts = dict(self.inner.judge(output, sampled))
        for part in output.scheduled:
            request = part.request
            if is_due(request) and request.request_id in verdicts:
                kind = self.fault.strike(lambda request=request: request.output_token_ids.append(1))  # type: ignore[misc]
                wrong: Any = {"wrong shape": "stop", "NaN": Verdict((NAN,))}.get(kind)  # type: ignore[arg-type]
                if wrong is not None:
                    verdicts[request.request_id] = wrong
        return verdicts


@dataclass(slots=True)
class FaultyModel:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        due = _due_rows(batch.sampling)
        if not due:
            return self.inner.forward(batch, kv_caches)  # type: ignore[no-any-return]
        kind = self.fault.strike(lambda: batch.sampling.rows[due[0]].output_token_ids.append(1))
        logits: torch.Tensor = self.inner.forward(batch, kv_caches)
        if kind == "wrong shape":
            return logits[:, :-1]
        if kind == "NaN":
            logits = logits.clone()
            logits[batch.sampling.sampled_rows[due[0]]] = NAN
        return logits


@dataclass(slots=True)
class FaultyAttention:
    inner: Any
    fault: Fault
    _rows: slice | None = None  # of the victim, in the batch that was prepared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def prepare(self, batch: ModelBatch, specs: Any) -> Any:
        self._rows = None
        rows = [row for index in _due_rows(batch.sampling) for row in (batch.sampling.rows[index],)]
        if rows:
            index = batch.request_ids.index(rows[0].request_id)
            start, end = batch.query_start_loc.tolist()[index : index + 2]
            self._rows = slice(start, end)
            self.fault.strike(lambda: rows[0].output_token_ids.append(1))
        return self.inner.prepare(batch, specs)

    def forward(self, spec: Any, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any) -> torch.Tensor:
        out: torch.Tensor = self.inner.forward(spec, q, k, v, kv_cache, metadata)
        if self._rows is not None and self.fault.kind == "wrong shape":
            return out[:, :-1]
        if self._rows is not None and self.fault.kind == "NaN":
            out[self._rows] = NAN
        return out


@dataclass(slots=True)
class FaultyExecutor:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: ModelBatch) -> Any:
        due = _due_rows(batch.sampling)
        if not due:
            return self.inner.submit(batch)
        row: SampledRow = batch.sampling.rows[due[0]]
        kind = self.fault.strike(lambda: row.output_token_ids.append(1))
        done = self.inner.submit(batch)
        return Changed(done, row.request_id, kind) if kind in ("wrong shape", "NaN") else done


@dataclass(frozen=True, slots=True)
class Changed:
    """A submission whose result is spoilt for one request."""

    inner: Any
    request_id: str
    kind: str

    def result(self) -> Any:
        result: StepResult = self.inner.result()
        if self.kind == "wrong shape":
            return (result.sampled, 0.0)
        token_ids: Any = {**result.sampled.token_ids, self.request_id: (NAN,)}
        return replace(result, sampled=replace(result.sampled, token_ids=token_ids))


@dataclass(slots=True)
class FaultyCache:
    inner: Any
    fault: Fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def allocate(self, request: Request, num_tokens: int) -> Any:
        if is_due(request):
            kind = self.fault.strike(lambda: request.output_token_ids.append(1))
            if kind in ("wrong shape", "NaN"):
                return "yes" if kind == "wrong shape" else NAN
        return self.inner.allocate(request, num_tokens)


@dataclass(slots=True)
class FaultyLogitsProcessor:
    """Concerned with every request, and harmless to all but the victim."""

    inner: Any
    fault: Fault

    def state(self, row: SampledRow, params: Any) -> object:
        return row.request_id

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow], states: Sequence[Any]) -> None:
        for index, row in enumerate(rows):
            if is_victim(row.request_id) and row.position >= AFTER_TOKENS:
                kind = self.fault.strike(lambda row=row: row.output_token_ids.append(1))  # type: ignore[misc]
                if kind == "wrong shape":
                    logits.resize_(logits.shape[0], logits.shape[1] - 1)
                if kind == "NaN":
                    logits[index] = NAN


@dataclass(slots=True)
class FaultyObserver:
    inner: Any
    fault: Fault

    def step_finished(self, stats: Any) -> Any:
        if stats.num_requests:
            kind = self.fault.strike(lambda: object.__setattr__(stats, "num_requests", 10**9))
            return {"wrong shape": [stats], "NaN": NAN}.get(kind)
        return None

    def request_finished(self, record: Any) -> None:
        self.fault.strike(lambda: setattr(record, "usage", None))

    def close(self) -> None:
        self.inner.close()


WRAPPERS: Mapping[str, Callable[[Any, Fault], Any]] = {
    "renderer": FaultyRenderer,
    "admission": FaultyAdmission,
    "scheduler": FaultyScheduler,
    "prefill": FaultyPrefill,
    "decode": FaultyDecode,
    "sampler": FaultySampler,
    "detokenizer": FaultyDetokenizer,
    "completion": FaultyCompletion,
    "model": FaultyModel,
    "attention": FaultyAttention,
    "cache": FaultyCache,
    "executor": FaultyExecutor,
    "logits_processors": FaultyLogitsProcessor,
    "observers": FaultyObserver,
}
"""By group. A fault of the frontend is one that its caller makes (`core.lab.fault_table`)."""

PLUGIN = PluginRecord("chaos", "acme-chaos", "1.0", "loaded")


def with_fault(description: PipelineDescription, group: str, fault: Fault) -> PipelineDescription:
    """The same pipeline with the (first) component of `group` wrapped, as if the plugin `chaos` provided it."""
    chosen = next(part for part in description.parts if part.group == group)
    parts = tuple(_wrapped(part, fault) if part is chosen else part for part in description.parts)
    return PipelineDescription(parts)


def _wrapped(part: Part, fault: Fault) -> Part:
    def make(settings: Any, context: Any) -> Any:
        inner = import_target(part.provided, part.provided.component.target)(settings, context)
        return WRAPPERS[part.group](inner, fault)

    name = f"made_{part.group}_{id(fault)}"
    setattr(sys.modules[__name__], name, make)  # a target is found by import
    old = part.provided.component
    component: Component = replace(old, target=f"{__name__}:{name}")
    return replace(part, provided=replace(part.provided, component=component, plugin=PLUGIN))
