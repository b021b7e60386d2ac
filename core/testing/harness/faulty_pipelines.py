"""A pipeline one of whose components fails on purpose, as if a stranger's plugin provided it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from core.components import PluginRecord, import_target
from core.pipeline import Part, PipelineDescription
from core.testing.harness import faulty, faulty_model
from core.testing.harness.faulty import Fault

WRAPPERS: Mapping[str, Callable[[Any, Fault], Any]] = {
    "renderer": faulty.FaultyRenderer,
    "admission": faulty.FaultyAdmission,
    "scheduler": faulty.FaultyScheduler,
    "prefill": faulty.FaultyPrefill,
    "decode": faulty.FaultyDecode,
    "sampler": faulty_model.FaultySampler,
    "detokenizer": faulty.FaultyDetokenizer,
    "completion": faulty.FaultyCompletion,
    "model": faulty_model.FaultyModel,
    "attention": faulty_model.FaultyAttention,
    "quant": faulty_model.FaultyQuant,
    "cache": faulty.FaultyCache,
    "executor": faulty_model.FaultyExecutor,
    "tool_parser": faulty.FaultyToolParser,
    "reasoning_parser": faulty.FaultyReasoningParser,
    "predictor": faulty.FaultyPredictor,
    "logits_processors": faulty_model.FaultyLogitsProcessor,
    "observers": faulty.FaultyObserver,
}
"""By group. A fault of the frontend is one that its caller makes (`core.lab.fault_table`)."""

PLUGIN = PluginRecord("chaos", "acme-chaos", "1.0", "loaded")

Make = Callable[[Any, Any], Any]  # settings, context -> component


@contextmanager
def with_fault(description: PipelineDescription, group: str, fault: Fault) -> Iterator[PipelineDescription]:
    """The same pipeline with the (first) component of `group` wrapped, to be assembled and run inside the `with`.

    The target is importable only there. It lies beside `Fault`, whose frame is the innermost one of what a fault raises: so
    the plugin at fault is found as any other is (`core.isolation.faults.Names.blame`).
    """
    chosen = next(part for part in description.parts if part.group == group)
    wrapper = WRAPPERS[group]
    with ExitStack() as stack:
        found = stack.enter_context(_replaced(description, chosen, faulty, lambda inner: wrapper(inner, fault), PLUGIN))
        if group == "quant":
            model = found.part("model")
            found = stack.enter_context(
                _replaced(found, model, faulty_model, lambda inner: faulty_model.MarkingModel(inner, fault))
            )
        yield found


@contextmanager
def _replaced(
    description: PipelineDescription,
    part: Part,
    module: ModuleType,
    wrap: Callable[[Any], Any],
    plugin: PluginRecord | None = None,
) -> Iterator[PipelineDescription]:
    def make(settings: Any, context: Any) -> Any:
        return wrap(import_target(part.provided, part.provided.component.target)(settings, context))

    with importable(make, module) as target:
        component = replace(part.provided.component, target=target)
        provided = replace(part.provided, component=component, plugin=plugin or part.provided.plugin)
        faulty_part = replace(part, provided=provided)
        yield PipelineDescription(tuple(faulty_part if other is part else other for other in description.parts))


@contextmanager
def importable(make: Make, module: ModuleType) -> Iterator[str]:
    """A target "package.module:name" that is `make` until the end of the `with`: targets are found by import."""
    assert sys.modules[module.__name__] is module
    name = f"made_{id(make)}"
    setattr(module, name, make)
    try:
        yield f"{module.__name__}:{name}"
    finally:
        delattr(module, name)
