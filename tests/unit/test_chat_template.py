import re
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from core.errors import ModelFileError, RequestError
from core.model.chat_template import ChatTemplate, TemplateLimits
from core.testing.tokenizers import CHATML

CORE = Path(__file__).parents[2] / "core"

LLAMA3 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = strftime_now('%Y') %}\n{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] | trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|start|>system<|end|>\\n\\nToday: ' + date_string + '\\n' + system + '<|eot|>' }}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' or message.role == 'ipython' %}\n"
    "        {{- '<|start|>ipython<|end|>\\n\\n' }}\n"
    "        {%- if message.content is mapping or message.content is iterable %}\n            {{- message.content | tojson }}\n"
    "        {%- else %}\n            {{- message.content }}\n        {%- endif %}\n        {{- '<|eot|>' }}\n"
    "    {%- else %}\n        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant<|end|>\\n\\n' }}\n{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{%- set ns = namespace(index=0) %}{{- bos_token }}{%- for message in messages %}"
    "{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- if message['role'] == 'user' %}"
    "{%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] [' }}{%- for tool in tools %}"
    '{{- \'{"type": "function", "function": \' }}{%- for key, val in tool.function.items() if key != \'return\' %}'
    "{%- if val is string %}{{- '\"' + key + '\": \"' + val + '\"' }}"
    "{%- else %}{{- '\"' + key + '\": ' + val|tojson }}{%- endif %}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "é"}}}]
CHAT = [
    {"role": "user", "content": 'Hi <b>"there"</b> 漢 '},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "More"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def compiled(template, **limits):
    return ChatTemplate(template, TOKENS, TemplateLimits(**limits), "tiny")


def refusal(template, messages=CHAT, **limits):
    with pytest.raises((RequestError, ModelFileError)) as caught:
        compiled(template, **limits).render(messages)
    return caught.value


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MISTRAL], ids=["chatml", "llama3", "gemma", "mistral"])
def test_equals_hugging_face(template, tools, generation_prompt):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = chat_template_utils.render_jinja_template(
        conversations=[CHAT], tools=tools, chat_template=template, add_generation_prompt=generation_prompt, **TOKENS
    )
    ours = compiled(template).render(CHAT, add_generation_prompt=generation_prompt, tools=tools)
    assert ours == expected[0]


def test_what_the_built_in_families_write():
    assert compiled(CHATML).render(CHAT[:1]) == (
        '<|im_start|>user\nHi <b>"there"</b> 漢 <|im_end|>\n<|im_start|>assistant\n'
    )
    assert compiled(GEMMA).render(CHAT[:1]).startswith("<s><start_of_turn>user\nHi")
    assert compiled(MISTRAL).render(CHAT[2:], tools=TOOLS).count('"name": "f"') == 1
    assert str(datetime.now().year) in compiled(LLAMA3).render(CHAT)


def test_whitespace_rules_loop_controls_generation_and_json():
    template = (
        "  {% for i in range(5) %}\n  {% if i == 1 %}{% continue %}{% endif %}\n  {% if i == 3 %}{% break %}{% endif %}\n"
        "{{ i }}\n{% endfor %}\n{% generation %}g{% endgeneration %}{{ {'é': ['<', none, 1.5]} | tojson }}"
        "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}"
    )
    assert compiled(template).render([]) == '0\n2\ng{"é": ["<", null, 1.5]}{\n  "a": 2,\n  "b": 1\n}'


@pytest.mark.parametrize(
    "text", ["OK!\n", "OK! ", "OK!\t", "", "a\n\n \n", "<think>\nx\n</think>\n\nOK"], ids=lambda text: ascii(text)
)
@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, MISTRAL], ids=["chatml", "llama3", "gemma", "mistral"])
def test_n1_final_message_is_continued_exactly(template, text):
    messages = [CHAT[0], {"role": "assistant", "content": text}]
    opened = compiled(template).render_open(messages)
    assert opened.endswith(text)
    before = compiled(template).render([CHAT[0], {"role": "assistant", "content": "@@"}], add_generation_prompt=False)
    assert opened == before[: before.index("@@")] + text


def test_n1_parts_are_continued_too_and_a_dropped_message_is_an_error():
    parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert compiled(parts).render_open([{"role": "assistant", "content": content}]) == "[a][b "
    for template, message in (("nothing", CHAT[1]), (parts, {"role": "assistant", "content": [{"type": "image"}]})):
        with pytest.raises(RequestError, match="continue_final_message"):
            compiled(template).render_open([message])


@pytest.mark.parametrize(
    "messages",
    [
        [CHAT[0], CHAT[0]],
        [{"role": "system", "content": "x"}, CHAT[0]],
        [{"role": "user"}, {"role": "user"}],
        [{"role": "alien", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"content": "no role"}],
    ],
)
def test_n3_n4_template_errors_are_requests_errors_and_leave_it_usable(messages):
    template = compiled(GEMMA)
    with pytest.raises(RequestError) as caught:
        template.render(messages)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "template_error")
    assert all(template.render(CHAT) for _ in range(20))


@pytest.mark.parametrize("content", [None, 5, ["part"]])
def test_n3_content_that_the_template_cannot_join(content):
    assert refusal(CHATML, [{"role": "user", "content": content}]).code == "template_error"


def test_n4_the_text_of_the_template_is_in_the_error_bounded():
    assert "roles must alternate user/assistant" in refusal(GEMMA, [CHAT[1]]).message
    assert len(refusal("{{ raise_exception('x' * 100000) }}").message) < 1000
    refusal("{{ raise_exception(messages[0].content) }}", [{"content": "\ud800"}]).message.encode()


GROW = "{% set ns = namespace(x='ab', y=['ab']) %}{% for i in range(60) %}{% set BODY %}{% endfor %}{{ ns.x }}"
LIMITS = {
    "nested range": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested range with output": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "huge range": "{% for i in range(10**12) %}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{% set x = range(99999)|list|sort|reverse|list %}{% endfor %}",
    "multiplied text": "{{ 'x' * 10**10 }}",
    "multiplied list": "{{ [1] * 10**10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": GROW.replace("BODY", "ns.x = (ns.x if i else 9) * (ns.x if i else 9)"),
    "concatenation ~": GROW.replace("BODY", "ns.x = ns.x ~ ns.x"),
    "concatenation +": GROW.replace("BODY", "ns.x = ns.x + ns.x"),
    "list of lists": GROW.replace("BODY", "ns.x = [ns.x, ns.x]"),
    "tuples": GROW.replace("BODY", "ns.x = (ns.x, ns.x)"),
    "dict literals": GROW.replace("BODY", "ns.x = {'a': ns.x, 'b': ns.x}"),
    "dict calls": GROW.replace("BODY", "ns.x = dict(a=ns.x, b=ns.x)"),
    "replace method": GROW.replace("BODY", "ns.x = ns.x.replace('a', ns.x)"),
    "replace filter": GROW.replace("BODY", "ns.x = ns.x | replace('a', ns.x)"),
    "replace by name": GROW.replace("BODY", "ns.x = ns.x | replace(new=ns.x, old='a')"),
    "join method": GROW.replace("BODY", "ns.x = ns.x.join([ns.x, ns.x])"),
    "join filter": GROW.replace("BODY", "ns.x = [ns.x, ns.x] | join(ns.x)"),
    "join of text": GROW.replace("BODY", "ns.x = ns.x | join(ns.x)"),
    "escape": GROW.replace("BODY", "ns.x = ns.x ~ (ns.x ~ '&') | escape"),
    "set block": "{% set y %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
    "macro output": "{% macro m() %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endmacro %}{{ m() }}",
    "plain text output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "macro recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "loop recursion": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "indent": "{{ ('a\n' * 100000) | indent(1000) }}",
    "indent by text": "{{ ('a\n' * 100000) | indent('x' * 1000) }}",
    "json indent": "{{ [1] | tojson(indent=1000000) }}",
    "json separators": "{{ ([1] * 10000) | tojson(separators=('x' * 10000, ':')) }}",
}


@pytest.mark.parametrize("template", LIMITS.values(), ids=LIMITS.keys())
def test_n5_hostile_work_is_stopped(template):
    started = time.thread_time()
    error = refusal(template)
    assert isinstance(error, RequestError) and error.code == "template_limit" and error.status == 400
    assert time.thread_time() - started < 5  # without limits: hours, or no memory


METHODS = [
    "ljust(10**9)",
    "rjust(10**9)",
    "center(10**9)",
    "zfill(10**9)",
    "expandtabs(10**9)",
    "format(1)",
    "encode()",
]


@pytest.mark.parametrize("call", [*METHODS, "format_map({})", "translate({})"])
def test_n5_methods_that_make_text_of_any_size_are_refused(call):
    assert "not allowed" in refusal("{{ 'x'." + call + " }}").message


@pytest.mark.parametrize(
    "name", ["center(10**9)", "format(1)", "batch(10**9)", "wordwrap", "urlize", "attr('x')", "pprint"]
)
def test_n5_filters_outside_the_list_do_not_compile(name):
    assert isinstance(refusal("{{ 'x' | " + name + " }}"), ModelFileError)


def test_n5_output_limit_is_exact():
    assert compiled("{{ 'x' * 100 }}", max_output_chars=100).render([]) == "x" * 100
    assert refusal("{{ 'x' * 101 }}", max_output_chars=100).code == "template_limit"


def test_n5_honest_long_chats_are_within_the_budget():
    assert len(compiled(LLAMA3, cpu_seconds=5).render(CHAT * 500, tools=TOOLS)) > 20_000


def test_n5_each_thread_has_its_own_budget():
    template, results = compiled("{% for i in range(messages[0].n) %}x{% endfor %}"), {}

    def render(n):
        try:
            results[n] = len(template.render([{"n": n}]))
        except RequestError as error:
            results[n] = error.code

    threads = [threading.Thread(target=render, args=(n,)) for n in (10**6 * 3, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {10**6 * 3: "template_limit", 10: 10, 20: 20, 30: 30}


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ dict.__self__.budget }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (5).to_bytes(4) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{% include 'file:///etc/passwd' %}",
    "{% import 'x' as x %}",
    "{% extends 'x' %}",
    "{{ '{0.__class__}'.format(1) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_n7_no_way_out_of_the_sandbox(template):
    assert isinstance(refusal(template), RequestError)


def test_n7_messages_cannot_be_changed():
    messages = [{"role": "user", "content": "a"}]
    compiled("{% set ns = namespace(m=messages) %}{% set ns.m = ns.m + [1] %}{{ ns.m | length }}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("template", ["{% for %}", "{{ " + "(" * 60_000, "{{ 'x' | nope }}", "x" * (1 << 19)])
def test_broken_templates_are_model_file_errors_naming_the_source(template):
    with pytest.raises(ModelFileError, match="^tiny: "):
        compiled(template)


def test_templates_are_rendered_in_one_place():
    """Another door to Jinja2 is how sandboxes are forgotten (CVE-2024-34359, CVE-2026-5760)."""
    users = {p.name for p in CORE.rglob("*.py") if re.search(r"^\s*(import|from) jinja2", p.read_text("utf-8"), re.M)}
    reads = {"content_form.py"}  # it looks at the parsed template, and renders nothing
    assert users == {"chat_template.py", "template_sandbox.py", "template_budget.py", "template_metering.py"} | reads
    makers = {p.name for p in CORE.rglob("*.py") if "from_string(" in p.read_text("utf-8")}
    assert makers == {"chat_template.py"}
