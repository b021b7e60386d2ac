"""The hooks of Nonet: the one page a plugin author needs.

A plugin is a module (or object) with functions marked `@hookimpl`, named by an entry point in the group `nonet.plugins`.
The hooks say what exists; they are called once, when plugins are loaded, never inside a step. What runs are plain objects:
a `Component` names a class, config selects it, assembly imports and builds it as `Class(settings, context)`.

The module also says which version of this contract it was written for, as a literal::

    NONET_API = "1.4"

A plugin for API 1.N loads here where N is not past ours: from the first release on, a minor version only adds
(`core.api_version` says what is different about 1.0). Another major version, a newer minor one, or none, is refused with one
line. One that uses what is newer than it says (`SINCE`) gets a warning: an older Nonet would load it, and not run it.

The nine stage hooks stand in request order, then the components they use, those of which any number is chosen, and
packaging. Each is called once per process that loads plugins (the front and the engine process load the same set), in plugin
order: built-ins, then third parties by name. An implementation may take no arguments. This module imports no torch, and
neither may a plugin's module with its hooks: keep heavy imports in the module that `target` names. It is imported in a
thread beside the main one (so `signal.signal` does not work there), within `plugins.start_timeout` seconds.

A plugin that cannot be loaded (import error, wrong version, a name that is taken, too slow) keeps the pipeline from starting,
with plugin, wheel and reason, unless config says `plugins.disable=[name]` or `plugins.on_failure=disable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pluggy

from core.api_version import API_VERSION, SINCE
from core.components import CHAINS, GROUPS, PARTS, STAGES, hook_of

__all__ = [
    "API_VERSION",
    "CHAINS",
    "GROUPS",
    "PARTS",
    "PROJECT",
    "SINCE",
    "STAGES",
    "Component",
    "hook_of",
    "hookimpl",
    "hookspec",
]

PROJECT = "nonet"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Component:
    """One choice for one config group.

    `name` is letters, digits, '_' and '-', and begins with a letter or '_'. A name that is taken belongs to who had it: a
    built-in keeps its own, and of two strangers neither is loaded.

    `target` is "package.module:Class", imported only when config selects it. The class has a frozen pydantic `Settings`
    (extra="forbid") and `__init__(self, settings, context)`. Where importing the target is heavy (torch), `settings` names
    the Settings class in a light module, so that config is checked, and `explain` works, without the heavy import.

    Which components go together is said by words, and checked before any weight is read (`core.capabilities`):

    - `provides`: what this one offers. A sampler or logits processor names the fields of `SamplingParams` that it honours
      (a request that sets another is refused by name); other words are its group's, e.g. "logits_processors" or "drafts".
    - `requires`: "group.word", which the component selected for `group` must provide ("sampler.logits_processors").
    - `conflicts`: "group.word" that none may provide, or "group=name" that may not be selected beside it.
    - `accepts`: for a fact of the machine or model (`core.capabilities.FACTS`: device, dtype, head_dim, …) the values it
      can work with; a fact that is not named may be anything.

    `params` is for logits processors: the pydantic model of a request's own parameters, as "package.module:Class" in a light
    module.
    """

    name: str
    target: str
    summary: str
    settings: str | None = None
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    accepts: Mapping[str, tuple[str | int | bool, ...]] = field(default_factory=lambda: MappingProxyType({}))
    params: str | None = None


# --- the nine stages, in request order ------------------------------------------------------------


@hookspec
def provide_frontends() -> Iterable[Component]:
    """Wire formats a client may speak: HTTP, a terminal, a file.

    Config group `frontend`; exactly one is selected. Built once in the front process.
    Contract: `core.stages.frontend.Frontend`.

    Example::

        @hookimpl
        def provide_frontends():
            yield Component("lines", "acme.lines:Lines", "a prompt per line of standard input")
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
            yield Component(
                "polite",
                "acme.polite:Polite",
                "adds a system message",
                provides=("messages", "text", "token_ids"),
            )
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
            yield Component("short_prompts", "acme.short_prompts:ShortPrompts", "refuses long prompts")
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
            yield Component(
                "shortest_first",
                "acme.shortest_first:ShortestFirst",
                "short prompts first",
                provides=("drafts",),
            )
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
            yield Component("shares", "acme.shares:Shares", "half of what is left of a step for each prompt")
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
            yield Component(
                "repeats",
                "acme.repeats:Repeats",
                "drafts from what came before",
                requires=("sampler.drafts", "scheduler.drafts"),
            )
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
            yield Component("argmax", "acme.argmax:Argmax", "the likeliest token")  # temperature > 0 is refused
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
            yield Component("lumps", "acme.lumps:Lumps", "text in larger pieces")
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
            yield Component("bounded", "acme.bounded:Bounded", "no output is longer than the operator allows")
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
            yield Component("scaled", "acme.scaled:Scaled", "the native decoder, its logits scaled")
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
            yield Component(
                "one_by_one",
                "acme.one_by_one:OneByOne",
                "one request after the other",
                accepts={"sliding_window": (False,), "softcap": (False,)},
            )
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
            yield Component("int8", "acme.int8:Int8", "weights in int8, a scale per output channel")
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
            yield Component(
                "long_prefixes",
                "acme.long_prefixes:LongPrefixes",
                "shares long prompts only",
                provides=("prefix_sharing",),
            )
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
            yield Component("logged", "acme.logged:Logged", "logs large steps", provides=("history", "state"))
    """
    raise NotImplementedError


@hookspec
def provide_tool_parsers() -> Iterable[Component]:
    """How a model writes the tools it calls: text to tool calls, also while it streams.

    Config group `tool_parser`; exactly one is selected, `none` by default. Built once in the front process.
    Contract: `core.stages.tool_parser.ToolParser`.

    Example::

        @hookimpl
        def provide_tool_parsers():
            yield Component(
                "json_call",
                "acme.json_call:JsonCall",
                "a call that is the whole answer",
                provides=("tools",),
            )
    """
    raise NotImplementedError


@hookspec
def provide_reasoning_parsers() -> Iterable[Component]:
    """What of a model's answer is reasoning, and what is told.

    Config group `reasoning_parser`; exactly one is selected, `none` by default. Built once in the front process.
    Contract: `core.stages.reasoning_parser.ReasoningParser`.

    Example::

        @hookimpl
        def provide_reasoning_parsers():
            yield Component(
                "first_line",
                "acme.first_line:FirstLine",
                "the first line is reasoning where it begins with #",
                provides=("reasoning",),
            )
    """
    raise NotImplementedError


@hookspec
def provide_predictors() -> Iterable[Component]:
    """How many tokens a request will still generate: what shortest-first scheduling rests on.

    Config group `predictor`; exactly one is selected, `max_tokens` by default. Built once in the engine process.
    Contract: `core.stages.predictor.Predictor`. One that requires `scheduler.predictor` is refused beside a scheduler that asks
    none, where it would do nothing.

    Example::

        @hookimpl
        def provide_predictors():
            yield Component(
                "mean",
                "acme.mean:Mean",
                "the mean of all requests that have ended",
                requires=("scheduler.predictor",),
            )
    """
    raise NotImplementedError


# --- of these, any number is chosen ---------------------------------------------------------------


@hookspec
def provide_grammars() -> Iterable[Component]:
    """What compiles grammars, and says which tokens may come next: JSON schemas, regular expressions, EBNF.

    Config group `grammars`: any number, asked in config's order (`grammars=[llguidance,xgrammar]`): the first that takes a
    grammar compiles it. Built in the process that compiles for the front, and in the engine process, where the sampler runs.
    Contract: `core.stages.grammar.GrammarBackend`.

    Example::

        @hookimpl
        def provide_grammars():
            yield Component(
                "choices",
                "acme.choices:Choices",
                "one of several texts",
                provides=("choice",),  # of core.request.GRAMMAR_KINDS
            )
    """
    raise NotImplementedError


@hookspec
def provide_logits_processors() -> Iterable[Component]:
    """Edits of the logits before the sampler's own, for whole batches of rows.

    Config group `logits_processors`: any number, in config's order (`logits_processors=[min_tokens,dry]`). Built once in the
    engine process, where the sampler runs. Contract: `core.stages.logits_processor.LogitsProcessor`.

    Example::

        @hookimpl
        def provide_logits_processors():
            yield Component(
                "no_repeat",
                "acme.no_repeat:NoRepeat",
                "the newest tokens do not come again",
                params="acme.no_repeat:Params",  # {"tokens": 3}, checked before the request is admitted
                requires=("sampler.logits_processors",),
            )
    """
    raise NotImplementedError


@hookspec
def provide_observers() -> Iterable[Component]:
    """Who is told of each step and each ended request: metrics, traces, bills.

    Config group `observers`: any number (`observers=[prometheus,jsonl]`). Built once in the front process; each runs in a
    thread of its own, so that it can neither slow nor fail a step. Contract: `core.observers.Observer`.

    Example::

        @hookimpl
        def provide_observers():
            yield Component("bill", "acme.bill:Bill", "tokens of each tenant, in a ledger")
    """
    raise NotImplementedError


# --- packaging ------------------------------------------------------------------------------------


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
