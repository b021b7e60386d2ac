"""What assembly makes: the two halves of the pipeline as frozen records of plain objects, and their description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from core.plugins import Provided

if TYPE_CHECKING:
    from core.batching import BatchBuilder
    from core.cache.kv_cache import KVCache
    from core.model.interface import Executor
    from core.model.spec import ModelSpec
    from core.outputs import RequestRecord, StepStats
    from core.request import SamplingParams
    from core.stages.admission import Admission
    from core.stages.completion import Completion
    from core.stages.decode import Decode
    from core.stages.detokenizer import Detokenizer
    from core.stages.prefill import Prefill
    from core.stages.renderer import Renderer
    from core.stages.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Part:
    """One selected component: who provides it, and its checked settings."""

    group: str
    provided: Provided
    settings: BaseModel

    @property
    def wheel(self) -> str:
        return f"{self.provided.plugin.distribution} {self.provided.plugin.version}"


@dataclass(frozen=True, slots=True)
class PipelineDescription:
    """The nine stages and their parts, selected and checked but not built. In the order of `core.hookspecs.GROUPS`."""

    parts: tuple[Part, ...]

    def part(self, group: str) -> Part:
        return next(part for part in self.parts if part.group == group)

    def rows(self) -> list[dict[str, Any]]:
        """group, name, class, plugin, wheel, version and settings of each part, for `explain` and `GET /plugins`."""
        return [
            {
                "stage": part.group,
                "name": part.provided.component.name,
                "class": part.provided.component.target,
                "plugin": part.provided.plugin.name,
                "wheel": part.provided.plugin.distribution,
                "version": part.provided.plugin.version,
                "settings": part.settings.model_dump(mode="json"),
            }
            for part in self.parts
        ]


@dataclass(frozen=True, slots=True)
class FrontPipeline:
    """Stages 2, 3 and 8, which live in the front process; stage 1 drives them."""

    model: ModelSpec
    renderer: Renderer
    admission: Admission
    detokenizer: Detokenizer
    check_fields: Callable[[SamplingParams], None]  # refuses what the selected sampler would ignore
    step_observers: tuple[Callable[[StepStats], None], ...] = ()
    request_observers: tuple[Callable[[RequestRecord], None], ...] = ()


@dataclass(frozen=True, slots=True)
class EnginePipeline:
    """Stages 4 to 7 and 9, which live in the engine process. The sampler runs inside the executor, where the model is."""

    model: ModelSpec
    scheduler: Scheduler
    prefill: Prefill
    decode: Decode
    batch_builder: BatchBuilder
    executor: Executor
    completion: Completion
    cache: KVCache
    clock: Callable[[], float]  # monotonic seconds
