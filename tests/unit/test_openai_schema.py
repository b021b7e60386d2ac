"""Request bodies of the HTTP frontend: bounds, types, refused fields, conversion. Bug rows E1, G1-G5, H2-H5, N6."""

import json
import math
import random

import pytest

from core.batch import TokenLogprobs
from core.errors import ConfigError, EngineDeadError, GenerationError, OverloadedError, RequestError
from core.outputs import CompletionOutput
from core.request import FinishReason, RepetitionDetection
from core.stages.renderer import ChatPrompt, TextPrompt, TokenPrompt
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe
from plugins.frontends.openai_http import strict_json
from plugins.frontends.openai_http.answer import finish_reason, stop_reason
from plugins.frontends.openai_http.auth import ApiKeys, tenant_of
from plugins.frontends.openai_http.convert import (
    Caller,
    chat_request,
    check_model,
    completion_requests,
    sampling_defaults,
    sampling_params,
)
from plugins.frontends.openai_http.drain import Drain
from plugins.frontends.openai_http.errors import ShuttingDownError, failure_of
from plugins.frontends.openai_http.fields import REFUSED, check_fields
from plugins.frontends.openai_http.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from plugins.frontends.openai_http.messages import chat_prompt, prompts
from plugins.frontends.openai_http.origins import host_name
from plugins.frontends.openai_http.parse import validate
from plugins.frontends.openai_http.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    WithoutEffect,
    bounded,
)
from plugins.frontends.openai_http.settings import Bounds, Settings

BOUNDS = Bounds()
CHAT = bounded(ChatBody, BOUNDS)
COMPLETION = bounded(CompletionBody, BOUNDS)
HELLO = [{"role": "user", "content": "Hello"}]
CALLER = Caller("id", "tenant")


def chat_body(**fields):
    body = {"messages": HELLO, **fields}
    return validate(CHAT, check_fields(body, CHAT.model_fields))


def completion_body(**fields):
    body = {"prompt": "Hello", **fields}
    return validate(COMPLETION, check_fields(body, COMPLETION.model_fields))


def chat(**fields):
    body = chat_body(**fields)
    return chat_request(body, chat_prompt(body, body.messages, BOUNDS), CALLER, {})


def completion(**fields):
    body = completion_body(**fields)
    return completion_requests(body, prompts(body.prompt, BOUNDS), CALLER, {})


def refused(call, **fields):
    with pytest.raises(RequestError) as caught:
        call(**fields)
    return caught.value


# --- bounds ---------------------------------------------------------------------------------------


def unbounded(schema, path, root):
    """Places of a JSON schema where a client could send as much as it likes."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    for branch in schema.get("anyOf", ()):
        yield from unbounded(branch, path, root)
    if "enum" in schema or "const" in schema:
        return
    kind = schema.get("type")
    if kind in ("integer", "number"):
        if not {"minimum", "exclusiveMinimum"} & set(schema) or "maximum" not in schema:
            yield path
    elif kind == "string" and "maxLength" not in schema:
        yield path
    elif kind == "array":
        if "maxItems" not in schema:
            yield path
        yield from unbounded(schema["items"], f"{path}[]", root)
    elif kind == "object":
        if isinstance(schema.get("additionalProperties"), dict):
            if "maxProperties" not in schema:
                yield path
            yield from unbounded(schema["additionalProperties"], f"{path}{{}}", root)
        for name, part in schema.get("properties", {}).items():
            yield from unbounded(part, f"{path}.{name}", root)


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody])
def test_every_number_string_and_list_has_a_bound(model):
    schema = bounded(model, BOUNDS).model_json_schema()
    assert list(unbounded(schema, model.__name__, schema)) == []


def numeric_fields():
    for name, schema in CHAT.model_json_schema()["properties"].items():
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") in ("integer", "number"):
                yield name, branch


@pytest.mark.parametrize(("name", "schema"), list(numeric_fields()))
def test_documented_bounds_are_enforced(name, schema):
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
    too_small = low - 1 if "minimum" in schema else low
    for value in (too_small, high + 1, 10**30, -(10**30)):
        assert refused(chat_body, **{name: value}).param == name
    assert getattr(chat_body(**{name: high}), name) == high


@pytest.mark.parametrize(("name", "schema"), list(numeric_fields()))
@pytest.mark.parametrize("value", ["2", True, [], {}, "nan"])
def test_numbers_are_numbers(name, schema, value):
    assert refused(chat_body, **{name: value}).param == name


def test_integers_are_not_floats_but_floats_may_be_integers():
    assert refused(chat_body, n=1.5).param == "n"
    assert refused(chat_body, n=1.0).param == "n"
    assert chat(temperature=1).params.temperature == 1.0


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 10**9, 1_000_000])
def test_n(n):  # D1, H5
    assert refused(chat_body, n=n).param == "n"


def test_configured_bounds_replace_the_defaults():
    model = bounded(ChatBody, Bounds(n=2, stop=1))
    assert validate(model, {"messages": HELLO, "n": 2}).n == 2
    with pytest.raises(RequestError):
        validate(model, {"messages": HELLO, "n": 3})
    with pytest.raises(RequestError):
        validate(model, {"messages": HELLO, "stop": ["a", "b"]})
    assert model.model_json_schema()["properties"]["n"]["anyOf"][0]["maximum"] == 2


def test_h5_large_lists():
    assert refused(completion, prompt=["x"] * 100_000).param == "prompt"
    assert refused(completion_body, best_of=10**6).param == "best_of"
    assert refused(chat_body, messages=HELLO * 2000).param == "messages"


# --- token ids and words --------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [{"-1": 5}, {"abc": 1}, {"5": "nan"}, {"5": 1e9}, {"5": None}, {"1e3": 1}, [1]])
def test_g1_logit_bias(bias):
    assert refused(chat_body, logit_bias=bias).param.startswith("logit_bias")


def test_logit_bias_keys_become_ids():
    assert chat(logit_bias={"5": -100, "191222": 1.5}).params.logit_bias == {5: -100.0, 191222: 1.5}
    assert refused(chat, logit_bias={"5": 1, "05": 2}).param == "logit_bias"
    assert refused(chat_body, logit_bias={str(i): 0 for i in range(1025)}).param == "logit_bias"


@pytest.mark.parametrize(
    "prompt", [[-1], [2**31], [2**63], [1.0], [True], [[]], [], [None], [[1], "a"], ["a", 1], 5, {}]
)
def test_g3_prompt_ids(prompt):
    assert refused(completion, prompt=prompt).param.startswith("prompt")


def test_g2_stop_token_ids():
    assert refused(chat_body, stop_token_ids=[-1]).param == "stop_token_ids[0]"
    assert refused(chat_body, stop_token_ids=list(range(300))).param == "stop_token_ids"
    assert chat(stop_token_ids=[1, 2]).params.stop_token_ids == (1, 2)
    assert refused(chat_body, allowed_token_ids=[]).param == "allowed_token_ids"


@pytest.mark.parametrize("word", [" ", "\t", "\u0007", "", "a\u0000b", "x" * 300])
def test_g5_bad_words(word):
    assert refused(chat_body, bad_words=["fine", word]).param.startswith("bad_words")


def test_bad_words_pass_as_they_are():  # G4: both forms are the renderer's work
    assert chat(bad_words=["described", "👩‍👩‍👧"]).params.bad_words == ("described", "👩‍👩‍👧")


def test_stop_strings():
    assert chat(stop="a").params.stop == ("a",)
    assert chat(stop=["a", "b"]).params.stop == ("a", "b")
    assert chat(stop=None).params.stop == ()
    for stop in ([""], "", ["a"] * 17, ["é" * 129], [1], 5):
        assert refused(chat_body, stop=stop).param.startswith("stop")


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(CHAT.model_fields)))
def test_refused_fields_are_named(name):
    error = refused(chat_body, **{name: {"some": "value"}})
    assert (error.param, error.code) == (name, "unsupported")
    assert REFUSED[name].needs in error.message
    chat_body(**{name: None})
    for value in REFUSED[name].harmless:
        chat_body(**{name: value})


def test_harmless_means_equal_in_type():
    assert refused(chat_body, store=0).param == "store"


def test_fields_without_effect_change_nothing():
    values = {
        "user": "u",
        "metadata": {"k": "v"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "service_tier": "auto",
        "request_id": "mine",
    }
    assert set(values) == set(WithoutEffect.model_fields)
    assert chat(**values) == chat()
    assert refused(chat_body, service_tier="flex").param == "service_tier"
    assert refused(chat_body, metadata={str(i): "" for i in range(17)}).param == "metadata"


def test_unknown_fields_get_near_matches():
    error = refused(chat_body, temprature=1)
    assert (error.param, error.code) == ("temprature", "unknown_field")
    assert "temperature" in error.message
    assert "\x1b" not in refused(chat_body, **{"\x1b[31m" + "x" * 500: 1}).message
    assert refused(chat_body, echo=True).param == "echo"
    assert refused(completion_body, suffix="x").param == "suffix"


def test_null_means_not_given():
    fields = {name: None for name in CHAT.model_fields if name != "messages"}
    assert chat(**fields) == chat()


# --- conversion -----------------------------------------------------------------------------------


def test_openai_fields():
    request = chat(
        n=2, max_tokens=5, temperature=0.5, top_p=0.9, frequency_penalty=1, presence_penalty=-1, seed=7, stream=True
    )
    params = request.params
    assert (params.n, params.temperature, params.top_p, params.seed) == (2, 0.5, 0.9, 7)
    assert (params.frequency_penalty, params.presence_penalty) == (1.0, -1.0)
    assert (request.max_tokens, request.stream, request.tenant) == (5, True, "tenant")


def test_extension_fields():
    request = chat(
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stream_interval=4,
        allowed_token_ids=[3],
        prompt_logprobs=2,
        cache_salt="s",
        priority=-3,
        ttl=2.5,
        repetition_detection={"max_pattern_size": 4},
    )
    params = request.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert (params.stream_interval, params.allowed_token_ids, params.prompt_logprobs) == (4, (3,), 2)
    assert params.repetition_detection == RepetitionDetection(max_pattern_size=4)
    assert (request.cache_salt, request.priority, request.ttl) == ("s", -3, 2.5)
    assert (chat().ttl, chat(ttl=3).ttl, completion(prompt="a", ttl=0.1)[0].ttl) == (None, 3, 0.1)
    assert chat(top_k=-1).params.top_k == 0


def test_h2_which_limit_is_named():
    assert (chat().max_tokens, chat(max_tokens=3).max_tokens_param) == (None, "max_tokens")
    newer = chat(max_completion_tokens=3)
    assert (newer.max_tokens, newer.max_tokens_param) == (3, "max_completion_tokens")
    assert chat(max_completion_tokens=3, max_tokens=3).max_tokens == 3
    assert refused(chat, max_completion_tokens=3, max_tokens=4).param == "max_completion_tokens"
    assert refused(chat, max_tokens=0).param == "max_tokens"
    assert refused(chat, max_completion_tokens=2, min_tokens=3).param == "min_tokens"


@pytest.mark.parametrize("value", [-1, 0, 2**31])
def test_h3_bad_max_tokens(value):
    assert refused(completion_body, max_tokens=value).param == "max_tokens"


def test_h3_missing_max_tokens_is_what_is_left():
    assert [completion()[0].max_tokens, completion(max_tokens=None)[0].max_tokens] == [None, None]


def test_e1_logprobs():
    assert chat().params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(chat_body, logprobs=1).param == "logprobs"
    assert refused(completion_body, logprobs=True).param == "logprobs"
    assert refused(completion_body, logprobs=21).param == "logprobs"


def test_echo_with_logprobs_asks_for_prompt_logprobs():
    assert completion(echo=True, logprobs=3)[0].params.prompt_logprobs == 3
    assert completion(echo=True)[0].params.prompt_logprobs is None
    assert completion(logprobs=3)[0].params.prompt_logprobs is None


def test_completion_prompts():
    assert completion(prompt="a")[0].prompt == TextPrompt("a")
    assert [r.prompt for r in completion(prompt=["a", "b"])] == [TextPrompt("a"), TextPrompt("b")]
    assert completion(prompt=[1, 2])[0].prompt == TokenPrompt([1, 2])
    assert [r.prompt for r in completion(prompt=[[1], [2]])] == [TokenPrompt([1]), TokenPrompt([2])]
    assert len({r.request_id for r in completion(prompt=["a", "b"])}) == 2


def test_best_of_draws_as_many_and_needs_their_logprobs():
    assert (completion(best_of=1)[0].params.n, completion(best_of=1)[0].params.logprobs) == (1, None)
    assert completion(best_of=2, n=2, stream=True)[0].params.n == 2
    assert (completion(best_of=3)[0].params.n, completion(best_of=3)[0].params.logprobs) == (3, 0)
    assert completion(best_of=3, n=2, logprobs=4)[0].params.logprobs == 4
    assert refused(completion, best_of=2, n=3).param == "best_of"
    assert refused(completion, best_of=2, stream=True).param == "best_of"
    assert refused(completion_body, best_of=17).param == "best_of"


def test_rules_between_fields():
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(chat, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    pattern = {"max_pattern_size": 2, "min_pattern_size": 3}
    assert refused(chat, repetition_detection=pattern).param == "repetition_detection.min_pattern_size"


def test_model_defaults():
    config = {"temperature": 0.6, "top_k": 64, "do_sample": True, "top_p": None}
    defaults = sampling_defaults(config)
    assert sampling_params(chat_body(), defaults, None, None).top_k == 64
    assert sampling_params(chat_body(temperature=1), defaults, None, None).temperature == 1.0
    greedy = sampling_defaults({"do_sample": False, "temperature": 0.6})
    assert sampling_params(chat_body(), greedy, None, None).temperature == 0.0


def test_model_names():
    served = ("first", "second")
    assert [check_model(name, served) for name in (None, "", "second")] == ["first", "first", "second"]
    with pytest.raises(RequestError) as caught:
        check_model("secnd", served)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert "second" in caught.value.message


# --- messages -------------------------------------------------------------------------------------


def test_messages_keep_openai_shape():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
    ]
    prompt = chat(messages=messages).prompt
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]
    assert prompt.add_generation_prompt


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, "messages[1].content"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "content": "x", "function_call": {}}, "messages[1].function_call"),
        ({"role": "assistant", "content": "x", "name": []}, "messages[1].name"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[1].weight"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": "x", "name": "n" * 65}, "messages[1].name"),
    ],
)
def test_n3_p8_bad_messages(message, param):
    assert refused(chat, messages=[*HELLO, message]).param == param


@pytest.mark.parametrize("messages", [[], None, "x", [5], {}])
def test_h4_bad_message_lists(messages):
    assert refused(chat, messages=messages).param.startswith("messages")


RESERVED = "tokenize chat_template messages tools add_generation_prompt return_dict __class__ continue_final_message"


@pytest.mark.parametrize("name", RESERVED.split())
def test_n6_reserved_template_arguments(name):
    assert refused(chat, chat_template_kwargs={name: True}).param == f"chat_template_kwargs.{name}"


def test_n5_no_template_in_a_request():
    assert refused(chat, chat_template="{{ 1 }}").param == "chat_template"
    assert chat(chat_template_kwargs={"enable_thinking": False}).prompt.template_kwargs == {"enable_thinking": False}


def test_continue_final_message():
    ending = [*HELLO, {"role": "assistant", "content": "OK! "}]
    prompt = chat(messages=ending, continue_final_message=True).prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert refused(chat, continue_final_message=True).param == "continue_final_message"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, messages=ending, **both).param == "continue_final_message"


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\\ud800"}',
        b'{"a\\udfff": 1}',
        b"[" * 65 + b"]" * 65,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a": 1} {"b": 2}',
        b"{'a': 1}",
        b'{"a": 01}',
        b'{"a": "\x01"}',
    ],
)
def test_strict_json_refuses(body):
    with pytest.raises(RequestError) as caught:
        strict_json.loads(body)
    assert caught.value.code == "invalid_json"


def test_strict_json_equals_json_on_good_input():
    rng = random.Random(0)

    def value(depth):
        if depth and rng.random() < 0.5:
            return {f"k{i}": value(depth - 1) for i in range(3)} if rng.random() < 0.5 else [value(depth - 1)] * 2
        return rng.choice([1, -2.5, True, None, "é🔥\u0000", "\\ud", 10**30, ""])

    for _ in range(200):
        text = json.dumps(value(6), ensure_ascii=rng.random() < 0.5)
        assert strict_json.loads(text.encode()) == json.loads(text)
    assert strict_json.loads(b"[" * 64 + b"]" * 64)


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_level_bpe, sentencepiece_bpe])
def test_e4_logprobs_of_byte_tokens(make):
    tokenizer = make()
    ids = tokenizer.encode("🜚", False)
    assert len(ids) > 1
    rows = [TokenLogprobs(i, -math.inf, 1, [(j, -1.0) for j in ids]) for i in ids]
    content = chat_logprobs(tokenizer, rows, 20)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "🜚"
    assert all(entry["logprob"] == -9999.0 and "\ufffd" in entry["token"] for entry in content)
    parts = CompletionLogprobs(tokenizer, 20).tokens(rows)
    assert all(token.startswith("bytes:\\x") for token in parts["tokens"])
    assert [len(top) for top in parts["top_logprobs"]] == [len(set(ids))] * len(ids)


def test_e3_echoed_logprobs():
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("hello world", False)
    rows = [TokenLogprobs(i, -1.0, 1, [(i, -1.0)]) for i in ids[1:]]
    parts = CompletionLogprobs(tokenizer, 1).prompt(ids, rows)
    assert parts["token_logprobs"] == [None] + [-1.0] * len(rows)
    assert parts["top_logprobs"][0] is None
    assert "".join(parts["tokens"]) == "hello world"
    for at, token in zip(parts["text_offset"], parts["tokens"], strict=True):
        assert "hello world"[at:].startswith(token)
    assert prompt_logprobs(tokenizer, rows, 1)[1][str(ids[1])]["decoded_token"] == parts["tokens"][1]


def test_finish_reasons():
    def of(reason, stop=None):
        output = CompletionOutput(0, finish_reason=reason, stop_reason=stop)
        return finish_reason(output), stop_reason(output)

    assert of(None) == (None, None)
    assert of(FinishReason.STOP, "x") == ("stop", "x")
    assert of(FinishReason.LENGTH) == ("length", None)
    assert of(FinishReason.REPETITION) == ("stop", "repetition")
    assert of(FinishReason.ABORT) == ("stop", "abort")


def test_failures():
    def of(error):
        failure = failure_of(error)
        return failure.status, failure.type, failure.code

    assert of(RequestError("m", param="p", code="c", status=422)) == (422, "invalid_request_error", "c")
    assert of(OverloadedError("full", retry_after=2.2)) == (503, "server_error", "overloaded")
    assert failure_of(OverloadedError("full", retry_after=2.2)).headers == {"retry-after": "3"}
    assert of(EngineDeadError("core dumped at 0xdead")) == (503, "server_error", "engine_dead")
    assert of(ShuttingDownError()) == (503, "server_error", "shutting_down")
    assert of(GenerationError("secret")) == (500, "server_error", "generation_failed")
    assert of(ZeroDivisionError("secret")) == (500, "server_error", "internal_error")
    assert "secret" not in failure_of(GenerationError("secret")).message


# --- the rest -------------------------------------------------------------------------------------


def test_api_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEYS", "one, two")
    path = tmp_path / "keys"
    path.write_text("# rotation\nthree  # new\n\n")
    keys = ApiKeys.load(Settings(api_key_env="MY_KEYS", api_key_file=str(path)))
    right, wrong = (b"one", b"two", b"three"), (b"", b"one, two", b"# rotation")
    assert [keys.tenant(key) for key in (*right, *wrong)] == [*map(tenant_of, right), None, None, None]
    assert not ApiKeys.load(Settings(api_key_env="UNSET_KEYS"))
    path.write_text("# nothing\n")
    for name in (str(path), str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="api_key_file"):
            ApiKeys.load(Settings(api_key_file=name))


def test_keys_with_the_names_of_their_tenants(tmp_path, monkeypatch):
    """So that an operator can write limits and tiers for them. A tenant may have several keys."""
    monkeypatch.setenv("MY_KEYS", "gold sk-one, plain")
    path = tmp_path / "keys"
    path.write_text("gold\tsk-two  # the new one\nteam-a.b_c   sk-three\n")
    keys = ApiKeys.load(Settings(api_key_env="MY_KEYS", api_key_file=str(path)))
    given = (b"sk-one", b"sk-two", b"sk-three", b"plain", b"gold", b"gold sk-one")
    assert [keys.tenant(key) for key in given] == ["gold", "gold", "team-a.b_c", tenant_of(b"plain"), None, None]


@pytest.mark.parametrize(
    "line", ["b\u00e4d sk-secret", "a/b sk-secret", "gold sk-secret more", "n" * 65 + " sk-secret"]
)
def test_a_wrong_name_of_a_tenant_is_refused_without_the_key(tmp_path, line):
    path = tmp_path / "keys"
    path.write_text(f"fine\n\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3 of") as caught:
        ApiKeys.load(Settings(api_key_env="UNSET_KEYS", api_key_file=str(path)))
    assert "sk-secret" not in str(caught.value) and line.split()[0] not in str(caught.value)


@pytest.mark.parametrize("lines", ["gold sk-secret\nsilver sk-secret", "sk-secret\ngold sk-secret"])
def test_a_key_belongs_to_one_tenant(tmp_path, lines):
    path = tmp_path / "keys"
    path.write_text(lines)
    with pytest.raises(ConfigError, match="one tenant") as caught:
        ApiKeys.load(Settings(api_key_env="UNSET_KEYS", api_key_file=str(path)))
    assert "sk-secret" not in str(caught.value)


def test_tenants_are_told_apart():  # K3
    assert tenant_of(b"one") == tenant_of(b"one") != tenant_of(b"two")
    assert len(tenant_of(b"one")) == 16


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"LocalHost:8000", "localhost"),
        (b"[::1]:80", "::1"),
        (b"[::1]", "::1"),
        (b"127.0.0.1", "127.0.0.1"),
        (b"localhost:x", "?"),
        (b"localhost/../health", "localhost/../health"),
        (b"[::1]evil", "?"),
        (b"localhost:80:80", "?"),
    ],
)
def test_host_names(value, name):
    assert host_name(value) == name


def test_loopback():
    assert all(Settings(host=host).loopback for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"))
    assert not any(Settings(host=host).loopback for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"))


class Stopped:
    def __init__(self):
        self.errors = []

    def stop(self, error):
        self.errors.append(error)


def test_drain_table():
    now = [0.0]
    drain = Drain(30.0, clock=lambda: now[0])
    call = Stopped()
    drain.add(call)
    assert not drain.draining and not drain.expired()
    drain.signal()
    assert drain.draining and not drain.expired()
    with pytest.raises(ShuttingDownError):
        drain.add(Stopped())
    now[0] = 29.0
    assert not drain.expired() and call.errors == []
    drain.signal()
    assert drain.expired() and [type(error) for error in call.errors] == [ShuttingDownError]


def test_drain_ends_with_the_last_call():
    drain = Drain(30.0, clock=lambda: 0.0)
    call = Stopped()
    drain.add(call)
    drain.signal()
    drain.remove(call)
    assert drain.expired() and call.errors == []


def test_logits_processors_are_parameters_by_name():
    asked = {"dry": {"multiplier": 0.8, "sequence_breakers": ["\n"]}, "watermark": {}}
    assert chat(logits_processors=asked).params.extra == asked
    assert chat(logits_processors=None).params.extra == chat().params.extra == {}
    for wrong in (["dry"], {"dry": 1}, {"": {}}, {"x" * 65: {}}, {str(i): {} for i in range(17)}):
        assert refused(chat_body, logits_processors=wrong).param.startswith("logits_processors")
