"""Faults that users reported of other servers, sections A and B: text boundaries and stop strings, seen through HTTP.

Everything between client and engine is real; a scripted executor in place of the model says the tokens of the report.
See docs/reported_faults.md.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from core.batch import SampledRow
from core.border.inline_client import InlineClient
from core.front.front import Front
from core.model.tokenizer import Tokenizer
from core.observers import Observers
from core.pipeline import FrontPipeline, PipelineDescription
from core.stages.admission import AdmissionContext
from core.stages.detokenizer import DetokenizerContext
from core.stages.frontend import FrontendContext
from core.stages.incremental import Incremental
from core.stages.load_aware import LoadAware
from core.stages.reasoning_parser import NoReasoning, ReasoningParserContext
from core.stages.renderer import RendererContext
from core.stages.text_renderer import Text
from core.stages.tool_parser import NoTools, ToolParserContext
from core.testing.engines import MAX_MODEL_LEN, fake_spec, make_engine
from core.testing.harness.frontend_thread import serving
from core.testing.harness.fronts import AnyFields
from core.testing.harness.scripted import ScriptedExecutor
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe
from plugins.frontends.openai_http import OpenAIHttp
from plugins.schedulers.fcfs import Fcfs

MIXED = "ďábelské 🔥 👩‍👩‍👧‍👦 ครับ"
IM_END = 5  # `<|im_end|>`, a special token of the tokenizers
PROMPT = [310, 311, 312]


@dataclass
class ScriptedServer:
    """HTTP frontend, front and engine over scripted tokens. A call's seed chooses its script."""

    tokenizer: Tokenizer
    scripts: dict[int, list[int]] = field(default_factory=dict)
    _frontend: OpenAIHttp | None = None
    _seeds: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str | None:
        return None if self._frontend is None else self._frontend.url

    def add(self, text: str | list[int]) -> int:
        """A seed; `text` is said again from its start when it is over."""
        seed = next(self._seeds)
        self.scripts[seed] = text if isinstance(text, list) else self.ids(text)
        return seed

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _token(self, row: SampledRow) -> int:
        script = self.scripts[row.seed]
        return script[row.position % len(script)]

    async def run(self) -> None:
        spec = fake_spec(self.tokenizer.vocab_size, MAX_MODEL_LEN)
        executor = ScriptedExecutor(script=self._token)
        admission = AdmissionContext(spec, time.monotonic, lambda: MAX_MODEL_LEN)
        pipeline = FrontPipeline(
            model=spec,
            renderer=Text(Text.Settings(), RendererContext(spec, self.tokenizer)),
            admission=LoadAware(LoadAware.Settings(), admission),
            detokenizer=Incremental(Incremental.Settings(), DetokenizerContext(self.tokenizer)),
            request_fields=AnyFields(),
            tool_parser=NoTools(NoTools.Settings(), ToolParserContext(spec)),
            reasoning_parser=NoReasoning(NoReasoning.Settings(), ReasoningParserContext(spec)),
            observers=Observers(),
        )
        client = InlineClient(lambda: make_engine(Fcfs, Fcfs.Settings(), executor, spec=spec))
        front = Front(pipeline, client, time.monotonic)
        await front.start(lambda *_: None)
        try:
            self._frontend = OpenAIHttp(OpenAIHttp.Settings(port=0), FrontendContext(front, PipelineDescription(())))
            await self._frontend.run()
        finally:
            await front.close()

    def stop(self) -> None:
        if self._frontend is not None:
            self._frontend.stop()


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte_level": byte_level_bpe, "sentencepiece": sentencepiece_bpe}


@pytest.fixture(scope="module", params=TOKENIZERS)
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    server = ScriptedServer(TOKENIZERS[request.param]())
    with serving(server):
        yield server


@dataclass(frozen=True)
class Said:
    """One answer, whole (one piece) or streamed."""

    pieces: list[str]
    token_ids: list[int]
    finish_reason: str
    stop_reason: Any
    completion_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@pytest.fixture
def ask(server: ScriptedServer) -> Iterator[Callable[..., Said]]:
    """`ask(seed, stream, **fields)` over /v1/completions; ids of the prompt, so that only the script makes text."""
    with httpx.Client(base_url=server.url or "", timeout=20) as client:

        def send(seed: int, stream: bool = False, **fields: Any) -> Said:
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            fixed = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = client.post("/v1/completions", json={**fixed, "seed": seed, **options, **fields})
            assert answer.status_code == 200, answer.text
            return said(answer)

        yield send


def said(answer: httpx.Response) -> Said:
    if answer.headers["content-type"] == "application/json":
        bodies = [answer.json()]
    else:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [choice for body in bodies for choice in body["choices"]]
    (end,) = [choice for choice in choices if choice["finish_reason"]]
    (usage,) = [body["usage"] for body in bodies if body["usage"]]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    pieces = [choice["text"] for choice in choices]
    return Said(pieces, ids, end["finish_reason"], end["stop_reason"], usage["completion_tokens"])


BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.mark.parametrize("text", [MIXED, "🔥", "ครับ"])
def test_a3_a4_every_cut_in_a_character(server: ScriptedServer, ask: Callable[..., Said], text: str) -> None:
    seed = server.add(text)
    for max_tokens in range(1, 41):
        whole, streamed = ask(seed, max_tokens=max_tokens), ask(seed, True, max_tokens=max_tokens)
        assert whole.text == streamed.text
        assert whole.token_ids == streamed.token_ids
        assert whole.finish_reason == streamed.finish_reason == "length"
        shown = whole.text.removesuffix("\ufffd")
        assert "\ufffd" not in shown and (text * 41).startswith(shown)
        assert not any("\ufffd" in piece for piece in streamed.pieces[:-1])
        if not max_tokens % len(server.scripts[seed]):
            assert whole.text == text * (max_tokens // len(server.scripts[seed]))


def test_b1_nothing_of_a_stop_string_is_streamed(server: ScriptedServer, ask: Callable[..., Said]) -> None:
    for rest, shown in (("DEFGHIJKL", ""), ("DEFGHI and more", "DEFGHI and more"), ("DEFDEFGHIJ", "DEF")):
        seed = server.add(f" the alphabet: ABC{rest}")
        answer = ask(seed, True, max_tokens=len(server.scripts[seed]), stop=["DEFGHIJ"])
        assert answer.text == f" the alphabet: ABC{shown}"
        assert answer.finish_reason == ("length" if "more" in rest else "stop")
        assert len(answer.pieces) > 3


def test_b2_long_stop_strings_in_both_modes(server: ScriptedServer, ask: Callable[..., Said]) -> None:
    seed = server.add("Thought: look it up\nAction: search[engine]\nObservation: hello world")
    whole, streamed = (ask(seed, stream, max_tokens=200, stop=["\nObservation:"]) for stream in (False, True))
    assert whole.text == streamed.text == "Thought: look it up\nAction: search[engine]"
    for answer in (whole, streamed):
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "\nObservation:")
    assert whole.completion_tokens == streamed.completion_tokens


@BOTH
def test_b4_withheld_text_comes_when_the_answer_ends(
    server: ScriptedServer, ask: Callable[..., Said], stream: bool
) -> None:
    seed = server.add("okzz")
    answer = ask(seed, stream, max_tokens=len(server.scripts[seed]), stop=["zzzz"])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("okzz", "length", None)
    assert answer.pieces[-1].endswith("zz")


@BOTH
@pytest.mark.parametrize(("include", "text"), [(False, "qa"), (True, "qax")])
def test_b5_stop_strings_count_where_ids_are_returned(
    server: ScriptedServer, ask: Callable[..., Said], stream: bool, include: bool, text: str
) -> None:
    seed = server.add("qaxqaxqax")
    answer = ask(seed, stream, max_tokens=9, stop=["x"], include_stop_str_in_output=include)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", "x")
    assert answer.token_ids == server.scripts[seed][: answer.completion_tokens]
    assert "x" in server.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("name", ["detokenize", "skip_detokenize", "return_tokens_only"])
def test_b5_a_token_only_path_is_refused(server: ScriptedServer, name: str) -> None:
    body = {"prompt": PROMPT, name: False, "stop": ["x"]}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@BOTH
def test_b6_a_match_inside_a_token(server: ScriptedServer, ask: Callable[..., Said], stream: bool) -> None:
    """The report's "ell" of "Hello" with what is one token here: "escr" of "described"."""
    word = server.ids(" described")
    assert any("escr" in server.tokenizer.token_text(token_id) for token_id in word)
    seed = server.add([*server.ids("it was"), *word, *server.ids(" world")])
    answer = ask(seed, stream, max_tokens=30, stop=["escr"])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("it was d", "stop", "escr")
    ends = [n for n in range(1, 31) if "escr" in server.tokenizer.decode((server.scripts[seed] * 30)[:n])]
    assert answer.completion_tokens == len(answer.token_ids) == ends[0]


@BOTH
@pytest.mark.parametrize("skip", [True, False])
def test_b6_special_stop_tokens(server: ScriptedServer, ask: Callable[..., Said], stream: bool, skip: bool) -> None:
    hello = server.ids("hello world")
    seed = server.add([*hello, IM_END, *hello])
    answer = ask(seed, stream, max_tokens=50, stop_token_ids=[IM_END], skip_special_tokens=skip)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello world", "stop", IM_END)
    assert answer.completion_tokens == len(hello) + 1
    assert answer.token_ids == [*hello, IM_END]
