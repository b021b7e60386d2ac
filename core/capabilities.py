"""Which components go together, checked before any weight is read. Imports no torch.

The parties are the selected components and, once its description is read, the model file. A component says by words what it
`provides`, `requires` and `conflicts` with, and which values of a fact it `accepts` (`core.hookspecs.Component`); the file
requires and provides words too, and brings facts. `WORDS` and `FACTS` are the vocabulary: a plugin may add words of its own,
but no facts. Three moments, each with what is known by then:

- `check_composition`: a config is selected; facts of config alone. Runs before the model file is opened.
- `check_model`: the file's header and JSON are read; no weight is.
- `check_resolved`: where the model is about to be built, model.device=auto and model.dtype=auto are decided.

Every pair that clashes is reported at once, in one line that names both parties and what to select instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING

from core.components import CHAINS, GROUPS
from core.config.clashes import Clash, Fact, Party, Value, clashes, unaccepted
from core.errors import ConfigError, near_matches
from core.hookspecs import Component
from core.request import SamplingParams

if TYPE_CHECKING:
    from core.components import PluginRecord, Provided
    from core.model.spec import ModelSpec
    from core.pipeline import PipelineDescription
    from core.plugins import Plugins
    from core.settings import Settings

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "frontend.tools": "takes `tools` of a request, and gives a client the calls that a tool parser finds",
        "frontend.openai": "answers POST /v1/completions and /v1/chat/completions as OpenAI does",
        "renderer.messages": "renders chats",
        "renderer.text": "renders plain text",
        "renderer.token_ids": "takes prompts that are token ids",
        "renderer.tools": "shows the tools of a request to the model",
        "tool_parser.tools": "finds calls in text; without it, a request with tools is refused",
        "tool_parser.grammar": "says in a grammar what its calls are; without it, no request can demand calls, or strict ones",
        "reasoning_parser.reasoning": "tells reasoning from content; without it, all text is content",
        "scheduler.jump_forward": "takes more ids of a request than a step has sampled, and computes them in the next",
        "scheduler.drafts": "plans draft tokens: several tokens, and rows of logits, of one request in a step",
        "scheduler.predictor": "asks the predictor, and tells it of requests that have ended",
        "scheduler.priority": "looks at the `priority` of a request; without it, a request that has one is refused",
        "sampler.drafts": "verifies draft tokens: several rows of logits of one request in a step",
        "sampler.grammar": "draws only what the grammar of a request lets come next",
        "grammars.<kind>": "compiles a kind of grammar: json_schema, json_object, regex, choice, ebnf, structural_tag",
        "sampler.logits_processors": "runs the selected logits processors over its rows",
        "sampler.<field>": "honours a field of SamplingParams: temperature, top_p, logprobs …",
        "logits_processors.<field>": "honours a field of SamplingParams in place of the sampler",
        "executor.history": "when it samples, the ids of all earlier steps are known",
        "executor.state": "rows of a request always come to the same sampler, which is told of its end: state per request",
        "executor.window_groups": "puts sliding layers into groups with block tables of their own",
        "executor.swap": "copies KV blocks between the device and host memory",
        "cache.prefix_sharing": "finds the blocks of equal prefixes again",
        "cache.window_groups": "gives back the blocks of sliding layers whose tokens have left the window",
        "cache.swap": "keeps books of KV in host memory: that of preempted requests goes there and comes back",
        "attention.sliding_window": "layers in which a token sees the newest positions only",
        "attention.window_groups": "reads no block before the windows of its layers; several layers may share a KV tensor",
        "attention.softcap": "attention scores limited by tanh",
        "attention.blocks_first": "the first axis of a layer's KV cache is made of blocks: each can be copied alone",
        "attention.cpu_blocks": "KV blocks laid out as the native CPU model reads them",
        "quant.cpu_tiles": "weights packed as the native CPU model reads them",
        "model.window_groups": "reads and writes KV by its attention backend alone",
        "model.tokenizer": "of the model file: it has a tokenizer that can be read",
    }
)
"""group.word -> what a component that provides it does. Words of the built-ins; a plugin may have others."""

SWAP_WORDS = ("cache.swap", "executor.swap", "attention.blocks_first")
"""What swap memory in a config requires of the components."""

FACTS: Mapping[str, str] = MappingProxyType(
    {
        "device": "where the model runs: cpu, cuda (model.device, auto resolved by the executor)",
        "dtype": "of weights and activations: float32, bfloat16, float16 (model.dtype, auto resolved by the executor)",
        "kv_dtype": "of the KV cache: the same as dtype",
        "block_size": "tokens of a KV block (cache.block_size)",
        "model_type": "of the model file, as in config.json: llama, qwen3, …",
        "file_kind": "of the model file: gguf, or hf (a folder with config.json and safetensors)",
        "weights": "kinds of weights in the file: dense, a block format of GGUF (Q4_K …), a checkpoint's quant_method",
        "head_dim": "elements of an attention head",
        "sliding_window": "whether any layer of the model has a sliding window: true, false",
        "softcap": "whether the model limits its attention scores: true, false",
    }
)
"""What `Component.accepts` may name. A fact with several values (weights) is accepted when all of them are."""

_WORD = re.compile(r"(?P<group>\w+)\.(?P<word>\w+)")
_NAME = re.compile(r"(?P<group>\w+)=(?P<name>[\w.-]+)")


def check_composition(description: PipelineDescription, settings: Settings, plugins: Plugins) -> None:
    """Raises ConfigError for components that cannot work together."""
    _refuse_swap_without_memory(description)
    facts = config_facts(settings, description)
    _refuse(clashes(_parties(description), facts, installed(plugins)))


def check_model(description: PipelineDescription, settings: Settings, plugins: Plugins, spec: ModelSpec) -> None:
    """Raises ConfigError where the model that `spec` describes does not suit the components, or lacks what they need."""
    from core.model.file_facts import read_file_facts

    found = read_file_facts(spec)
    who = f"the model {spec.name} ({spec.model_type}, {spec.files.path})"
    file = Party("model", "", who, frozenset(found.provides), found.requires)
    facts = config_facts(settings, description) | {name: Fact(values, who) for name, values in found.values.items()}
    _refuse(clashes([*_parties(description), file], facts, installed(plugins)))


def check_resolved(description: PipelineDescription, plugins: Plugins, device: str, dtype: str) -> None:
    """`device` and `dtype` are what the executor has decided on. Raises ConfigError."""
    parties = [party for party in _parties(description) if party.accepts]
    _refuse(unaccepted(parties, _facts_of(device, dtype, " is {} on this machine"), installed(plugins)))


def config_facts(settings: Settings, description: PipelineDescription) -> dict[str, Fact]:
    """The facts that config alone decides."""
    facts = _facts_of(settings.model.device, settings.model.dtype, "={} is set")
    block_size = getattr(description.part("cache").settings, "block_size", None)
    if block_size is not None:
        facts["block_size"] = _fact("cache.block_size", block_size, "={} is set")
    return {name: fact for name, fact in facts.items() if fact.values != ("auto",)}


def _facts_of(device: str, dtype: str, clause: str) -> dict[str, Fact]:
    of_dtype = _fact("model.dtype", dtype, clause)
    return {"device": _fact("model.device", device.partition(":")[0], clause), "dtype": of_dtype, "kv_dtype": of_dtype}


def _fact(key: str, value: Value, clause: str) -> Fact:
    return Fact((value,), f"{key}={value}", key, key + clause.format(value))


def _refuse_swap_without_memory(description: PipelineDescription) -> None:
    """`preemption` auto swaps where it can; who asks for it by name is not to get something else."""
    wanted = getattr(description.part("scheduler").settings, "preemption", None)
    if wanted == "swap" and not getattr(description.part("cache").settings, "swaps", False):
        raise ConfigError(
            "scheduler.preemption=swap needs host memory for KV, and there is none; set cache.swap_memory (4GiB) or "
            "cache.num_swap_blocks, or scheduler.preemption=recompute"
        )


def _parties(description: PipelineDescription) -> list[Party]:
    parties = [party_of(part.provided) for part in description.parts]
    settings = description.part("cache").settings
    if getattr(settings, "swaps", False):
        key = "num_swap_blocks" if getattr(settings, "num_swap_blocks", None) else "swap_memory"
        said = f"cache.{key}={getattr(settings, key)}"
        parties.append(Party("setting", key, said, requires=SWAP_WORDS, instead=f"set cache.{key}=0"))
    return parties


def party_of(provided: Provided) -> Party:
    component = provided.component
    return Party(
        group=provided.group,
        name=component.name,
        who=provided.who,
        provides=frozenset(component.provides),
        requires=component.requires,
        conflicts=component.conflicts,
        accepts=component.accepts,
    )


def installed(plugins: Plugins) -> list[Party]:
    """Everything that could be selected."""
    return [party_of(provided) for group in (*GROUPS, *CHAINS) for provided in plugins.components(group)]


def _refuse(found: Sequence[Clash]) -> None:
    if len(found) == 1:
        raise ConfigError(found[0].reason)
    if found:
        listed = "; ".join(f"({number}) {clash.reason}" for number, clash in enumerate(found, start=1))
        raise ConfigError(f"{len(found)} combinations cannot work: {listed}")


def malformed(component: Component) -> list[str]:
    """What of a component's words cannot be read, with near matches. Plugins are refused for it when they are loaded."""
    required = [problem for word in component.requires if (problem := _problem("requires", word))]
    refused = [problem for word in component.conflicts if (problem := _problem("conflicts", word))]
    facts = (problem for fact, values in component.accepts.items() if (problem := _bad_fact(fact, values)))
    return [*required, *refused, *facts]


def _problem(field: str, word: str) -> str | None:
    found = _WORD.fullmatch(word) or (_NAME.fullmatch(word) if field == "conflicts" else None)
    if found is None:
        forms = '"group.word" or "group=name"' if field == "conflicts" else '"group.word"'
        return f"{field} has {word!r}; write {forms}"
    group, known = found["group"], (*GROUPS, *CHAINS)
    return None if group in known else f"{field} has {word!r}: there is no group {group!r}{near_matches(group, known)}"


def unknown_words(record: PluginRecord, plugins: Plugins) -> list[str]:
    """Words that a plugin's components require or conflict with, and that no installed component provides nor Nonet knows:
    misspelt, or of a plugin that is not there. With near matches."""
    return [
        f"{group}={component.name}: {field} {word!r}, which no installed {word.partition('.')[0]} provides{near}"
        for group, component in record.components
        for field, words in (("requires", component.requires), ("conflicts", component.conflicts))
        for word in words
        if (near := _unknown(word, plugins)) is not None
    ]


def _unknown(word: str, plugins: Plugins) -> str | None:
    """Near matches, or a text without any, of a word that nobody knows; None for one that is known."""
    group, dot, _ = word.partition(".")
    if not dot:
        return None  # group=name: it need not be installed
    known = {f"{group}.{offered}" for provided in plugins.components(group) for offered in provided.component.provides}
    known |= {known_word for known_word in WORDS if known_word.startswith(f"{group}.") and "<" not in known_word}
    if f"{group}.<field>" in WORDS:
        known |= {f"{group}.{name}" for name in SamplingParams.__struct_fields__}
    if word in known:
        return None
    near = get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ", and it is no word of Nonet's"


def _bad_fact(fact: str, values: Sequence[object]) -> str | None:
    if fact not in FACTS:
        return f"accepts names {fact!r}, which is no fact{near_matches(str(fact), FACTS)}"
    if not values or not all(isinstance(value, str | int | bool) for value in values):
        return f"accepts[{fact!r}] must hold texts, numbers or booleans, and at least one: not {values!r}"
    return None
