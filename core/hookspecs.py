"""The hooks of Nonet: the one page a plugin author needs.

A plugin is a module (or object) with functions marked `@hookimpl`, named by an entry point in the group `nonet.plugins`.
The `provide_…` hooks say what exists; they are called once, when plugins are loaded, never inside a step. What runs are
plain objects: a `Component` names a class, config selects it, assembly imports and builds it as `Class(settings, context)`.
The two events are bound when plugins are loaded, and called as plain functions from then on.

The nine stage hooks stand in request order, then the components they use, then packaging and events. Each is called once per
process that loads plugins (the front and the engine process load the same set), in plugin order: built-ins, then third
parties by name. An implementation may take no arguments. This module imports no torch, and neither may a plugin's module
with its hooks: keep heavy imports in the module that `target` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from core.outputs import RequestRecord, StepStats

PROJECT = "nonet"
API_VERSION = 1
"""Version of this contract. A component built for another major version is refused with one line."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Component:
    """One choice for one config group.

    `target` is "package.module:Class", imported only when config selects it. The class has a frozen pydantic `Settings`
    (extra="forbid") and `__init__(self, settings, context)`. Where importing the target is heavy (torch), `settings` names
    the Settings class in a light module, so that config is checked, and `explain` works, without the heavy import.
    `provides` of a sampler names the fields of `SamplingParams` it honours; a request that sets another is refused by name.
    """

    name: str
    target: str
    summary: str
    settings: str | None = None
    provides: tuple[str, ...] = ()
    api_version: int = API_VERSION


# --- the nine stages, in request order ------------------------------------------------------------


@hookspec
def provide_frontends() -> Iterable[Component]:
    """Wire formats a client may speak: HTTP, a terminal, a file.

    Config group `frontend`; exactly one is selected. Built once in the front process.
    Contract: `core.stages.frontend.Frontend`.

    Example::

        @hookimpl
        def provide_frontends():
            yield Component("grpc", "acme.grpc_frontend:GrpcFrontend", "OpenAI-like service over gRPC")
    """
    raise NotImplementedError


@hookspec
def provide_renderers() -> Iterable[Component]:
    """Ways to turn messages, text or ids into prompt token ids.

    Config group `renderer`; exactly one is selected. Built once in the front process.
    Contract: `core.stages.renderer.Renderer`.

    Example::

        @hookimpl
        def provide_renderers():
            yield Component("harmony", "acme.harmony:Harmony", "harmony chat format without a template")
    """
    raise NotImplementedError


@hookspec
def provide_admissions() -> Iterable[Component]:
    """Who may enter: bounds, queue caps, deadlines, tenant limits.

    Config group `admission`; exactly one is selected. Built once in the front process.
    Contract: `core.stages.admission.Admission`.

    Example::

        @hookimpl
        def provide_admissions():
            yield Component("business_hours", "acme.hours:BusinessHours", "refuse batch tenants by day")
    """
    raise NotImplementedError


@hookspec
def provide_schedulers() -> Iterable[Component]:
    """Who runs in a step, with how many tokens, and who is preempted.

    Config group `scheduler`; exactly one is selected. Built once in the engine process.
    Contract: `core.stages.scheduler.Scheduler`.

    Example::

        @hookimpl
        def provide_schedulers():
            yield Component("lottery", "acme.lottery:Lottery", "lottery scheduling by tenant tickets")
    """
    raise NotImplementedError


@hookspec
def provide_prefills() -> Iterable[Component]:
    """How much of a prompt runs in a step.

    Config group `prefill`; exactly one is selected. Built once in the engine process.
    Contract: `core.stages.prefill.Prefill`.

    Example::

        @hookimpl
        def provide_prefills():
            yield Component("tpot_target", "acme.prefill:TpotTarget", "chunk sized from a TPOT target")
    """
    raise NotImplementedError


@hookspec
def provide_decodes() -> Iterable[Component]:
    """How many tokens a request tries per step (speculation).

    Config group `decode`; exactly one is selected. Built once in the engine process.
    Contract: `core.stages.decode.Decode`.

    Example::

        @hookimpl
        def provide_decodes():
            yield Component("suffix", "acme.suffix:SuffixDraft", "drafts from a suffix tree")
    """
    raise NotImplementedError


@hookspec
def provide_samplers() -> Iterable[Component]:
    """Logits rows to token ids, in batch.

    Config group `sampler`; exactly one is selected. Built once in the engine process.
    Contract: `core.stages.sampler.Sampler`.

    Example::

        @hookimpl
        def provide_samplers():
            yield Component("typical", "acme.typical:Typical", "locally typical sampling")
    """
    raise NotImplementedError


@hookspec
def provide_detokenizers() -> Iterable[Component]:
    """Token ids to text, held back where a character or a stop string is incomplete.

    Config group `detokenizer`; exactly one is selected. Built once in the front process.
    Contract: `core.stages.detokenizer.Detokenizer`.

    Example::

        @hookimpl
        def provide_detokenizers():
            yield Component("sentence", "acme.sentence:Sentence", "deliver whole sentences")
    """
    raise NotImplementedError


@hookspec
def provide_completions() -> Iterable[Component]:
    """When a request has ended, and why.

    Config group `completion`; exactly one is selected. Built once in the engine process.
    Contract: `core.stages.completion.Completion`.

    Example::

        @hookimpl
        def provide_completions():
            yield Component("budget", "acme.budget:Budget", "end a tenant's requests at its daily budget")
    """
    raise NotImplementedError


# --- what the stages use --------------------------------------------------------------------------


@hookspec
def provide_models() -> Iterable[Component]:
    """What runs: a decoder over a paged KV cache.

    Config group `model`; exactly one is selected. Built once in the engine process.
    Contract: `core.model.interface.Model`.

    Example::

        @hookimpl
        def provide_models():
            yield Component("mamba", "acme.mamba:Mamba", "state-space models")
    """
    raise NotImplementedError


@hookspec
def provide_attentions() -> Iterable[Component]:
    """Paged attention over a mixed batch.

    Config group `attention`; exactly one is selected. Built once in the engine process.
    Contract: `core.model.interface.AttentionBackend`.

    Example::

        @hookimpl
        def provide_attentions():
            yield Component("flash", "acme.flash:Flash", "flash-attn kernels")
    """
    raise NotImplementedError


@hookspec
def provide_quants() -> Iterable[Component]:
    """How a linear layer's weight is kept and applied.

    Config group `quant`; exactly one is selected. Built once in the engine process.
    Contract: `core.model.interface.QuantMethod`.

    Example::

        @hookimpl
        def provide_quants():
            yield Component("int3", "acme.int3:Int3", "3-bit weights")
    """
    raise NotImplementedError


@hookspec
def provide_caches() -> Iterable[Component]:
    """Which block ids hold which tokens; prefix sharing.

    Config group `cache`; exactly one is selected. Built once in the engine process.
    Contract: `core.cache.kv_cache.KVCache`.

    Example::

        @hookimpl
        def provide_caches():
            yield Component("radix", "acme.radix:RadixCache", "radix-tree prefix cache")
    """
    raise NotImplementedError


@hookspec
def provide_executors() -> Iterable[Component]:
    """Where the model and the sampler run.

    Config group `executor`; exactly one is selected. Built once in the engine process.
    Contract: `core.model.interface.Executor`.

    Example::

        @hookimpl
        def provide_executors():
            yield Component("ray", "acme.ray:RayExecutor", "ranks on a Ray cluster")
    """
    raise NotImplementedError


# --- packaging and events ------------------------------------------------------------------------


@hookspec
def provide_config_packages() -> Iterable[str]:
    """Importable packages of YAML that join Hydra's search path, so that a plugin brings its own config group and presets.

    Called before config is composed, in every process that composes one.

    Example::

        @hookimpl
        def provide_config_packages():
            yield "acme.configs"  # acme/configs/scheduler/lottery.yaml: {name: lottery, tickets: 10}
    """
    raise NotImplementedError


@hookspec
def step_finished(stats: StepStats) -> None:
    """One engine step has ended. An observer, in the front process; bound once at assembly and called as a plain function.

    Third parties' observers run only when `plugins.enable` names their plugin. What it raises is logged and dropped.

    Example::

        @hookimpl
        def step_finished(stats):
            LOG.write(f"{stats.step} {stats.forward_s:.4f}\\n")
    """


@hookspec
def request_finished(record: RequestRecord) -> None:
    """A client's request has ended, in whatever way (also abort and error). An observer like `step_finished`.

    Example::

        @hookimpl
        def request_finished(record):
            BILL.add(record.tenant, record.usage.completion_tokens)
    """


STAGES = ("frontend", "renderer", "admission", "scheduler", "prefill", "decode", "sampler", "detokenizer", "completion")
"""The nine words, in request order."""

PARTS = ("model", "attention", "quant", "cache", "executor")
"""What stages 5 to 7 use."""

GROUPS = STAGES + PARTS
"""Config groups that a component is chosen from; the hook of group g is `provide_{g}s`."""
