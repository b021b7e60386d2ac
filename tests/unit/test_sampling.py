"""What an executor gets as its sampler: with the chain where the sampler runs one, forgetting together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.assembly import build, describe
from core.config.compose import compose
from core.logits.chain import ProcessorChain
from core.logits.sampling import BuiltSampler, SamplerBuilder
from core.plugins import load_plugins
from core.request import SamplingParams
from core.settings import PluginSettings, Settings
from core.stages.logits_processor import NoProcessors
from core.testing.sampler import make_logits, make_row, metadata_of
from core.testing.sampler_reference import spec_of
from core.testing.tokenizers import byte_level_bpe
from plugins.samplers.standard import Standard

PLUGINS = load_plugins()
SPEC = spec_of(340, frozenset({2}))


def builder(*overrides: str, provides: tuple[str, ...] | None = None) -> SamplerBuilder:
    description = describe(Settings.from_config(compose(list(overrides), PLUGINS).values), PLUGINS)
    sampler = description.part("sampler")
    if provides is not None:
        component = replace(sampler.provided.component, provides=provides)
        sampler = replace(sampler, provided=replace(sampler.provided, component=component))
    return SamplerBuilder(
        sampler, description.chain("logits_processors"), description.chain("grammars"), build, SPEC, PluginSettings()
    )


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr("core.logits.sampling.load_tokenizer", lambda files: calls.append(files) or byte_level_bpe())
    return calls


def test_without_processors_the_sampler_has_no_chain(loads: list[Any]) -> None:
    for made in (builder("logits_processors=[]"), builder(provides=("temperature",))):
        sampler = made("cpu")
        assert isinstance(sampler, BuiltSampler) and isinstance(sampler._chain, NoProcessors)
        assert isinstance(sampler._sampler, Standard) and sampler._sampler._processors is sampler._chain
        assert made.incidents() == () and not loads


def test_the_chain_has_the_selected_processors_in_order(loads: list[Any]) -> None:
    made = builder("+logits_processors=[dry,watermark]", "plugins.quarantine_after=7")
    sampler = made("cpu")
    assert isinstance(sampler, BuiltSampler) and isinstance(sampler._chain, ProcessorChain)
    members = sampler._chain._members
    assert [member.name for member in members] == ["min_tokens", "dry", "watermark"]
    assert members[1].who.startswith("logits_processors=dry (plugin plugins.logits_processors, nonet ")
    assert members[0].provides == ("min_tokens",) and members[1].params is not None
    assert len(loads) == 1


def test_sampler_and_chain_forget_together(loads: list[Any]) -> None:
    made = builder("+logits_processors=[dry]")
    sampler = made("cpu")
    assert isinstance(sampler, BuiltSampler)
    sampler._sampler.forget = lambda request_ids: None  # a sampler that does not think of the chain
    rows = [make_row("a", SamplingParams(min_tokens=9, extra={"dry": {}})), make_row("b")]
    found = sampler.sample(make_logits(2, 340), metadata_of(rows))
    assert found.token_ids.keys() == {"a", "b"}
    states = [member.states for member in sampler._chain._members]
    assert [state.keys() for state in states] == [{"a", "b"}, {"a", "b"}]
    sampler.forget(["a", "b"])
    assert not any(states)


def test_incidents_are_handed_out_once(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder()
    sampler = made("cpu")
    monkeypatch.setattr("plugins.logits_processors.min_tokens.MinTokens.apply", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        sampler.sample(make_logits(1, 340), metadata_of([make_row("a", SamplingParams(min_tokens=9))]))
    (incident,) = made.incidents()
    assert (incident.name, incident.plugin.split(",")[0]) == ("min_tokens", "plugins.logits_processors")
    assert made.incidents() == ()
