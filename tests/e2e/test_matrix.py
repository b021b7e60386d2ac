"""`plugins matrix`: every pair of built-ins that is said to work runs a real request, and every other pair is refused.

The runs are few: each composition of a pairwise covering set holds many pairs. In each, a request is answered with the tokens
of the default composition, and the selected frontend is driven for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.assembly import build_frontend, describe
from core.capabilities import installed
from core.commands import plugins_matrix
from core.commands.plugins_matrix import Cell, cells, run
from core.components import CHAINS
from core.config.compose import compose
from core.errors import ConfigError
from core.metrics import Metrics
from core.plugins import load_plugins
from core.settings import Settings
from core.stages.frontend import Frontend, FrontendContext
from core.stages.renderer import ChatPrompt, TokenPrompt
from core.testing.harness.pairs import Item, Pair, covering, pairs_of
from core.testing.harness.pipelines import RunningPipeline, call, running
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import CHATML

PLUGINS = load_plugins(["all"])
BUILTINS = tuple(installed(PLUGINS))
CELLS: tuple[Cell, ...] = tuple(cells(PLUGINS))
ITEMS = [(party.group, party.name) for party in BUILTINS]
PACKAGES = {("grammars", "xgrammar"): "xgrammar"}
"""Components that run where a package is installed which Nonet does without."""
RUNNABLE = [item for item in ITEMS if item not in PACKAGES or find_spec(PACKAGES[item])]

PROMPT = (40, 41, 42, 40, 41, 42, 50, 51, 52, 53, 54, 55, 40, 41, 42)
MESSAGES = [{"role": "user", "content": "hello"}]
NUM_TOKENS = 8
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
EXTRA: Mapping[str, Mapping[str, Any]] = {
    "dry": {"multiplier": 20.0, "allowed_length": 1, "sequence_breakers": []},
    "watermark": {},
    "xtc": {"probability": 1.0, "threshold": 0.01},
    "typical": {"mass": 0.3},
    "mirostat": {"tau": 1.0},
}
"""Parameters with which a request makes a logits processor edit; `min_tokens` is a field of its own."""
EXACT = ("none", "cpu_float32")
"""Weight formats that round nothing."""


def pair(cell: Cell) -> Pair:
    return frozenset(((cell.first.group, cell.first.name), (cell.second.group, cell.second.name)))


WORKING = {pair(cell) for cell in CELLS if cell.works and pair(cell) <= set(RUNNABLE)}
COMPOSITIONS = covering(RUNNABLE, CHAINS, WORKING)


def overrides(composition: Iterable[Item]) -> list[str]:
    chosen = [item for item in composition if item[0] not in CHAINS]
    chains = {chain: [name for group, name in composition if group == chain] for chain in CHAINS}
    return [
        *(f"{group}={name}" for group, name in chosen),
        *(f"{chain}=[{','.join(names)}]" for chain, names in chains.items()),
    ]


def named(composition: Iterable[Item]) -> str:
    defaults = set(COMPOSITIONS[0])
    return " ".join(f"{group}={name}" for group, name in composition if (group, name) not in defaults) or "first"


# The command


def test_the_table_and_its_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    printed = capsys.readouterr().out
    assert run(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["components"] == [f"{group}={name}" for group, name in ITEMS]
    assert all(f" {name} " in printed for name in found["components"][:-1])
    table = printed.partition("\n\n")[0]
    works = [one["works"] for one in found["pairs"]]
    assert (table.count("  +"), table.count("  -")) == (works.count(True), works.count(False))
    assert all(one["works"] is (one["reason"] == "") for one in found["pairs"])
    assert all(one["reason"] in printed for one in found["pairs"])
    assert printed.splitlines()[-1] == "built-in components only; --all adds those of installed plugins"
    assert run(["--all"]) == 0
    assert "built-in components only" not in capsys.readouterr().out


def test_what_a_component_requires_of_a_third_stands_around_the_pair() -> None:
    """A predictor that the default scheduler does not ask goes with all else, beside one that asks."""
    learnt = {cell.first.name if cell.second.name == "learnt" else cell.second.name: cell for cell in CELLS
              if "learnt" in (cell.first.name, cell.second.name)}  # fmt: skip
    schedulers = {name for group, name in ITEMS if group == "scheduler"}
    assert {name for name, cell in learnt.items() if not cell.works} == schedulers - {"srtf"}
    assert len(learnt) > 20


def test_the_command_refuses_an_argument_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="usage: plugins matrix"):
        run(["--every"])


def test_components_by_name_meet_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scheduler=fcfs", "sampler=greedy"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    expected = {
        f"{'+' if cell.works else '-'} {' with '.join(names)}"
        for cell in CELLS
        for names in permutations((f"{cell.first.group}={cell.first.name}", f"{cell.second.group}={cell.second.name}"))
        if names[0] in ("scheduler=fcfs", "sampler=greedy")
    }
    assert set(lines) == expected - {"+ sampler=greedy with scheduler=fcfs"}
    with pytest.raises(ConfigError, match="did you mean scheduler=fcfs"):
        run(["scheduler=fcfz"])


def test_more_components_than_a_table_can_show_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins_matrix, "MAX_COMPONENTS", 3)
    with pytest.raises(ConfigError, match="name those you ask about, as in plugins matrix --all observers="):
        run([])
    assert run(["scheduler=fcfs"]) == 0


# Every no is refused


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if not cell.works], ids=lambda cell: " ".join(sorted(map("=".join, pair(cell))))
)
def test_a_pair_that_does_not_work_is_refused_as_the_table_says(cell: Cell) -> None:
    settings = Settings.from_config(compose(overrides(sorted(pair(cell))), PLUGINS).values)
    with pytest.raises(ConfigError) as caught:
        describe(settings, PLUGINS)
    assert any(party.who in str(caught.value) for party in (cell.first, cell.second))
    assert cell.reason.partition("; ")[0] in str(caught.value)


# Every yes is run


def test_the_runs_below_hold_every_pair_that_works() -> None:
    ran = set().union(*map(pairs_of, COMPOSITIONS))
    assert ran == WORKING
    print(f"\n{len(WORKING)} pairs of {len(ITEMS)} components in {len(COMPOSITIONS)} compositions")
    assert len(COMPOSITIONS) < len(WORKING) / 8


class Collector:
    """Takes what the `otel` observer sends."""

    def __init__(self) -> None:
        self.num_exports = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.num_exports += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@dataclass(frozen=True)
class Answers:
    """What the default composition answers: token ids for PROMPT, also with edits by processors, and text for MESSAGES, also
    with a tool."""

    plain: list[int]
    edited: list[int]
    reply: str
    reply_with_tools: str


@dataclass
class Lab:
    """The model, a folder, and what the default composition answers with each list of logits processors."""

    model: Path
    folder: Path
    collector: Collector
    known: dict[tuple[str, ...], Answers] = field(default_factory=dict)

    @property
    def trace(self) -> Path:
        return self.folder / "trace.jsonl"

    @property
    def answered(self) -> Path:
        return self.folder / "out.jsonl"

    def fixed(self, composition: Iterable[Item]) -> list[str]:
        """Values that a run needs: the tiny model, and places for what components write."""
        items = set(composition)
        values = {
            ("frontend", "openai_http"): ["frontend.port=0"],
            ("frontend", "offline"): [f"frontend.input={self.folder}/in.jsonl", f"frontend.output={self.answered}"],
            ("frontend", "chat_cli"): ["frontend.temperature=0", f"frontend.max_tokens={NUM_TOKENS}", "frontend.ignore_eos=true"],
            ("renderer", "text"): [f"renderer.chat_template={self.folder}/tools.jinja"],
            ("observers", "jsonl"): [f"observers.jsonl.path={self.trace}"],
            ("observers", "otel"): [f"observers.otel.endpoint={self.collector.url}"],
        }  # fmt: skip
        own = [value for item in values if item in items for value in values[item]]
        tiny = [f"model.source={self.model}", "model.dtype=float32", "executor.num_threads=1", "cache.num_blocks=64"]
        return [*tiny, *own]

    def answers(self, composition: Iterable[Item]) -> Answers:
        """Of the default composition; where weights are rounded, of one that rounds them alike."""
        processors = tuple(name for group, name in composition if group == "logits_processors")
        names = dict(composition)
        rounded = (
            [] if names["quant"] in EXACT else [f"{group}={names[group]}" for group in ("model", "attention", "quant")]
        )
        if (key := (processors, *rounded)) not in self.known:
            chosen = ["frontend=openai_http", f"logits_processors=[{','.join(processors)}]", "observers=[]", *rounded]
            self.known[key] = asyncio.run(self._ask(chosen, processors))
        return self.known[key]

    async def _ask(self, chosen: list[str], processors: tuple[str, ...]) -> Answers:
        async with running(*chosen, *self.fixed([("renderer", "text")])) as pipeline:
            ids = await plain(pipeline)
            changed = await edited(pipeline, processors, ids[0])
            reply = await pipeline.answer(call("chat", ChatPrompt(MESSAGES), NUM_TOKENS))
            assert min(len(set(ids)), len(set(reply.token_ids))) > 3  # another answer would be seen
            assert (changed != ids) == bool(processors)
            with_tools = await pipeline.answer(call("tools", ChatPrompt(MESSAGES, tools=[TOOL]), NUM_TOKENS))
            assert with_tools.token_ids != reply.token_ids
            return Answers(ids, changed, reply.text, with_tools.text)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A model with sliding windows and softcapped attention: what it needs of the components is checked too."""
    folder = tmp_path_factory.mktemp("matrix")
    model = make_tiny_model(
        folder / "tiny", "gemma2", sliding_window=8, head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=False
    )
    line = {"prompt_token_ids": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "tools.jinja").write_text("{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML)
    collector = Collector()
    yield Lab(model, folder, collector)
    collector.server.shutdown()


async def plain(pipeline: RunningPipeline) -> list[int]:
    """The greedy continuation of PROMPT."""
    return (await pipeline.answer(call("plain", TokenPrompt(PROMPT), NUM_TOKENS))).token_ids


async def edited(pipeline: RunningPipeline, processors: Collection[str], first: int) -> list[int]:
    """The same with parameters for each of `processors`; `first` is the first token without."""
    params: dict[str, Any] = {"extra": {name: dict(EXTRA[name]) for name in processors if name in EXTRA}}
    if "min_tokens" in processors:
        params |= {"min_tokens": NUM_TOKENS - 1, "stop_token_ids": (first,)}
    return (await pipeline.answer(call("edited", TokenPrompt(PROMPT), NUM_TOKENS, **params))).token_ids


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=named)
def test_a_composition_answers_as_the_default_one(composition: tuple[Item, ...], lab: Lab) -> None:
    expected, before = lab.answers(composition), lab.collector.num_exports
    lab.trace.unlink(missing_ok=True)
    asyncio.run(_check(composition, lab, expected))
    assert ("observers", "jsonl") not in composition or '"kind":"request"' in lab.trace.read_text()
    assert ("observers", "otel") not in composition or lab.collector.num_exports > before


async def _check(composition: tuple[Item, ...], lab: Lab, expected: Answers) -> None:
    processors = [name for group, name in composition if group == "logits_processors"]
    async with running(*overrides(composition), *lab.fixed(composition)) as pipeline:
        description, front = pipeline.session.description, pipeline.front
        assert [(part.group, part.provided.component.name) for part in description.parts] == list(composition)
        assert await plain(pipeline) == expected.plain
        assert await edited(pipeline, processors, expected.plain[0]) == expected.edited
        frontend = build_frontend(description, FrontendContext(front, description, served_names=("tiny",)))
        await DRIVERS[dict(composition)["frontend"]](frontend, composition, lab, expected)
        await front.flush_observers()
        metrics = front.observers.find(Metrics)
        assert (metrics is not None) == (("observers", "prometheus") in composition)
        assert metrics is None or b"nonet_requests_finished_total" in metrics.exposition()


# The frontends, driven as their users drive them. Each is given the selected items, and what to expect.


async def drive_offline(frontend: Frontend, items: Collection[Item], lab: Lab, expected: Answers) -> None:
    lab.answered.unlink(missing_ok=True)
    await frontend.run()
    (line,) = lab.answered.read_text().splitlines()
    ids = json.loads(line)["choices"][0]["token_ids"]
    assert len(ids) == NUM_TOKENS
    assert ids == expected.plain


async def drive_chat_cli(frontend: Frontend, items: Collection[Item], lab: Lab, expected: Answers) -> None:
    printed = io.StringIO()
    with typed(f"{MESSAGES[0]['content']}\n/exit\n"), contextlib.redirect_stdout(printed):
        await frontend.run()
    assert printed.getvalue().partition("\n")[2] == f"{expected.reply}\n"


@contextlib.contextmanager
def typed(text: str) -> Iterator[None]:
    """`text` on the standard input, which the frontend reads past `sys.stdin`."""
    before, stdin = os.dup(0), sys.stdin
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    os.dup2(reader, 0)
    sys.stdin = io.StringIO()  # no terminal
    try:
        yield
    finally:
        sys.stdin = stdin
        os.dup2(before, 0)
        for fd in (before, reader):
            os.close(fd)


async def drive_openai_http(frontend: Any, items: Collection[Item], lab: Lab, expected: Answers) -> None:
    serving = asyncio.ensure_future(frontend.run())
    try:
        while frontend.url is None:
            assert not serving.done(), await serving
            await asyncio.sleep(0.005)
        async with httpx.AsyncClient(base_url=frontend.url, timeout=60.0) as client:
            await _completion(client, expected)
            if ("renderer", "text") in items:
                await _chat(client, items, expected)
    finally:
        frontend.stop()
        await serving


GREEDY: Mapping[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}


async def _completion(client: httpx.AsyncClient, expected: Answers) -> None:
    answer = await client.post("/v1/completions", json={"prompt": list(PROMPT), **GREEDY})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected.plain


async def _chat(client: httpx.AsyncClient, items: Collection[Item], expected: Answers) -> None:
    """With tools where a parser is selected that finds calls; this model writes none, so all of it is content."""
    tools, reply = {}, expected.reply
    if ("tool_parser", "none") not in items:
        tools, reply = {"tools": [TOOL]}, expected.reply_with_tools
    answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **tools, **GREEDY})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (reply, None)


DRIVERS: Mapping[str, Callable[[Any, Collection[Item], Lab, Answers], Awaitable[None]]] = {
    "offline": drive_offline,
    "chat_cli": drive_chat_cli,
    "openai_http": drive_openai_http,
}
