"""A pipeline to simulate, put together from the same config and plugins as a real one, without a model.

Scheduler, cache, prefill, predictor and admission are built as assembly builds them. They run without guards: what raises ends
the run (`core.simulation.blame`). The decode stage is the simulator's own, for drafts cannot be verified without a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field

from core.assembly import build
from core.cache.kv_cache import CacheContext, CacheSettings, KVCache
from core.errors import ConfigError, PluginError
from core.isolation.faults import Names
from core.model.spec import ModelFiles, ModelSpec
from core.pipeline import Part, PipelineDescription
from core.request import ReadOnlyList, Request
from core.scheduling.swap_cost import SwapCost
from core.session import open_session
from core.simulation.cost import CostModel, load_cost
from core.stages.admission import Admission, AdmissionContext
from core.stages.predictor import Predictor, PredictorContext
from core.stages.prefill import Prefill, PrefillContext
from core.stages.scheduler import Scheduler, SchedulerContext, SchedulerSettings

S = TypeVar("S", bound=BaseModel)

MAX_STRIDE: Final = 256
DRAFTS: Final = tuple((0,) * count for count in range(MAX_STRIDE))


class SimulationSettings(BaseModel):
    """What the simulator itself is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cost: str = Field(default="gpu", description="what steps cost: cpu, gpu, or a JSON file that `simulate fit` wrote")
    stride: int = Field(
        default=1,
        ge=1,
        le=MAX_STRIDE,
        description="steps without a prompt that are planned at once, at most; 1: each step is planned",
    )


class SimulatedClock:
    """Seconds that move only when the simulator says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True, eq=False)
class SimulatedRequest(Request):
    """A request with what only a simulator knows of it."""

    row: int = 0  # of the outcomes
    left: int = 0  # tokens that it will still generate
    decoding: bool = False  # its newest token alone is to be computed
    num_written: int = 0  # computed tokens, while it is not decoding


class Stride:
    """Stage 6 of a simulation: proposes what the model would say, so that one plan covers several steps of decoding."""

    def __init__(self, longest: int):
        self.longest = longest
        self.length = 1  # of the next plan, in steps

    @property
    def proposes(self) -> bool:
        return self.length > 1

    def propose(self, requests: Sequence[Request]) -> Mapping[str, tuple[int, ...]]:
        most = self.length
        simulated = cast("Sequence[SimulatedRequest]", requests)
        return {r.request_id: DRAFTS[(r.left if r.left < most else most) - 1] for r in simulated}


@dataclass(frozen=True, slots=True)
class Simulation:
    """Everything that a run needs beside traffic. Good for one run."""

    scheduler: Scheduler
    cache: KVCache
    prefill: Prefill
    admission: Admission
    stride: Stride
    clock: SimulatedClock
    cost: CostModel
    max_num_scheduled_tokens: int
    max_model_len: int
    names: Names = field(default_factory=Names)  # of the components, for one that fails
    lengths: dict[str, int] = field(default_factory=dict)  # of live requests, for an oracle
    _prompts: dict[int, ReadOnlyList] = field(default_factory=dict)

    def prompt(self, length: int) -> ReadOnlyList:
        """Prompts hold no content: those of equal length share one list."""
        if length not in self._prompts:
            self._prompts[length] = ReadOnlyList([0] * length)
        return self._prompts[length]


def open_simulation(
    overrides: Sequence[str], settings: SimulationSettings | None = None, shares_content: bool = True
) -> Simulation:
    """From words of a config: `scheduler=srtf`, `scheduler.max_num_running_reqs=64`, `cache.num_blocks=4096` …

    `shares_content`: False where no two prompts are alike; then the cache is not asked to share. Raises ConfigError or
    PluginError as a real start does.
    """
    settings = settings or SimulationSettings()
    session = open_session(overrides)
    cost = load_cost(settings.cost)
    return build_simulation(
        session.description, cost, settings.stride, shares_content, session.settings.model.max_model_len
    )


def build_simulation(
    description: PipelineDescription,
    cost: CostModel,
    stride: int = 1,
    shares_content: bool = True,
    max_model_len: int | None = None,
) -> Simulation:
    """`max_model_len`: None: the cost model's."""
    _refuse_speculation(description.part("decode"))
    length, clock, lengths = max_model_len or cost.max_model_len, SimulatedClock(), dict[str, int]()
    limits = _checked(description.part("scheduler"), SchedulerSettings)
    cache = _build_cache(description.part("cache"), cost, length, shares_content)
    prefill: Prefill = build(description.part("prefill"), PrefillContext(limits.max_num_scheduled_tokens))
    predictor: Predictor = build(description.part("predictor"), PredictorContext(length, lengths.get))
    drafts = Stride(stride if "drafts" in description.part("scheduler").provided.component.provides else 1)
    context = SchedulerContext(cache, prefill, drafts, clock, length, _swap_cost(cache, cost), predictor)
    scheduler: Scheduler = build(description.part("scheduler"), context)
    _refuse_stride(stride, scheduler, description.part("scheduler"))
    num_kv_slots = cache.num_blocks * cache.block_size
    admission = AdmissionContext(_spec(length), clock, lambda: num_kv_slots)
    return Simulation(
        scheduler=scheduler,
        cache=cache,
        prefill=prefill,
        admission=build(description.part("admission"), admission),
        stride=drafts,
        clock=clock,
        cost=cost,
        max_num_scheduled_tokens=limits.max_num_scheduled_tokens,
        max_model_len=length,
        names=description.names,
        lengths=lengths,
    )


def _refuse_speculation(part: Part) -> None:
    if part.provided.component.name != "plain":
        raise ConfigError(
            f"{part.who}: which drafts a model would accept is not known without it; simulate with decode=plain",
            "decode",
        )


def _refuse_stride(stride: int, scheduler: Scheduler, part: Part) -> None:
    """A plan of several steps would be one step to a scheduler that counts them."""
    if stride > 1 and getattr(scheduler, "counts_steps", False):
        raise ConfigError(
            f"stride={stride} makes one plan of several steps, and scheduler={part.provided.component.name} counts steps: leave "
            "stride=1 beside it",
            "stride",
        )


def _build_cache(part: Part, cost: CostModel, max_model_len: int, shares_content: bool) -> KVCache:
    settings = _checked(part, CacheSettings)
    if not shares_content and hasattr(settings, "enable_prefix_caching"):
        settings = settings.model_copy(update={"enable_prefix_caching": False})
    context = CacheContext(_num_blocks(settings, cost), max_model_len, _num_swap_blocks(settings, cost))
    cache: KVCache = build(Part(part.group, part.provided, settings, part.shared), context)
    return cache


def _num_blocks(settings: CacheSettings, cost: CostModel) -> int:
    """What config says in blocks or as a size; else what the machine of the cost model has."""
    if settings.num_blocks is not None:
        return settings.num_blocks
    try:
        slots = settings.memory_bytes(None) // cost.kv_bytes_per_token
    except ConfigError:  # a share of what is free on some machine
        slots = cost.num_kv_slots
    if slots < settings.block_size:
        raise ConfigError(f"cache.memory={settings.memory} does not hold one KV block; raise it", "cache.memory")
    return slots // settings.block_size


def _num_swap_blocks(settings: CacheSettings, cost: CostModel) -> int:
    if not settings.swaps:
        return 0
    if settings.num_swap_blocks is not None:
        return settings.num_swap_blocks
    return settings.swap_memory_bytes(None) // (cost.kv_bytes_per_token * settings.block_size)


def _swap_cost(cache: KVCache, cost: CostModel) -> SwapCost | None:
    if not getattr(cache, "num_swap_blocks", 0):
        return None
    return SwapCost(cost.seconds.copy_token * cache.block_size, cost.seconds.prefill_token)


def _checked(part: Part, base: type[S]) -> S:
    if not isinstance(part.settings, base):
        raise PluginError(f"{part.who}: its Settings must extend {base.__module__}.{base.__qualname__}")
    return part.settings


def _spec(max_model_len: int) -> ModelSpec:
    """What admission looks at. No file, no vocabulary."""
    config: dict[str, Any] = {}
    files = ModelFiles("simulated", Path(), "simulated")
    return ModelSpec("simulated", files, config, vocab_size=1, max_model_len=max_model_len, eos_token_ids=frozenset())
