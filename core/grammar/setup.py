"""What the front knows of grammars, made of config: the selected backends, and the compiler that is to ask them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.grammar.compiler import GrammarCompiler
from core.grammar.figures import GrammarFigures
from core.grammar.frames import Boot
from core.isolation.faults import ComponentName
from core.memory import num_bytes
from core.settings import Settings, StructuredOutputSettings
from core.stages.grammar import GROUP

if TYPE_CHECKING:
    from core.model.spec import ModelSpec
    from core.pipeline import Part, PipelineDescription
    from core.plugins import Plugins

FACTORY = "core.grammar.backends:backends_from_json"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A selected backend."""

    part: ComponentName
    kinds: frozenset[str]
    quarantine_after: float  # failures; clients alone must not be able to have a built-in one switched off: infinity


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """`core.pipeline.FrontPipeline.grammars`. Nothing is running yet."""

    parts: tuple[GrammarPart, ...]  # in config's order
    limits: StructuredOutputSettings
    compiler: GrammarCompiler
    figures: GrammarFigures
    starts_early: bool = False  # the process is there before the first grammar


def grammar_setup(
    description: PipelineDescription, settings: Settings, plugins: Plugins, spec: ModelSpec, figures: GrammarFigures
) -> GrammarSetup | None:
    """None where no backend is selected, or the sampler obeys no grammar."""
    chain = description.chain(GROUP)
    if not chain or "grammar" not in description.part("sampler").provided.component.provides:
        return None
    limits = settings.structured_outputs
    boot = Boot(
        factory=FACTORY,
        settings=settings.for_process(spec.files.path, plugins.left_out()),
        plugins=plugins.fingerprint(),
        memory=num_bytes(limits.compile_memory),
    )
    compiler = GrammarCompiler(boot, timeout_s=limits.compile_timeout, max_queued=limits.max_queued, figures=figures)
    parts = tuple(_known(part, settings.plugins.quarantine_after) for part in chain)
    return GrammarSetup(parts, limits, compiler, figures, starts_early=settings.process.separate)


def _known(part: Part, quarantine_after: int) -> GrammarPart:
    provided = part.provided
    limit = math.inf if provided.plugin.builtin else quarantine_after
    return GrammarPart(part.named, frozenset(provided.component.provides), limit)
