"""Names that are right elsewhere: of fields in vLLM, SGLang and llama.cpp, and of components."""

import pytest

from core.config.compose import compose
from core.errors import ConfigError, RequestError
from core.other_names import ELSEWHERE as COMPONENTS
from core.other_names import unknown_component
from core.plugins import load_plugins
from plugins.frontends.openai_http.errors import failure_of
from plugins.frontends.openai_http.fields import ELSEWHERE as FIELDS
from plugins.frontends.openai_http.fields import check_fields
from plugins.frontends.openai_http.schema import ChatBody, CompletionBody

PLUGINS = load_plugins()


def refused(field, model=ChatBody):
    with pytest.raises(RequestError) as caught:
        check_fields({field: 1}, model.model_fields)
    assert (caught.value.param, caught.value.code) == (field, "unknown_field")
    return caught.value.message


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_server_is_answered_with_ours(field):
    assert f"`{field}`: " in refused(field)


def test_what_it_says_is_there():
    assert refused("xtc_probability").endswith('send it as `logits_processors`: {"xtc": {"probability": …}}.')
    assert "`guided_grammar`" in refused("ebnf") and "/v1/completions" in refused("best_of")
    assert check_fields({"best_of": 2}, CompletionBody.model_fields) == {"best_of": 2}
    assert not FIELDS.keys() & ChatBody.model_fields.keys()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tool_parser=qwen", "no tool_parser is called 'qwen'; did you mean hermes, qwen3_coder?"),
        ("tool_parser=openai", "no tool_parser is called 'openai'; did you mean harmony?"),
        ("reasoning_parser=qwen3", "no reasoning_parser is called 'qwen3'; did you mean think?"),
        ("reasoning_parser=deepseek_r1", "no reasoning_parser is called 'deepseek_r1'; did you mean think?"),
        ("grammars=[llguidence]", "no grammar backend is called 'llguidence'; did you mean llguidance?"),
        ("observers=[jsnol]", "no observer is called 'jsnol'; did you mean jsonl?"),
    ],
)
def test_a_name_of_another_server_is_answered_with_ours(override, said):
    with pytest.raises(ConfigError) as caught:
        compose([override], PLUGINS)
    assert str(caught.value).startswith(said)


def test_only_what_is_installed_is_offered():
    for group, names in COMPONENTS.items():
        for name, meant in names.items():
            assert set(meant) <= set(PLUGINS.names(group)) and name not in PLUGINS.names(group)
    assert unknown_component("tool_parser", "qwen", ["mine"]) == "no tool_parser is called 'qwen'; choose one of: mine"


def test_a_message_that_begins_with_its_field_has_it_in_quotes():
    told = failure_of(RequestError("tools: no", param="tools")).message
    assert (told, failure_of(RequestError("No: x", param="tools")).message) == ("`tools`: no", "No: x")
