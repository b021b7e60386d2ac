import pytest
from pydantic import ValidationError

from core.errors import ConfigError, RequestError
from core.model.tokenizer import load_tokenizer
from core.stages.renderer import ChatPrompt, TextPrompt, TokenPrompt
from core.stages.text_renderer import Text, TokenIds
from core.stages.vocabulary_params import bad_word_token_ids
from core.testing.renderer import renderer_context
from core.testing.tokenizers import CHATML, byte_level_bpe, sentencepiece_bpe

BOS_TEMPLATE = "{{ bos_token }}" + CHATML
USER = {"role": "user", "content": "Hi"}
BYTE_LEVEL, GEMMA, LLAMA = byte_level_bpe(), sentencepiece_bpe(), sentencepiece_bpe(prefix_space=True)


def text(tokenizer, **settings):
    return Text(Text.Settings(**settings), renderer_context(tokenizer))


def refused(renderer, prompt):
    with pytest.raises(RequestError) as caught:
        renderer.render(prompt)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("template", [CHATML, BOS_TEMPLATE])
@pytest.mark.parametrize("tokenizer", [byte_level_bpe, sentencepiece_bpe])
def test_chat_has_bos_exactly_once(tokenizer, template):
    rendered = text(tokenizer(add_bos=True, chat_template=template)).render(ChatPrompt([USER]))
    assert rendered.token_ids.count(1) == 1 and rendered.token_ids[0] == 1
    assert rendered.text.endswith("<|im_start|>assistant\n")


def test_no_bos_where_the_tokenizer_adds_none():
    renderer = text(BYTE_LEVEL)
    assert 1 not in renderer.render(ChatPrompt([USER])).token_ids
    assert renderer.render(ChatPrompt([USER])).token_ids[0] == BYTE_LEVEL.token_id("<|im_start|>")
    assert renderer.render(TextPrompt("Hi")).token_ids == BYTE_LEVEL.encode("Hi")


@pytest.mark.parametrize("prompt", ["Hi", "<s>Hi", "<s><s>Hi"])
def test_text_has_bos_exactly_once(prompt):
    assert text(GEMMA).render(TextPrompt(prompt)).token_ids == [1, *GEMMA.encode("Hi", add_special_tokens=False)]


def test_text_without_special_tokens():
    assert text(GEMMA).render(TextPrompt("Hi", add_special_tokens=False)).token_ids == GEMMA.encode("Hi", False)


def test_h4_empty_text():
    error = refused(text(BYTE_LEVEL), TextPrompt(""))
    assert (error.param, error.code) == ("prompt", "empty")
    assert text(GEMMA).render(TextPrompt("")).token_ids == [1]
    assert refused(text(GEMMA), TextPrompt("", add_special_tokens=False)).code == "empty"


def test_h4_empty_chats():
    assert (refused(text(GEMMA), ChatPrompt([])).param, refused(text(GEMMA), TokenPrompt([])).param) == (
        "messages",
        "prompt",
    )
    assert text(BYTE_LEVEL).render(ChatPrompt([{"role": "user", "content": ""}])).token_ids
    assert refused(text(byte_level_bpe(chat_template="{# nothing #}")), ChatPrompt([USER])).code == "empty"


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "assistant"}])
def test_n3_null_content_is_refused_by_index(message):
    error = refused(text(GEMMA), ChatPrompt([USER, message]))
    assert error.param == "messages" and "messages[1].content" in error.message


@pytest.mark.parametrize("prompt", [TextPrompt("a\ud800b"), ChatPrompt([{"role": "user", "content": "\udfff"}])])
def test_lone_surrogates_are_refused(prompt):
    assert refused(text(GEMMA), prompt).code == "invalid_unicode"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, GEMMA, LLAMA])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tokenizer):
    limit = 4096 * tokenizer.max_token_length
    fits = TextPrompt("engine " * 5000)
    assert len(fits.text) <= limit and len(text(tokenizer).render(fits).token_ids) > 4096  # admission's to refuse
    for prompt in (TextPrompt("a" * (limit + 1)), ChatPrompt([{"role": "user", "content": "a" * limit}])):
        assert refused(text(tokenizer), prompt).code == "context_length_exceeded"


@pytest.mark.parametrize("ending", ["OK!\n", "OK! ", "OK!\t", ""])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_n1_continue_final_message(ending, add_generation_prompt):
    messages = [USER, {"role": "assistant", "content": ending}]
    rendered = text(BYTE_LEVEL).render(
        ChatPrompt(messages, continue_final_message=True, add_generation_prompt=add_generation_prompt)
    )
    assert rendered.text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{ending}"
    assert BYTE_LEVEL.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text


def test_n1_continue_needs_an_assistant_message():
    error = refused(text(BYTE_LEVEL), ChatPrompt([USER], continue_final_message=True))
    assert error.param == "continue_final_message"


def test_n2_same_request_twice_gives_the_same_ids():
    prompt = ChatPrompt([USER, {"role": "assistant", "content": "OK "}], continue_final_message=True)
    renderer = text(BYTE_LEVEL)
    assert renderer.render(prompt) == renderer.render(prompt)


RESERVED = ["tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "return_dict", "bos_token"]


@pytest.mark.parametrize("name", [*RESERVED, "__class__", "self", "unknown", "x" * 10_000, "\ud800"])
def test_n5_n6_kwargs_outside_the_allow_list(name):
    error = refused(text(BYTE_LEVEL), ChatPrompt([USER], template_kwargs={name: "{% for i in range(99999) %}"}))
    assert error.param == "chat_template_kwargs" and len(error.message.encode()) < 500


def test_n6_allowed_kwargs_reach_the_template():
    tokenizer = byte_level_bpe(chat_template="{{ 'on' if enable_thinking else 'off' }}{{ mine }}")
    renderer = text(tokenizer, template_kwargs=("enable_thinking", "mine"))
    prompt = ChatPrompt([USER], template_kwargs={"enable_thinking": True, "mine": 3})
    assert renderer.render(prompt).text == "on3"
    assert renderer.render(ChatPrompt([USER])).text == "off"


@pytest.mark.parametrize("name", [*RESERVED, "_x", "not a name"])
def test_n6_the_allow_list_cannot_hold_reserved_names(name):
    with pytest.raises(ValidationError, match="template_kwargs"):
        Text.Settings(template_kwargs=(name,))


def test_n8_no_chat_template():
    renderer = text(byte_level_bpe(chat_template=None))
    error = refused(renderer, ChatPrompt([USER]))
    assert error.code == "no_chat_template" and "/v1/completions" in error.message
    assert renderer.render(TextPrompt("Hi")).token_ids


def test_n8_chat_template_override(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("own: {{ messages[0].content }}")
    assert text(byte_level_bpe(chat_template=None), chat_template=path).render(ChatPrompt([USER])).text == "own: Hi"
    with pytest.raises(ConfigError, match="renderer.chat_template"):
        text(BYTE_LEVEL, chat_template=tmp_path / "missing.jinja")


def test_tools_reach_the_template():
    tokenizer = byte_level_bpe(chat_template="{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}")
    assert text(tokenizer).render(ChatPrompt([USER], tools=[{"a": "é"}])).text == '[{"a": "é"}]'
    assert text(tokenizer).render(ChatPrompt([USER])).text == "none"


@pytest.mark.parametrize(("prompt", "param"), [(TextPrompt("Hi"), "prompt"), (ChatPrompt([USER]), "messages")])
def test_token_ids_renderer_says_who_takes_text(prompt, param):
    error = refused(TokenIds(TokenIds.Settings(), renderer_context(GEMMA)), prompt)
    assert (error.param, error.code) == (param, "unsupported") and "`text`" in error.message


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, GEMMA, LLAMA])
@pytest.mark.parametrize("word", ["described", " described", "x", "漢", "New York"])
def test_g4_both_forms_of_a_bad_word(tokenizer, word):
    forms = [b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in bad_word_token_ids(word, tokenizer)]
    assert set(forms) == {word.strip(), " " + word.strip()}


def test_g4_forms_with_different_token_counts():
    forms = bad_word_token_ids("described", BYTE_LEVEL)
    assert {len(ids) for ids in forms} == {1, 2, 3}
    assert (BYTE_LEVEL.token_id("Ġdescribe"), BYTE_LEVEL.token_id("d")) in forms


@pytest.mark.model
def test_smollm2_chat(smollm2):
    tokenizer = load_tokenizer(smollm2)
    rendered = text(tokenizer).render(ChatPrompt([USER]))
    assert rendered.text.startswith("<|im_start|>system\n") and rendered.text.endswith("<|im_start|>assistant\n")
    assert rendered.token_ids[0] == tokenizer.token_id("<|im_start|>") != rendered.token_ids[1]
    assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text


@pytest.mark.model
def test_gemma_text(gemma3):
    tokenizer = load_tokenizer(gemma3)
    ids = text(tokenizer).render(TextPrompt("engine. It was 漢 🔥")).token_ids
    assert ids.count(tokenizer.bos_token_id) == 1 and tokenizer.decode(ids) == "engine. It was 漢 🔥"
    stream = tokenizer.stream([tokenizer.bos_token_id])
    assert "".join(map(stream.push, ids[1:])) + stream.flush() == "engine. It was 漢 🔥"
