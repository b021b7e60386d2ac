"""Faults that users reported of other servers: sections N (chat templates), O9 and P8, each with the request of the report.

See docs/reported_faults.md for the whole list.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import ModelFileError, RequestError
from core.model.describe import read_spec
from core.model.spec import ModelFiles
from core.model.tokenizer import load_tokenizer
from core.stages.renderer import ChatPrompt, RendererContext, TextPrompt
from core.stages.text_renderer import Text
from core.testing.harness.http_calls import Outcome, call, completion_body
from core.testing.harness.served_pipelines import Served, served_tiny
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import CHATML, byte_level_bpe

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "tests/data/gguf/tiny-h128-Q4_0.gguf"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello world, and hello engine: one and again"}
TOKENIZER = byte_level_bpe()
RULES = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "{% if not loop.first and m['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its template has rules, and is given by a setting (N8)."""
    home = tmp_path_factory.mktemp("templates")
    (home / "rules.jinja").write_text(RULES + CHATML)
    with served_tiny(make_tiny_model(home / "tiny"), f"renderer.chat_template={home / 'rules.jinja'}") as server:
        yield server


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


# --- N: chat templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["OK!\n", "OK! ", "OK!\t", ""])
def test_n1_the_final_message_goes_on(tiny: Served, ending: str) -> None:
    """The same as a completion of the text that the template leaves open."""
    messages = [USER, {"role": "assistant", "content": ending}]
    fixed = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = tiny.good(CHAT, messages=messages, continue_final_message=True, **fixed)
    prompt = TOKENIZER.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n{ending}"
    raw = tiny.good(COMPLETIONS, prompt=prompt, **fixed)["choices"][0]
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["message"]["content"]) == (raw["token_ids"], raw["text"])


def test_n2_continued_twice_through_the_prefix_cache(tiny: Served) -> None:
    messages = [USER, {"role": "assistant", "content": "OK, the engine "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 12, "temperature": 0}
    first, second = tiny.good(CHAT, **body), tiny.good(CHAT, **body)
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert tiny.refused(CHAT, **body, echo=True)["param"] == "echo"
    assert tiny.good(CHAT, **body)["choices"] == first["choices"]


BAD_CHATS: list[tuple[list[dict[str, Any]], str]] = [
    ([USER, USER], "roles must alternate"),
    ([USER, {"role": "system", "content": "late"}], "the system message must come first"),
    ([{"role": "user", "content": None}], "content"),
    ([{"role": "alien", "content": "x"}], "role"),
    ([{"role": "tool", "content": "x"}, USER], "names the call that it answers"),
]


@STREAMS
def test_n3_n4_template_errors_are_400_and_the_server_goes_on(tiny: Served, stream: bool) -> None:
    for messages, word in BAD_CHATS:
        error = tiny.refused(CHAT, messages=messages, stream=stream)
        assert word in error["message"] and error["param"].startswith("messages")
    for _ in range(20):
        assert tiny.good(CHAT, messages=[USER], max_tokens=2)["usage"]["completion_tokens"]


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
RESERVED = ["tokenize", "messages", "tools", "add_generation_prompt", "return_dict", "__class__", "chat_template"]


def test_n5_n6_templates_and_reserved_names_in_a_request(tiny: Served) -> None:
    assert tiny.refused(CHAT, messages=[USER], chat_template=LOOP)["param"] == "chat_template"
    for name in RESERVED:
        error = tiny.refused(CHAT, messages=[USER], chat_template_kwargs={name: LOOP})
        assert error["param"].startswith("chat_template_kwargs")
        assert httpx.get(f"{tiny.url}/health").status_code == 200


def test_n8_a_model_without_chat_template(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bare")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with served_tiny(folder) as server:
        for stream in (False, True):
            error = server.refused(CHAT, messages=[USER], stream=stream)
            assert error["code"] == "no_chat_template"
            assert "/v1/completions" in error["message"] and "renderer.chat_template" in error["message"]
        assert server.good(COMPLETIONS, prompt="hello", max_tokens=2)["choices"]


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Served]:
    """A context so long that megabytes are tokenized before they are refused: the KV pool holds 4,096 tokens."""
    with served_tiny(make_tiny_model(tmp_path / "roomy", max_position_embeddings=1 << 19)) as server:
        yield server


async def test_n9_long_chats_do_not_stop_the_others(roomy: Served) -> None:
    """Four prompts of 1 and 2 MB are rendered and tokenized while eight streams run and /health is asked."""
    chat = {"messages": [{"role": "user", "content": "the engine was described. " * 40_000}]}
    text = {"prompt": "the engine was described. " * 80_000}
    async with roomy.client() as client:
        outcomes = [Outcome() for _ in range(8)]
        bodies = [completion_body([9, 9 + i], 480, stream=True) for i in range(8)]
        streams = [asyncio.ensure_future(call(client, *pair)) for pair in zip(bodies, outcomes, strict=True)]
        while not all(outcome.token_ids for outcome in outcomes):
            await asyncio.sleep(0.005)
        posts = [
            asyncio.ensure_future(client.post(path, json=body))
            for path, body in ((CHAT, chat), (COMPLETIONS, text)) * 2
        ]
        progress = set()  # how far the streams were at each answer of /health
        while not all(post.done() for post in posts):
            assert (await client.get("/health")).status_code == 200
            progress.add(sum(len(outcome.token_ids) for outcome in outcomes))
        assert len(progress) > 10, "the event loop stood still"
        errors = [(await post).json()["error"] for post in posts]
        assert all("tokens and the KV cache holds 4096" in error["message"] for error in errors), errors
        assert all(outcome.complete for outcome in await asyncio.gather(*streams))


# --- N7, O9: files of strangers -------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_n7_the_template_of_a_gguf_file_runs_in_the_sandbox(template: str, tmp_path: Path) -> None:
    content = GGUF.read_bytes()
    (own,) = re.findall(rb"{% for m in messages %}.*?{% endif %}", content, flags=re.S)
    path = tmp_path / "made.gguf"
    path.write_bytes(content.replace(own, template.encode().ljust(len(own))))
    files = ModelFiles("gguf", path, str(path))
    tokenizer = load_tokenizer(files)
    assert tokenizer.chat_template is not None and tokenizer.chat_template.strip() == template
    with pytest.raises((RequestError, ModelFileError)) as caught:
        renderer = Text(Text.Settings(), RendererContext(read_spec(files), tokenizer))
        assert renderer.render(TextPrompt("hello")).token_ids, "text needs no template"
        renderer.render(ChatPrompt([{"role": "user", "content": "hello"}]))
    assert "root:" not in str(caught.value) and "uid=" not in str(caught.value)


BROKEN = {
    "truncated": lambda content: content[: len(content) // 2],
    "2^32 keys": lambda content: content[:16] + (1 << 32).to_bytes(8, "little") + content[24:],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
def test_o9_a_broken_file_starts_no_server(kind: str, tmp_path: Path) -> None:
    """200 mutations of the header: tests/unit/test_gguf_reader.py."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN[kind](GGUF.read_bytes()))
    command = [sys.executable, "-m", "core", "serve", "+preset=chat", "frontend.port=0", f"model.source={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 1
    assert "serving" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert str(path) in done.stderr


# --- P8: URLs in messages --------------------------------------------------------------------------------


def test_p8_a_text_server_opens_no_url(tiny: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        port = trap.getsockname()[1]
        urls = [
            f"http://allowed\\@127.0.0.1:{port}/",
            f"http://127.0.0.1:{port}/image.png",
            f"http://2130706433:{port}/",
            f"http://[::ffff:127.0.0.1]:{port}/",
            "file:///etc/passwd",
            "data:image/png;base64," + "A" * 1_000_000,
        ]
        for url in urls:
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "file", "file": {"file_data": url}},
                {"type": "input_image", "image_url": url},
                {"type": "text", "text": "x", "image_url": {"url": url}},
            ):
                error = tiny.refused(CHAT, messages=[{"role": "user", "content": [part]}])
                assert error["param"].startswith("messages[0].content[0]") and len(error["message"]) < 500
        trap.settimeout(0.2)
        with pytest.raises(TimeoutError):
            trap.accept()
