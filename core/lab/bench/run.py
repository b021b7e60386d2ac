"""A workload from its words to its report: in this process, or against a server."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from core.config.keys import fields_of
from core.errors import ConfigError
from core.lab.bench.calls import Target
from core.lab.bench.figures import Report
from core.lab.bench.http_target import HttpTarget, address_of, discovered_model, settled_form
from core.lab.bench.load import Load
from core.lab.bench.prompts import Prompts
from core.lab.bench.report import over_rounds
from core.lab.bench.workload import Workload
from core.lab.bench.workloads import DEFAULT, open_workload
from core.simulation.keys import checked

MODEL = "model="
# A closed loop bounds itself, and so does an offline batch: nobody is to be turned away.
IN_PROCESS = ("process.separate=false", "process.probe_timeout=600", "admission=open")
NO_GRAMMARS = ("grammars=[]",)  # what a backend makes of the vocabulary after the start takes seconds of the same cores


class BenchSettings(BaseModel):
    """What is measured, and how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    workload: str = Field(default=DEFAULT, description="one of those below")
    repeat: int = Field(
        default=1, ge=1, le=1000, description="rounds; figures are given as median, min and max of them"
    )


class UrlSettings(BaseModel):
    """Of a server, with url=."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str = Field(default="", description="a running OpenAI-compatible server in place of an engine of our own")
    vocab_size: int = Field(default=30_000, ge=100, description="with url: ids of prompts are drawn below it")
    prompts: Literal["auto", "ids", "text"] = Field(
        default="auto", description="with url; auto: ids where it takes them"
    )
    token_ids: bool = Field(default=True, description="with url: have it tell ids, or some tokens have no event")


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line."""

    settings: BenchSettings
    url: UrlSettings
    workload: Workload
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, words: Mapping[str, Any], overrides: Sequence[str]) -> Asked:
        """Raises ConfigError with near matches."""
        settings = _part(BenchSettings, words)
        url = _part(UrlSettings, words)
        taken = {*fields_of(BenchSettings), *fields_of(UrlSettings)}
        workload = open_workload(settings.workload, {key: words[key] for key in words if key not in taken}, taken)
        config = [word for word in overrides if not (url.url and word.startswith(MODEL))]
        if url.url and config:
            raise ConfigError(f"{config[0]}: the server of url= has its own config; leave it out, or leave url= out")
        if not url.url and (stray := [key for key in fields_of(UrlSettings) if key in words and key != "url"]):
            raise ConfigError(f"{stray[0]}: it is for a server; add url=http://…", stray[0])
        return cls(settings, url, workload, tuple(overrides))

    @property
    def in_process(self) -> tuple[str, ...]:
        """Overrides of an engine of our own."""
        return (*IN_PROCESS, *(NO_GRAMMARS if self.settings.workload != "structured" else ()), *self.overrides)

    @property
    def described(self) -> dict[str, Any]:
        return {"name": self.settings.workload, **self.workload.settings.model_dump()}


def _part(model: Any, words: Mapping[str, Any]) -> Any:
    return checked(model, {key: value for key, value in words.items() if key in fields_of(model)})


async def rounds(
    asked: Asked, target: Target, salt: int, after: Callable[[Report], Report] = lambda found: found
) -> Report:
    """`repeat` rounds with prompts of their own. `after` adds to the report of each, before the next begins."""
    found, workload = list[Report](), asked.workload
    bar = tqdm(total=workload.num_calls * asked.settings.repeat, desc="requests", file=sys.stderr, disable=None)
    try:
        for number in range(asked.settings.repeat):
            prompts = Prompts(workload.settings.seed, target.vocab_size, salt + number)
            found.append(after(await workload.run(Load(target, prompts, bar.update))))
    finally:
        bar.close()
    return {"workload": asked.described, **over_rounds(found)}


async def bench_url(asked: Asked) -> Report:
    """Prompts differ from those of the run before, or the server's prefix cache would know them."""
    async with served_target(asked) as target:
        report = await rounds(asked, target, time.time_ns() % 1_000_003)
        return {**report, "url": asked.url.url, "model": target.model, "prompts": target.prompts}


@asynccontextmanager
async def served_target(asked: Asked) -> AsyncIterator[HttpTarget]:
    address = address_of(asked.url.url)
    named = [word.removeprefix(MODEL) for word in asked.overrides if word.startswith(MODEL)]
    extra = {"return_token_ids": True} if asked.url.token_ids else {}
    target = HttpTarget(address, named[-1] if named else discovered_model(address), asked.url.vocab_size, extra=extra)
    if asked.url.prompts == "auto":
        target.prompts = await settled_form(target)
    else:
        target.prompts = asked.url.prompts
    yield target
