"""What goes together and what is refused: words, facts, the model file, and one line that names both parties."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import core.plugins as loading
from core.assembly import describe
from core.capabilities import FACTS, WORDS, check_composition, check_model, check_resolved, installed
from core.components import CHAINS, GROUPS, hook_of
from core.config.clashes import FILE_WORDS, Clash, Fact, Party, clashes
from core.config.compose import compose
from core.errors import ConfigError, NonetError
from core.hookspecs import API_VERSION, Component, hookimpl
from core.model.block_formats import READABLE_WEIGHTS
from core.model.file_facts import read_file_facts
from core.model.spec import ModelFiles, ModelSpec
from core.plugins import Plugins, load_plugins
from core.request import GRAMMAR_KINDS
from core.settings import Settings
from core.stages.sampler import SAMPLER_FIELDS

SETTINGS = "core.model.model_settings:LocalExecutorSettings"  # of every component that a test makes up


class FakeDistribution:
    metadata = {"Name": "acme-parts"}
    version = "1.2"


class FakePoint:
    name, value, dist = "acme", "acme.plugin", FakeDistribution()

    def __init__(self, plugin: object):
        self._plugin = plugin

    def load(self) -> object:
        return self._plugin


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """Plugins with one more, which provides `group=component, …`."""

    def install(**components: Component | list[Component]) -> Plugins:
        module: Any = types.ModuleType("acme")
        module.NONET_API = API_VERSION
        for group, value in components.items():
            found = value if isinstance(value, list) else [value]
            setattr(module, hook_of(group), hookimpl(lambda found=found: found))
        monkeypatch.setattr(loading, "entry_points", lambda group: [FakePoint(module)])
        return load_plugins()

    return install


def component(name: str, **words: Any) -> Component:
    return Component(name, "acme.parts:Part", "made up", settings=SETTINGS, **words)


def described(plugins: Plugins, *overrides: str) -> Any:
    settings = Settings.from_config(compose(list(overrides), plugins).values)
    return describe(settings, plugins), settings


def refusal(plugins: Plugins, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        described(plugins, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BUILTINS = load_plugins(["all"])
EVERYTHING = [provided for group in (*GROUPS, *CHAINS) for provided in BUILTINS.components(group)]


# The vocabulary


def test_builtins_use_no_word_that_is_not_in_the_table():
    fields = {f"{group}.{field}" for group in ("sampler", "logits_processors") for field in SAMPLER_FIELDS}
    fields |= {f"grammars.{kind}" for kind in GRAMMAR_KINDS}
    for provided in EVERYTHING:
        one = provided.component
        used = [*(f"{provided.group}.{word}" for word in one.provides), *one.requires]
        used += [word for word in one.conflicts if "=" not in word]
        assert set(used) <= {*WORDS, *fields}, provided.who
        assert set(one.accepts) <= set(FACTS), provided.who


def test_every_word_of_the_table_is_explained_and_is_provided_by_a_builtin_or_a_model_file():
    provided = {f"{one.group}.{word}" for one in EVERYTHING for word in one.component.provides}
    provided |= {f"model.{word}" for word in FILE_WORDS}
    assert {word for word in WORDS if not word.endswith(">")} <= provided
    assert all(len(meaning) > 10 for meaning in (*WORDS.values(), *FACTS.values()))


def test_the_page_has_the_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "capabilities.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page.partition("## Words")[2], flags=re.M))
    assert rows == {**WORDS, **FACTS}


def test_weights_that_can_be_read_are_those_with_an_unpacker():
    from core.model.block_formats import FORMATS, weights_kind
    from core.model.dequant import UNPACKERS

    kinds = {weights_kind(one) for one in FORMATS.values() if one.name in UNPACKERS}
    assert kinds == set(READABLE_WEIGHTS)
    assert {weights_kind(one) for one in FORMATS.values()} - kinds  # there are others, which are refused


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"requires": ("smapler.drafts",)}, "no group 'smapler'; did you mean sampler"),
        ({"requires": ("drafts",)}, 'write "group.word"'),
        ({"requires": ("sampler=greedy",)}, 'write "group.word"'),
        ({"conflicts": ("samplers=greedy",)}, "no group 'samplers'; did you mean sampler"),
        ({"conflicts": ("a b",)}, 'write "group.word" or "group=name"'),
        ({"accepts": {"devices": ("cpu",)}}, "'devices', which is no fact; did you mean device"),
        ({"accepts": {"device": ()}}, "at least one"),
        ({"accepts": {"device": (1.5,)}}, "must hold texts, numbers or booleans"),
    ],
)
def test_words_that_cannot_be_read_are_refused_when_the_plugin_is_loaded(install, words, problem):
    plugins = install(cache=component("acme", **words))
    (record,) = [record for record in plugins.records if record.name == "acme"]
    assert (record.status, record.distribution) == ("failed", "acme-parts")
    assert record.reason.startswith("cache=acme: ") and problem in record.reason
    with pytest.raises(NonetError, match=r"acme \(acme-parts 1.2\): cache=acme: "):
        described(plugins, "cache=acme")


# What a config alone decides


def test_a_requirement_names_both_parties_and_what_to_choose():
    message = refusal(BUILTINS, "frontend=chat_cli", "renderer=token_ids")
    for part in (
        "frontend=chat_cli (plugin plugins.frontends, nonet ",
        "requires renderer.messages, which renderer=token_ids (plugin core.builtin, nonet ",
        "choose renderer=text",
        "frontend=offline",
    ):
        assert part in message


@pytest.mark.parametrize("predictor", ["learnt", "oracle"])
def test_a_predictor_that_the_scheduler_does_not_ask_is_refused(predictor):
    for provided in BUILTINS.components("scheduler"):
        scheduler = provided.component.name
        if scheduler == "srtf":
            description, _ = described(BUILTINS, f"scheduler={scheduler}", f"predictor={predictor}")
            assert description.part("predictor").provided.component.name == predictor
            continue
        message = refusal(BUILTINS, f"scheduler={scheduler}", f"predictor={predictor}")
        assert f"predictor={predictor} (plugin plugins.predictors, nonet " in message
        assert (
            f"requires scheduler.predictor, which scheduler={scheduler} (plugin plugins.schedulers, nonet " in message
        )
        assert message.endswith("does not provide; choose scheduler=srtf, or choose predictor=max_tokens")


def test_a_word_that_nothing_provides_gets_a_near_match(install):
    plugins = install(decode=component("ngram", requires=("sampler.darfts",)))
    message = refusal(plugins, "decode=ngram")
    assert "decode=ngram (plugin acme, acme-parts 1.2) requires sampler.darfts" in message
    assert "no installed sampler provides it (did you mean sampler.drafts?), or choose decode=plain" in message


def test_a_conflict_with_a_word_and_one_with_a_name(install):
    plugins = install(
        executor=component("overlapped", provides=("history", "state"), conflicts=("sampler.drafts", "cache=paged")),
        sampler=component("plain_argmax"),
    )
    message = refusal(plugins, "executor=overlapped")
    assert message.startswith("2 combinations cannot work: (1) ")
    assert "conflicts with sampler=standard (plugin plugins.samplers, nonet " in message
    assert "which provides sampler.drafts; choose sampler=plain_argmax, or choose executor=local" in message
    assert (
        "(2) executor=overlapped (plugin acme, acme-parts 1.2) conflicts with cache=paged (plugin core.builtin"
        in message
    )


def test_a_member_of_a_chain_is_left_out_or_added(install):
    plugins = install(
        observers=[component("bill", requires=("observers.ledger",)), component("book", provides=("ledger",))]
    )
    message = refusal(plugins, "observers=[bill]")
    assert "observers=bill (plugin acme, acme-parts 1.2) requires observers.ledger" in message
    assert "add book to observers, or leave bill out of observers" in message
    described(plugins, "observers=[bill,book]")
    described(plugins, "observers=[book,bill]")


def test_a_chain_without_members_is_named(install):
    plugins = install(scheduler=component("paced", requires=("logits_processors.pace",)))
    message = refusal(plugins, "scheduler=paced", "logits_processors=[]")
    assert "which a pipeline without logits_processors does not provide" in message


@pytest.mark.parametrize(
    ("accepts", "override", "said"),
    [
        ({"device": ("cuda",)}, "model.device=cpu", "accepts device cuda, and model.device=cpu is set; set model.device=cuda"),
        ({"device": ("cpu",)}, "model.device=cuda:1", "accepts device cpu, and model.device=cuda is set"),
        ({"kv_dtype": ("float16", "bfloat16")}, "model.dtype=float32", "accepts kv_dtype float16, bfloat16"),
        ({"block_size": (16, 32)}, "cache.block_size=64", "and cache.block_size=64 is set; set cache.block_size=16"),
    ],
)  # fmt: skip
def test_a_fact_of_config(install, accepts, override, said):
    plugins = install(attention=component("flash", accepts=accepts))
    message = refusal(plugins, "attention=flash", override)
    assert "attention=flash (plugin acme, acme-parts 1.2) accepts" in message
    assert said in message and "choose attention=torch_sdpa" in message
    described(plugins, "attention=flash")  # with auto, and blocks of 16


def test_true_is_not_one():
    party = Party("attention", "x", "x", accepts={"block_size": (True,)})
    assert clashes([party], {"block_size": Fact((1,), "cache.block_size=1")})


def test_auto_is_checked_once_the_executor_has_decided(install):
    plugins = install(attention=component("flash", accepts={"device": ("cuda",), "dtype": ("bfloat16",)}))
    description, settings = described(plugins, "attention=flash")
    check_composition(description, settings, plugins)
    check_resolved(description, plugins, "cuda", "bfloat16")
    with pytest.raises(ConfigError) as caught:
        check_resolved(description, plugins, "cpu", "float32")
    assert "(1) attention=flash (plugin acme, acme-parts 1.2) accepts device cuda, and model.device is cpu on" in str(
        caught.value
    )
    assert "(2) attention=flash" in str(caught.value) and "model.dtype is float32 on this machine" in str(caught.value)


# The model file is a party


def spec_of(folder: Path, tokenizer: bool = True, weights: tuple[str, ...] = ("dense",), **config: Any) -> ModelSpec:
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    values = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, **config}
    return ModelSpec("tiny", ModelFiles("hf", folder, str(folder)), values, 32, 64, frozenset(), weights=weights)


GEMMA = {"model_type": "gemma2", "sliding_window": 8, "head_dim": 32}


def test_a_model_with_windows_and_softcap_needs_an_attention_with_both(install, tmp_path):
    plugins = install(attention=component("dense_only"))
    spec = spec_of(tmp_path, **GEMMA)
    description, settings = described(plugins, "attention=dense_only")
    with pytest.raises(ConfigError) as caught:
        check_model(description, settings, plugins, spec)
    message = str(caught.value)
    assert message.count(f"the model tiny (gemma2, {tmp_path}) requires attention.") == 2
    assert "requires attention.sliding_window, which attention=dense_only (plugin acme, acme-parts 1.2)" in message
    assert "requires attention.softcap" in message and "choose attention=torch_sdpa" in message
    assert "or choose another model" in message
    description, settings = described(plugins)
    check_model(description, settings, plugins, spec)


def test_a_model_without_a_tokenizer_is_refused_where_one_is_needed(tmp_path):
    description, settings = described(BUILTINS)
    with pytest.raises(
        ConfigError, match=r"renderer=text .* requires model.tokenizer, which the model tiny .* does not"
    ):
        check_model(description, settings, BUILTINS, spec_of(tmp_path, tokenizer=False))


@pytest.mark.parametrize(
    ("accepts", "config", "said"),
    [
        ({"head_dim": (64, 128)}, {}, "accepts head_dim 64, 128, and the model tiny (llama, {}) has 16"),
        ({"softcap": (False,)}, GEMMA, "accepts softcap false, and the model tiny (gemma2, {}) has true"),
        ({"file_kind": ("gguf",)}, {}, "accepts file_kind gguf, and the model tiny (llama, {}) has hf"),
    ],
)
def test_a_fact_of_the_file(install, tmp_path, accepts, config, said):
    plugins = install(attention=component("flash", accepts=accepts, provides=("softcap", "sliding_window")))
    description, settings = described(plugins, "attention=flash")
    with pytest.raises(ConfigError) as caught:
        check_model(description, settings, plugins, spec_of(tmp_path, **config))
    expected = f"attention=flash (plugin acme, acme-parts 1.2) {said.format(tmp_path)}; choose attention=torch_sdpa"
    assert str(caught.value).startswith(expected)


def test_a_model_type_without_a_native_plan_runs_by_transformers(tmp_path):
    spec = spec_of(tmp_path, model_type="gpt_neox")
    description, settings = described(BUILTINS)
    with pytest.raises(ConfigError, match=r"has gpt_neox; choose model=transformers$"):
        check_model(description, settings, BUILTINS, spec)
    description, settings = described(BUILTINS, "model=transformers")
    check_model(description, settings, BUILTINS, spec)


def test_only_the_kinds_of_weights_that_are_not_accepted_are_named(tmp_path):
    description, settings = described(BUILTINS)
    with pytest.raises(ConfigError, match=r"has IQ1_S; choose another model$"):
        check_model(description, settings, BUILTINS, spec_of(tmp_path, weights=("IQ1_S", "Q4_K", "dense")))


@pytest.mark.parametrize(
    ("config", "slides", "head_dim"),
    [
        ({}, False, 16),
        ({"model_type": "mistral"}, True, 16),  # 4096 where the config says nothing
        ({"model_type": "mistral", "sliding_window": None}, False, 16),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 0}, False, 16),  # switched off by its key
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, True, 16),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, False, 16),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": "x"}, True, 16),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2}}, True, 256),
        ({"model_type": "phi3", "sliding_window": 8}, True, 16),
        ({"model_type": "phi3", "sliding_window": 8, "layer_types": ["full_attention"] * 2}, False, 16),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 128}, False, None),
    ],
)
def test_what_is_read_of_a_config(tmp_path, config, slides, head_dim):
    found = read_file_facts(spec_of(tmp_path, **config))
    assert found.values["sliding_window"] == (slides,)
    assert ("attention.sliding_window" in found.requires) is slides
    assert found.values.get("head_dim") == (None if head_dim is None else (head_dim,))


# The checker itself, against its definition

GROUP_NAMES = ("sampler", "attention", "logits_processors", "observers")
LETTERS = ("a", "b", "c")
GROUP_WORDS = [f"{group}.{word}" for group in GROUP_NAMES for word in LETTERS]
FEW_WORDS = st.lists(st.sampled_from(GROUP_WORDS), max_size=3, unique=True).map(tuple)
NAMED = st.lists(st.sampled_from([*GROUP_WORDS, *(f"{g}={n}" for g in GROUP_NAMES for n in "xy")]), max_size=2).map(
    tuple
)
VALUES = st.lists(st.sampled_from(["cpu", "cuda", 1, True]), min_size=1, max_size=2, unique_by=repr).map(tuple)


@st.composite
def compositions(draw: st.DrawFn) -> list[Party]:
    """One sampler and attention, and members of chains."""
    keys = [("sampler", draw(st.sampled_from("xy"))), ("attention", draw(st.sampled_from("xy")))]
    keys += [(chain, name) for chain in CHAINS for name in draw(st.sets(st.sampled_from("xy")))]
    return [
        Party(
            group,
            name,
            f"{group}={name}",
            draw(st.frozensets(st.sampled_from(LETTERS))),
            draw(FEW_WORDS),
            draw(NAMED),
            draw(st.dictionaries(st.sampled_from(["device", "block_size"]), VALUES)),
        )
        for group, name in keys
    ]


FACT_VALUES = st.dictionaries(
    st.sampled_from(["device", "block_size"]), VALUES.map(lambda values: Fact(values, "the config"))
)


def keys(found: Iterable[Clash]) -> set[tuple[str, str]]:
    return {(clash.parties[0], clash.word) for clash in found}


@given(compositions(), FACT_VALUES)
def test_clashes_are_what_their_definition_says(parties, facts):
    expected = set()
    for party in parties:
        for word in party.requires:
            group, _, name = word.partition(".")
            if not any(name in other.provides for other in parties if other.group == group):
                expected.add((party.who, word))
        for word in party.conflicts:
            for other in parties:
                selected = word == f"{other.group}={other.name}"
                offers = any(word == f"{other.group}.{offered}" for offered in other.provides)
                if other is not party and (selected or offers):
                    expected.add((party.who, word))
        for fact, allowed in party.accepts.items():
            if fact in facts and not set(map(repr, facts[fact].values)) <= set(map(repr, allowed)):
                expected.add((party.who, fact))
    found = clashes(parties, facts)
    assert keys(found) == expected
    for clash in found:
        assert all(who in clash.reason for who in clash.parties) and clash.word in clash.reason


@given(compositions(), FACT_VALUES, st.data())
def test_one_more_word_provided_never_makes_a_requirement_fail(parties, facts, data):
    def unmet(members: list[Party]) -> set[tuple[str, str]]:
        required = {(party.who, word) for party in members for word in party.requires}
        return keys(clashes(members, facts)) & required - {(p.who, w) for p in members for w in p.conflicts}

    index = data.draw(st.integers(0, len(parties) - 1))
    word = data.draw(st.sampled_from(LETTERS))
    more = [*parties]
    more[index] = replace(parties[index], provides=parties[index].provides | {word})
    assert unmet(more) <= unmet(parties)


@given(compositions(), FACT_VALUES, st.randoms(use_true_random=False))
def test_the_order_of_parties_and_the_alternatives_change_no_verdict(parties, facts, random):
    shuffled = random.sample(parties, len(parties))
    assert keys(clashes(shuffled, facts)) == keys(clashes(parties, facts, installed(BUILTINS)))


@given(compositions(), FACT_VALUES)
def test_what_is_not_known_refuses_nobody(parties, facts):
    known = {word for _, word in keys(clashes(parties, facts)) - keys(clashes(parties, {}))}
    assert known <= set(facts)


# Host memory for KV


def test_swap_memory_is_refused_with_each_component_that_cannot_swap(install):
    remote = component("remote", provides=("history", "state"))
    plugins = install(cache=component("fixed"), attention=component("slots"), executor=remote)
    described(plugins, "attention=slots")
    message = refusal(plugins, "attention=slots", "cache.swap_memory=2GiB")
    assert message == (
        "cache.swap_memory=2GiB requires attention.blocks_first, which attention=slots (plugin acme, acme-parts 1.2) does not "
        "provide; choose attention=torch_sdpa or attention=cpu_paged, or set cache.swap_memory=0"
    )
    message = refusal(plugins, "attention=slots", "executor=remote", "cache.num_swap_blocks=9")
    assert message.startswith("2 combinations cannot work: ")
    assert "cache.num_swap_blocks=9 requires executor.swap, which executor=remote" in message


def test_a_cache_without_the_word_cannot_swap(install):
    cache = Component("old", "acme.parts:Part", "made up", settings="core.cache.kv_cache:CacheSettings")
    plugins = install(cache=cache)
    described(plugins, "cache=old")
    message = refusal(plugins, "cache=old", "cache.swap_memory=0.5")
    assert (
        "cache.swap_memory=0.5 requires cache.swap, which cache=old (plugin acme, acme-parts 1.2) does not" in message
    )
    assert message.endswith("choose cache=paged, or set cache.swap_memory=0")
    described(plugins, "cache=paged", "cache.swap_memory=0.5")
    described(plugins, "cache=old", "cache.num_swap_blocks=0", "cache.swap_memory=0.5")


def test_swapping_without_host_memory_is_refused(install):
    plugins = install()
    message = refusal(plugins, "scheduler.preemption=swap")
    assert "scheduler.preemption=swap needs host memory" in message and "cache.swap_memory" in message
    described(plugins, "scheduler.preemption=swap", "cache.num_swap_blocks=4")
    described(plugins, "scheduler.preemption=auto")
