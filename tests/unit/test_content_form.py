"""Contents that are lists of text parts: joined for a template that takes texts, and left to one that takes lists."""

from pathlib import Path

import pytest

from core.assembly import _warn_of_hidden_tools, describe
from core.config.compose import compose
from core.errors import RequestError
from core.model.chat_template import ChatTemplate, TemplateLimits
from core.model.content_form import ContentForm
from core.plugins import load_plugins
from core.settings import Settings
from core.stages.renderer import ChatPrompt
from core.stages.text_renderer import Text
from core.testing.renderer import renderer_context
from core.testing.tokenizers import byte_level_bpe

SMOLLM2 = (  # of SmolLM2-135M-Instruct
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (Path(__file__).resolve().parents[2] / "examples/templates/chatml_tools.jinja").read_text("utf-8")
LOOP = "{% for part in m.content %}[{{ part.text }}]{% endfor %}"
EACH = "{% for m in messages %}BODY{% endfor %}"
ASKS = "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + LOOP + "{% endif %}"
FORMS = {
    "smollm2": (SMOLLM2, ContentForm.TEXT),
    "chatml_tools": (TOOLS, ContentForm.TEXT),
    "loop": (EACH.replace("BODY", LOOP), ContentForm.PARTS),
    "filtered loop": (EACH.replace("BODY", LOOP.replace("m.content", "m['content'] | list")), ContentForm.PARTS),
    "loop that asks": (EACH.replace("BODY", ASKS), ContentForm.EITHER),
    "variable": (EACH.replace("BODY", "{% set c = m.content %}" + LOOP.replace("m.content", "c")), ContentForm.PARTS),
    "macro": (
        "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endmacro %}" + EACH.replace("BODY", "{{ show(m.content) }}"),
        ContentForm.EITHER,
    ),
    "first part": (EACH.replace("BODY", "{{ m.content[0]['text'] }}"), ContentForm.PARTS),
    "split text": (EACH.replace("BODY", "{% set c = m.content.split('x')[0] %}{{ c }}"), ContentForm.TEXT),
    "first character": (EACH.replace("BODY", "{{ m.content[0] }}"), ContentForm.TEXT),
    "loop over calls": (
        EACH.replace("BODY", "{% for c in m.tool_calls %}{{ c.content }}{% endfor %}"),
        ContentForm.TEXT,
    ),
}
PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]


def rendered(template: str, messages: list[dict], **fields) -> str:
    renderer = Text(Text.Settings(), renderer_context(byte_level_bpe(chat_template=template)))
    return renderer.render(ChatPrompt(messages, **fields)).text


@pytest.mark.parametrize(("template", "form"), FORMS.values(), ids=FORMS.keys())
def test_the_source_says_what_a_content_is(template, form):
    assert ChatTemplate(template, {}, TemplateLimits()).content_form is form


@pytest.mark.parametrize("template", [SMOLLM2, TOOLS], ids=["smollm2", "chatml_tools"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_lines_of_a_text(template, role):
    chat = [{"role": "user", "content": "Hello"}, {"role": role, "content": PARTS}, {"role": "user", "content": "and?"}]
    joined = [{**message, "content": "Hi\nthere"} if message["role"] == role else message for message in chat[1:2]]
    assert rendered(template, chat) == rendered(template, [chat[0], *joined, chat[2]])
    assert "Hi\nthere" in rendered(template, chat) and "'type'" not in rendered(template, chat)


def test_parts_and_texts_for_a_template_that_takes_parts():
    chat = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "Yes"}]
    assert rendered(FORMS["loop"][0], chat) == "[Hi][there][Yes]"
    assert rendered(FORMS["loop that asks"][0], chat) == "[Hi][there]Yes"


def test_the_last_text_part_is_continued():
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PARTS}]
    text = rendered(SMOLLM2, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHi\nthere")


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "Hi"}, "Hi"]
)
def test_other_parts_are_refused_by_their_place(part):
    with pytest.raises(RequestError) as caught:
        rendered(SMOLLM2, [{"role": "user", "content": [PARTS[0], part]}])
    assert caught.value.param == "messages[0].content[1].type" and caught.value.status == 400


def test_reasoning_effort_is_a_variable_of_the_template():
    knows = SMOLLM2 + "{{ reasoning_effort }}"
    chat = [{"role": "user", "content": "Hello"}]
    assert rendered(knows, chat, template_kwargs={"reasoning_effort": "low"}).endswith("assistant\nlow")
    assert rendered(SMOLLM2, chat, template_kwargs={"reasoning_effort": "none"}) == rendered(SMOLLM2, chat)
    with pytest.raises(RequestError, match="chat_template_kwargs") as caught:
        rendered(SMOLLM2, chat, template_kwargs={"reasoning_effort": "low"})
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    ("template", "parser", "warns"), [(SMOLLM2, "hermes", True), (SMOLLM2, "none", False), (TOOLS, "hermes", False)]
)
def test_a_tool_parser_beside_a_template_without_tools_is_a_warning(template, parser, warns, caplog):
    plugins = load_plugins()
    described = describe(Settings.from_config(compose([f"tool_parser={parser}"], plugins).values), plugins)
    context = renderer_context(byte_level_bpe(chat_template=template))
    _warn_of_hidden_tools(described, Text(Text.Settings(), context), context.model)
    told = [record.getMessage() for record in caplog.records if record.name == "nonet.assembly"]
    assert [text.startswith("tool_parser=hermes: the chat template of") for text in told] == [True] * warns
    assert all("renderer.chat_template=<file>" in text for text in told)
