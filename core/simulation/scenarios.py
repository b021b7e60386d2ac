"""Which policies are compared, on which traffic: the rows and the blocks of the policy table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.errors import ConfigError, near_matches

MACHINE = (
    "scheduler.max_num_running_reqs=64",
    "scheduler.max_num_scheduled_tokens=512",
    "cache.num_blocks=4096",
    "cache.num_swap_blocks=16384",
    "admission=open",
)
"""65,536 KV slots in blocks of 16 for at most 64 requests: of conversations both run out, now the one and now the other. Host
memory holds four times as many. Nobody is refused, so that all policies serve the same requests."""
SMALL_BATCH = ("scheduler.max_num_running_reqs=8", *MACHINE[1:])
NUM_TENANTS = 8
BASELINE = "fcfs"


@dataclass(frozen=True, slots=True)
class Contender:
    """A row: a policy with what it is told."""

    name: str
    scheduler: str
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return (f"scheduler={self.scheduler}", *self.overrides)


CONTENDERS = (
    Contender("fcfs", "fcfs"),
    Contender("priority", "priority"),
    Contender("srtf", "srtf"),
    Contender("srtf learnt", "srtf", ("predictor=learnt",)),
    Contender("srtf oracle", "srtf", ("predictor=oracle",)),
    Contender("time_slice", "time_slice"),
    Contender("time_slice 100", "time_slice", ("scheduler.num_iterations=100",)),
    Contender("fair", "fair"),
    Contender("prefix_aware", "prefix_aware"),
    Contender("prefix_aware 60 s", "prefix_aware", ("scheduler.window=128", "scheduler.max_wait_s=60")),
    Contender("slo", "slo"),
    Contender("static", "static"),
    Contender("load_aware", "fcfs", ("admission=load_aware",)),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A block of the table: traffic at some loads. `focus`: tenants whose latencies are shown beside those of all."""

    name: str
    about: str
    traffic: Mapping[str, Any]
    loads: tuple[float, ...]
    contenders: tuple[str, ...] = ()  # names; none: all
    focus: tuple[str, ...] = ()
    overrides: tuple[str, ...] = field(default=MACHINE)

    def takes(self, contender: Contender) -> bool:
        """Other people's schedulers are compared everywhere."""
        own = contender in CONTENDERS
        return contender.name in self.contenders if self.contenders and own else contender.name not in ADMISSIONS

    def words(self, contender: Contender) -> tuple[str, ...]:
        """The whole config; what the contender says goes before what the scenario says."""
        by_key = {word.partition("=")[0]: word for word in (*self.overrides, *contender.words)}
        return tuple(by_key.values())


# One of the eight tenants sends as much as four others; a fifth of the requests is urgent, and a fifth can wait.
SERVICE = {"tenants": NUM_TENANTS, "flood": 4, "priorities": (0.2, 0.6, 0.2)}
LOADS = (0.5, 0.9, 1.5)
POLITE = tuple(f"t{index}" for index in range(1, NUM_TENANTS))

CONVERSATION = Scenario("conversation", "chat", {"workload": "conversation", **SERVICE}, LOADS)
CODE = Scenario("code", "code completion", {"workload": "code", **SERVICE}, LOADS)
FLOOD = Scenario(
    "flood",
    f"{NUM_TENANTS} tenants, of which one sends as much as 20 others",
    {"workload": "conversation", "tenants": NUM_TENANTS, "flood": 20},
    (2.0,),
    ("fcfs", "fair", "srtf", "slo"),
    POLITE,
)
SHORT_UNDER_LONG = Scenario(
    "short under long",
    "9 in 10 requests are short, and the long ones fill a batch of 8",
    {"workload": "mixed"},
    (0.8,),
    ("fcfs", "time_slice", "time_slice 100", "srtf", "srtf oracle", "priority"),
    ("short",),
    SMALL_BATCH,
)
SHARED_PROMPTS = Scenario(
    "shared prompts",
    "40 system prompts of 4,096 tokens, of which the pool does not hold a half",
    {
        "workload": "conversation",
        "system_prompts": 40,
        "system_prompt_len": 4096,
        "prompt_len": {"p50": 4400, "p90": 4800, "p99": 6000},
    },
    (1.2,),
    ("fcfs", "prefix_aware", "prefix_aware 60 s", "srtf"),
)
OVERLOAD = Scenario(
    "overload",
    "requests that expire after a second, and admission that refuses earlier those that would",
    {**CONVERSATION.traffic, "ttl": 1.0},
    (1.0, 1.5),
    ("fcfs", "load_aware"),
)
SCENARIOS = (CONVERSATION, CODE, FLOOD, SHORT_UNDER_LONG, SHARED_PROMPTS, OVERLOAD)
ADMISSIONS = ("load_aware",)  # rows that are compared where admission is


def contenders(registered: Sequence[str], chosen: Sequence[str]) -> tuple[Contender, ...]:
    """The rows: ours as far as their schedulers are installed, then other people's schedulers. The baseline is always there.

    Raises ConfigError for a chosen name that is neither.
    """
    own = [one for one in CONTENDERS if one.scheduler in registered]
    known = {one.scheduler for one in CONTENDERS}
    every = [*own, *(Contender(name, name) for name in registered if name not in known)]
    names = {one.name for one in every}
    for name in chosen:
        if name not in names:
            raise ConfigError(f"policies: {name!r} is no row of the table{near_matches(name, names)}", "policies")
    return tuple(one for one in every if not chosen or one.name in chosen or one.name == BASELINE)


def scenarios(chosen: Sequence[str]) -> tuple[Scenario, ...]:
    by_name = {one.name.replace(" ", "_"): one for one in SCENARIOS}
    for name in chosen:
        if name not in by_name:
            raise ConfigError(f"scenarios: {name!r} is no block of the table{near_matches(name, by_name)}", "scenarios")
    return tuple(one for name, one in by_name.items() if not chosen or name in chosen)
