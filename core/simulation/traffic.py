"""What arrives at the engine: the settings of a workload, and the workloads by name.

A workload is either made up, with the statistics of a service (`core.simulation.synthetic`), or read from a trace
(`core.simulation.traces`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from core.errors import ConfigError, near_matches
from core.simulation.lengths import Lengths
from core.simulation.records import Traffic
from core.simulation.synthetic import Profile, Shape, Synthetic
from core.simulation.traces import TRACES, Source, Trace

# Prompts, outputs and rates of the two services that the Azure LLM inference trace of 2023 was taken from (Patel et al.,
# Splitwise, ISCA 2024). Caps are ours.
CONVERSATION = Profile(
    "conversation", Lengths(p50=1020, p90=2734, p99=4142, cap=14_000), Lengths(p50=129, p90=424, p99=601, cap=1_000)
)
CODE = Profile("code", Lengths(p50=1469, p90=5186, p99=7436, cap=14_000), Lengths(p50=13, p90=55, p99=249, cap=2_000))
SHORT = Profile("short", Lengths(p50=200, p90=600, p99=1_200, cap=2_000), Lengths(p50=60, p90=200, p99=400, cap=512))
LONG = Profile(
    "long", Lengths(p50=500, p90=1_500, p99=3_000, cap=8_000), Lengths(p50=1_500, p90=3_000, p99=4_000, cap=4_096), 1
)


def _kind_of_length(value: object) -> str | None:
    """Of which branch a length is, so that one that is wrong gets one error; None: of none."""
    if isinstance(value, Mapping | Lengths):
        return "Lengths"
    return _kind_of_number(value)


def _kind_of_bound(value: object) -> str | None:
    return "word" if value in BOUNDS else _kind_of_number(value)


def _kind_of_number(value: object) -> str | None:
    is_number = isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal())
    return "int" if is_number else None


BOUNDS = ("exact", "power_of_two")
Length = Annotated[
    Annotated[int, Field(ge=1), Tag("int")] | Annotated[Lengths, Tag("Lengths")],
    Discriminator(
        _kind_of_length,
        custom_error_type="length",
        custom_error_message='give a number of tokens, or a distribution as {"p50": 100, "p90": 400, "p99": 900}',
    ),
]
Bound = Annotated[
    Annotated[Literal["exact", "power_of_two"], Tag("word")] | Annotated[int, Field(ge=1), Tag("int")],
    Discriminator(
        _kind_of_bound, custom_error_type="bound", custom_error_message="give exact, power_of_two or a number of tokens"
    ),
]


class TrafficSettings(BaseModel):
    """Every key that describes traffic. Times in seconds, lengths in tokens, rates in requests per second."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    workload: str = Field(
        default="conversation", description="conversation, code, mixed, fixed, azure, mooncake or burstgpt"
    )
    num_requests: int | None = Field(default=None, ge=1, description="null: 1,000, or the whole trace")
    seed: int = Field(
        default=0, ge=0, description="of everything that is drawn by chance; the same seed, the same traffic"
    )
    rate: float | None = Field(
        default=None, gt=0, le=1e6, description="requests per second; null: the workload's own; of a trace: see speedup"
    )
    load: float | None = Field(default=None, gt=0, le=100, description="rate over what fcfs can serve of this traffic")
    cv: float = Field(
        default=1.0,
        ge=0,
        le=20,
        description="coefficient of variation of the gaps: 1 is Poisson, more is bursty (Gamma), 0 is evenly spaced",
    )
    prompt_len: Length | None = Field(
        default=None, description='tokens, or {"p50": …, "p90": …, "p99": …, "cap": …}; null: the workload\'s own'
    )
    output_len: Length | None = Field(default=None, description="likewise")
    short_share: float = Field(default=0.9, ge=0, le=1, description="of mixed: short interactive requests")
    bound: Bound = Field(
        default="power_of_two",
        description="max_tokens that clients ask for: exact (the truth), power_of_two, or a number, which cuts the truth",
    )
    ttl: float | None = Field(
        default=None, gt=0, description="a request that is not scheduled within so many seconds expires"
    )
    tenants: int = Field(default=1, ge=1, le=10_000, description="who asks, by chance in equal shares")
    shares: tuple[float, ...] | None = Field(default=None, description="of the requests, one per tenant")
    flood: float = Field(
        default=1.0, gt=0, le=1e6, description="the first tenant sends so many times what another one sends"
    )
    priorities: tuple[float, ...] | None = Field(default=None, description="share of the requests at priority 0, 1, …")
    system_prompts: int = Field(default=0, ge=0, le=100_000, description="prompts begin with one of so many")
    system_prompt_len: int = Field(default=512, ge=1, description="tokens of each of them")
    followups: float = Field(default=0.0, ge=0, lt=1, description="share of the requests that continue an earlier one")
    think_s: float = Field(
        default=10.0, ge=0, description="least seconds between a request and the next of its conversation"
    )
    path: str | None = Field(default=None, description="of a trace; may be compressed with gzip")
    speedup: float = Field(default=1.0, ge=1e-6, le=1e6, description="of a trace: its time runs so many times faster")
    start_s: float = Field(
        default=0.0, ge=0, description="of a trace: second that is used first, counted from its first request"
    )
    end_s: float | None = Field(default=None, gt=0, description="of a trace: second where to stop, likewise")
    tenant_column: str | None = Field(default=None, description="of a trace: the column that names the tenant")
    hash_block_size: int = Field(default=512, ge=1, description="tokens per hash id of a Mooncake trace")

    @model_validator(mode="after")
    def _consistent(self) -> TrafficSettings:
        if self.shares is not None and len(self.shares) != self.tenants:
            raise ValueError(f"shares has {len(self.shares)} numbers for tenants={self.tenants}: give one per tenant")
        for name, shares in (("shares", self.shares), ("priorities", self.priorities)):
            if shares is not None and (not shares or min(shares) < 0 or not 0 < sum(shares) < 1e9):
                raise ValueError(f"{name}: give numbers of at least 0, not all of them 0")
        if self.rate is not None and self.load is not None:
            raise ValueError("rate and load say the same thing: give one of them")
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s ({self.end_s}) must come after start_s ({self.start_s})")
        return self

    @property
    def given(self) -> set[str]:
        """Keys that ask for something."""
        return {name for name in self.model_fields_set if getattr(self, name) is not None}

    @property
    def tenant_shares(self) -> tuple[float, ...]:
        """One per tenant; they add up to 1."""
        given = self.shares or (self.flood, *(1.0 for _ in range(self.tenants - 1)))
        return tuple(share / sum(given) for share in given)


def open_traffic(settings: TrafficSettings) -> Traffic:
    """Raises ConfigError that names the key; a trace's rows are checked as they are read."""
    workload = WORKLOADS.get(settings.workload)
    if workload is None:
        raise ConfigError(
            f"workload={settings.workload!r}: there is none{near_matches(settings.workload, WORKLOADS)}", "workload"
        )
    _refuse_idle_keys(settings, workload.keys)
    return workload.open(settings)


def _refuse_idle_keys(settings: TrafficSettings, keys: frozenset[str]) -> None:
    """Raises ConfigError for a key that is given and would change nothing."""
    given = settings.given
    for key in sorted(given - keys):
        takers = [name for name, workload in WORKLOADS.items() if key in workload.keys]
        hint = f"; {HINTS[key]}" if key in HINTS else ""
        kind = "traces" if takers == list(TRACES) else "workload=" + ", ".join(takers)
        raise ConfigError(f"{key} is for {kind}, and does nothing to workload={settings.workload}{hint}", key)
    for key, (wants, needed) in NEEDS.items():
        if key in given and not wants(settings):
            raise ConfigError(f"{key} does nothing {needed}", key)


def _synthetic(
    settings: TrafficSettings, rate: float, *profiles: Profile, shares: tuple[float, ...] = (1.0,)
) -> Synthetic:
    own = [profile.with_lengths(settings.prompt_len, settings.output_len) for profile in profiles]
    return Synthetic(_shape(settings, settings.rate or rate, settings.num_requests or 1_000), own, shares)


def _mixed(settings: TrafficSettings) -> Synthetic:
    shares = (settings.short_share, 1 - settings.short_share)
    return _synthetic(settings, 4.0, SHORT, LONG, shares=shares)


def _fixed(settings: TrafficSettings) -> Synthetic:
    return _synthetic(settings, 4.0, Profile("fixed", Lengths.of(512), Lengths.of(128)))


def _trace(settings: TrafficSettings) -> Trace:
    if settings.path is None:
        raise ConfigError(f"workload={settings.workload} reads a trace: say where it is, path=…", "path")
    source = Source(
        settings.path,
        settings.workload,
        settings.speedup,
        settings.start_s,
        settings.end_s,
        settings.tenant_column,
        settings.hash_block_size,
    )
    return Trace(source, _shape(settings, 1.0, settings.num_requests))


def _shape(settings: TrafficSettings, rate: float, num_requests: int | None) -> Shape:
    return Shape(
        rate=rate,
        cv=settings.cv,
        num_requests=num_requests,
        seed=settings.seed,
        bound=settings.bound,
        ttl_s=settings.ttl,
        tenant_shares=settings.tenant_shares,
        priority_shares=settings.priorities,
        system_prompts=settings.system_prompts,
        system_prompt_len=settings.system_prompt_len,
        followups=settings.followups,
        think_s=settings.think_s,
    )


@dataclass(frozen=True, slots=True)
class Workload:
    open: Callable[[TrafficSettings], Traffic]
    keys: frozenset[str]  # those that change something


CONTENT_KEYS = frozenset({"system_prompts", "system_prompt_len", "followups", "think_s"})
ALL_KEYS = frozenset(
    {"workload", "num_requests", "seed", "load", "bound", "ttl", "tenants", "shares", "flood", "priorities"}
)
MADE_UP_KEYS = ALL_KEYS | CONTENT_KEYS | {"rate", "cv", "prompt_len", "output_len"}
TRACE_KEYS = ALL_KEYS | {"path", "speedup", "start_s", "end_s", "tenant_column"}
WORKLOADS: Mapping[str, Workload] = {
    "conversation": Workload(lambda settings: _synthetic(settings, 5.5, CONVERSATION), MADE_UP_KEYS),
    "code": Workload(lambda settings: _synthetic(settings, 2.6, CODE), MADE_UP_KEYS),
    "mixed": Workload(_mixed, MADE_UP_KEYS | {"short_share"}),
    "fixed": Workload(_fixed, MADE_UP_KEYS),
    "azure": Workload(_trace, TRACE_KEYS | CONTENT_KEYS),
    "mooncake": Workload(_trace, TRACE_KEYS | {"hash_block_size"}),  # it has content of its own
    "burstgpt": Workload(_trace, TRACE_KEYS | CONTENT_KEYS),
}
HINTS: Mapping[str, str] = {
    "rate": "a trace has its own: speedup=2 makes it twice as fast",
    "speedup": "rate=… says how many requests come per second",
}
NEEDS: Mapping[str, tuple[Callable[[TrafficSettings], bool], str]] = {
    "tenants": (lambda one: one.tenant_column is None, "beside tenant_column, which names the tenants"),
    "shares": (lambda one: one.tenant_column is None, "beside tenant_column, which names the tenants"),
    "flood": (lambda one: one.tenants > 1 and one.shares is None, "without tenants=2 or more, nor beside shares"),
    "think_s": (lambda one: one.followups > 0, "without followups=…"),
    "system_prompt_len": (lambda one: one.system_prompts > 0, "without system_prompts=…"),
}
"""Keys that only do something beside others."""
