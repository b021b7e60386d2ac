"""What assembly makes: the two halves of the pipeline as frozen records of plain objects, and their description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from core.components import CHAINS, Provided
from core.config.hashes import digest, plain
from core.isolation.faults import ComponentName, Names
from core.isolation.front import FrontLimits

if TYPE_CHECKING:
    from core.batch import ModelBatch, SchedulerOutput
    from core.front.request_fields import RequestFields
    from core.grammar.setup import GrammarSetup
    from core.isolation.cache import GuardedCache
    from core.isolation.faults import Faults
    from core.isolation.scheduler import GuardedScheduler
    from core.isolation.stages import GuardedCompletion, GuardedDecode, GuardedPrefill
    from core.kv_layout import KVLayout
    from core.model.interface import Executor
    from core.model.spec import ModelSpec
    from core.observers import Observers
    from core.stages.admission import Admission
    from core.stages.detokenizer import Detokenizer
    from core.stages.reasoning_parser import ReasoningParser
    from core.stages.renderer import Renderer
    from core.stages.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class Part:
    """One selected component: who provides it, and its checked settings. `group` may be a chain, which has several."""

    group: str
    provided: Provided
    settings: BaseModel
    shared: BaseModel | None = None  # of the group `model`: its keys that the pipeline itself reads

    @property
    def path(self) -> str:
        """Where its values stand in a config: scheduler, observers.jsonl."""
        return f"{self.group}.{self.provided.component.name}" if self.group in CHAINS else self.group

    @property
    def values(self) -> dict[str, Any]:
        """All its values, as plain Python."""
        return {**(self.shared.model_dump() if self.shared else {}), **self.settings.model_dump()}

    @property
    def settings_hash(self) -> str:
        """Sixteen hex digits of SHA-256 over canonical JSON of group, name, wheel, version and every value.

        The same in each process and run, and another one where any of these differs, but for pydantic's secrets, whose hash
        could be guessed. Values are those of the config: the engine process has `model.source` as a place on this machine,
        and so another hash of its model.
        """
        component, plugin = self.provided.component, self.provided.plugin
        return digest([self.group, component.name, plugin.distribution, plugin.version, self.values])

    @property
    def wheel(self) -> str:
        """acme-chaos 1.0"""
        return self.provided.plugin.wheel

    @property
    def plugin_text(self) -> str:
        """As `core.outputs.PluginIncident.plugin` has it: chaos, acme-chaos 1.0."""
        return self.provided.plugin.text

    @property
    def who(self) -> str:
        """For messages: sampler=chaos (plugin chaos, acme-chaos 1.0)."""
        return self.provided.who

    @property
    def named(self) -> ComponentName:
        """`who` in its pieces, for incidents."""
        component = self.provided.component
        return ComponentName(self.group, component.name, self.plugin_text, component.target)


@dataclass(frozen=True, slots=True)
class PipelineDescription:
    """The nine stages and their parts, selected and checked but not built. In the order of `core.hookspecs.GROUPS`, then
    the members of `CHAINS` in config's order."""

    parts: tuple[Part, ...]

    def part(self, group: str) -> Part:
        return next(part for part in self.parts if part.group == group)

    def chain(self, group: str) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.group == group)

    @property
    def names(self) -> Names:
        return Names(part.named for part in self.parts)

    @property
    def pipeline_hash(self) -> str:
        """Of the settings hashes of all parts, in their order: two servers with the same one play the same piece."""
        return digest([part.settings_hash for part in self.parts])

    def rows(self) -> list[dict[str, Any]]:
        """Who each part is, with its values and their hash, for `explain` and `GET /plugins`."""
        return [
            {
                "stage": part.group,
                "name": part.provided.component.name,
                "class": part.provided.component.target,
                "plugin": part.provided.plugin.name,
                "wheel": part.provided.plugin.distribution,
                "version": part.provided.plugin.version,
                "api": part.provided.plugin.api,
                "settings": plain(part.values),
                "settings_hash": part.settings_hash,
            }
            for part in self.parts
        ]


@dataclass(frozen=True, slots=True)
class FrontPipeline:
    """Stages 2, 3 and 8, the parsers of text and the observers, which live in the front process; stage 1 drives them."""

    model: ModelSpec
    renderer: Renderer
    admission: Admission
    detokenizer: Detokenizer
    request_fields: RequestFields  # refuses what the selected sampler and processors would ignore
    tool_parser: ToolParser
    reasoning_parser: ReasoningParser
    observers: Observers
    names: Names = field(default_factory=Names)
    limits: FrontLimits = field(default_factory=FrontLimits)
    grammars: GrammarSetup | None = None  # None: nothing compiles any


class BuildsBatches(Protocol):
    """`core.batching.BatchBuilder`, or what stands before it."""

    def build(self, output: SchedulerOutput) -> ModelBatch: ...


@dataclass(frozen=True, slots=True)
class EnginePipeline:
    """Stages 4 to 7 and 9, which live in the engine process. The sampler runs inside the executor, where the model is.

    Made by `core.blueprint`; around each plugin stands a guard that keeps its failures from other requests.
    """

    model: ModelSpec
    scheduler: GuardedScheduler
    prefill: GuardedPrefill
    decode: GuardedDecode
    batch_builder: BuildsBatches
    executor: Executor
    completion: GuardedCompletion
    cache: GuardedCache
    clock: Callable[[], float]  # monotonic seconds
    faults: Faults
    rebuild: Callable[[Faults], EnginePipeline]  # the same with new, empty books; model and KV memory stay
    layout: KVLayout  # of the KV memory
