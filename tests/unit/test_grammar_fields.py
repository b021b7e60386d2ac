"""Which grammars a server takes, and what it says of the others: before anything is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.assembly import describe
from core.components import PluginRecord, Provided
from core.config.compose import compose
from core.errors import ConfigError, RequestError
from core.front.request_fields import RequestFields
from core.grammar.figures import GrammarFigures
from core.grammar.setup import grammar_setup
from core.hookspecs import Component
from core.plugins import load_plugins
from core.request import GRAMMAR_KINDS, GrammarSpec, SamplingParams
from core.settings import Settings
from core.testing.engines import fake_spec

PLUGINS = load_plugins()
ACME = PluginRecord("acme", "acme-wheel", "1.0", "loaded")


def fields_of(*overrides: str) -> RequestFields:
    return RequestFields(describe(Settings.from_config(compose(list(overrides), PLUGINS).values), PLUGINS), PLUGINS)


def refused(fields: RequestFields, **values: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        fields.check_grammar(GrammarSpec(**values), "guided_json", "guided_decoding_backend")
    param = "guided_decoding_backend" if "backend" in values else "guided_json"
    assert (caught.value.status, caught.value.param) == (400, param)
    return caught.value


def with_backends(fields: RequestFields, **kinds: tuple[str, ...]) -> RequestFields:
    """The same where these are selected in place of the built-in ones; all are installed."""
    selected = {
        name: Provided("grammars", Component(name, "acme.g:G", "a backend", provides=provides), ACME)
        for name, provides in kinds.items()
    }
    fields._selected_grammars = selected
    fields._grammars = (*fields._grammars, *selected.values())
    return fields


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
def test_the_default_takes_every_kind(kind: str) -> None:
    fields = fields_of()
    fields.check_grammar(GrammarSpec(kind=kind), "p", "b")
    fields.check(SamplingParams(grammar=GrammarSpec(kind=kind)))


def test_a_kind_that_there_is_not() -> None:
    error = refused(fields_of(), kind="json_shema")
    assert error.message == "guided_json: 'json_shema' is no kind of grammar; did you mean json_schema, json_object?"


def test_without_a_backend_it_is_said_which_would_do() -> None:
    error = refused(fields_of("grammars=[]"), kind="regex")
    assert error.code == "unsupported"
    assert error.message == (
        "guided_json: grammars=[] compiles no regex; serve with +grammars=[llguidance] or +grammars=[xgrammar] for it"
    )


def test_a_kind_that_no_selected_backend_compiles() -> None:
    fields = with_backends(fields_of(), mine=("choice",), other=("regex",))
    fields.check_grammar(GrammarSpec(kind="choice"), "p", "b")
    error = refused(fields, kind="ebnf")
    assert error.message.startswith("guided_json: grammars=[mine,other] compiles no ebnf; serve with +grammars=[llguid")


def test_the_asked_backend() -> None:
    fields = with_backends(fields_of(), mine=("choice",))
    fields.check_grammar(GrammarSpec(kind="choice", backend="mine"), "p", "b")
    error = refused(fields, kind="regex", backend="mine")
    assert error.message.startswith("guided_decoding_backend: grammars=mine compiles no regex; serve with ")
    error = refused(fields, kind="regex", backend="llguidance")
    assert error.message == (
        "guided_decoding_backend: this server does not run grammars=llguidance; "
        "serve with +grammars=[llguidance] for it"
    )
    error = refused(fields, kind="regex", backend="llguidence\n")
    assert (
        error.message == "guided_decoding_backend: there is no grammar backend 'llguidence?'; did you mean llguidance?"
    )


def test_what_the_server_runs_is_said_where_another_backend_is_asked() -> None:
    fields = fields_of()
    error = refused(fields, kind="regex", backend="xgrammar")
    assert error.message == (
        "guided_decoding_backend: this server does not run grammars=xgrammar; "
        "leave the field out for grammars=llguidance or serve with +grammars=[xgrammar] for it"
    )
    error = refused(fields, kind="regex", backend="xgramar")
    assert error.message == (
        "guided_decoding_backend: there is no grammar backend 'xgramar'; did you mean xgrammar? "
        "Leave the field out for grammars=llguidance"
    )
    fields = with_backends(fields_of(), my_gram=("choice",), llguidance=GRAMMAR_KINDS)
    error = refused(fields, kind="regex", backend="my_gram")
    assert error.message == (
        "guided_decoding_backend: grammars=my_gram compiles no regex; leave the field out for grammars=llguidance"
    )


def test_a_sampler_that_would_ignore_it() -> None:
    fields = fields_of()
    component = Component("mine", "acme.mine:Mine", "a sampler", provides=("temperature",))
    fields._sampler = Provided("sampler", component, ACME)
    error = refused(fields, kind="regex")
    assert error.message == (
        "guided_json is not supported by sampler=mine; serve with sampler=greedy or sampler=standard for it"
    )


def test_what_is_built_of_config() -> None:
    settings = Settings.from_config(
        compose(["grammars=[xgrammar,llguidance]", "structured_outputs.compile_memory=1GiB"], PLUGINS).values
    )
    description = describe(settings, PLUGINS)
    setup = grammar_setup(description, settings, PLUGINS, fake_spec(), GrammarFigures())
    assert setup is not None
    assert [each.part.name for each in setup.parts] == ["xgrammar", "llguidance"]  # config's order
    assert setup.starts_early and setup.compiler.pids == []
    boot = setup.compiler._boot
    assert boot.memory == 2**30 and boot.plugins == PLUGINS.fingerprint()
    assert Settings.from_json(boot.settings).structured_outputs.compile_memory == "1GiB"
    alone = settings.model_copy(update={"process": settings.process.model_copy(update={"separate": False})})
    assert not grammar_setup(description, alone, PLUGINS, fake_spec(), GrammarFigures()).starts_early


def test_no_process_where_nobody_would_obey() -> None:
    settings = Settings.from_config(compose(["grammars=[]"], PLUGINS).values)
    assert grammar_setup(describe(settings, PLUGINS), settings, PLUGINS, fake_spec(), GrammarFigures()) is None
    settings = Settings.from_config(compose([], PLUGINS).values)
    description = describe(settings, PLUGINS)
    component = Component("mine", "acme.mine:Mine", "a sampler")
    parts = tuple(
        replace(part, provided=Provided("sampler", component, ACME)) if part.group == "sampler" else part
        for part in description.parts
    )
    assert grammar_setup(replace(description, parts=parts), settings, PLUGINS, fake_spec(), GrammarFigures()) is None


@pytest.mark.parametrize("text", ["", "2", "GiB", "-1GiB", "0MiB", "2GB", "nanGiB", "1e999GiB"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write a size"):
        Settings.from_config(compose([f"structured_outputs.cache_memory='{text}'"], PLUGINS).values)
