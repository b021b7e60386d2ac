"""`python -m core <command>` as users run it: real processes, a pipe, a terminal, and a tiny model on disk."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.model.spec import ModelFiles
from core.model.tokenizer import load_tokenizer
from core.testing.tiny_models import make_tiny_model
from core.testing.tokenizers import CHATML

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
LONG = 4096  # context of the model: a reply of that length can be interrupted


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of its own, so that `models` sees what the test put there."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "PYTHONPATH": str(ROOT), "NONET_CACHE": cache, "OMP_NUM_THREADS": "1", "TERM": "xterm"}


@pytest.fixture
def nonet(tmp_path: Path, environ: dict[str, str]):
    """Run a command to its end, in an empty folder."""

    def run(*arguments: str, stdin: str = "") -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "core", *arguments],
            input=stdin.encode(),
            capture_output=True,
            timeout=SECONDS,
            cwd=tmp_path,
            env=environ,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


def greedy(model: Path, prompt: str, num_tokens: int) -> str:
    """What `model` continues `prompt` with, by transformers and without a cache: the slow twin."""
    tokenizer = load_tokenizer(ModelFiles("hf", model, str(model)))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = prompt_ids = tokenizer.encode(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids = [*ids, int(network(torch.tensor([ids])).logits[0, -1].argmax())]
    return tokenizer.decode(ids[len(prompt_ids) :])


def as_chat(*messages: tuple[str, str]) -> str:
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


def greedy_flags(model: Path, num_tokens: int) -> list[str]:
    return [f"model.source={model}", "model.dtype=float32", f"max_tokens={num_tokens}", "temperature=0"]


def assert_one_line(result: Result, *expected: str) -> None:
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1 and result.err.endswith("\n"), result.err
    assert "Traceback" not in result.err
    for text in expected:
        assert text in result.err


# generate


@pytest.mark.parametrize("prompt", ['say "a=b, c={d}" [x], $y; \\n', "null"])
def test_generate_prints_the_text_alone(nonet, model, prompt):
    result = nonet("generate", f"prompt={prompt}", *greedy_flags(model, 12))
    assert (result.code, result.out) == (0, greedy(model, prompt, 12) + "\n"), result.err


def test_generate_reads_stdin_and_prints_n_answers(nonet, model):
    prompt = "two lines\nfrom a pipe = |\n"
    result = nonet("generate", "prompt=-", "n=2", *greedy_flags(model, 8), stdin=prompt)
    assert (result.code, result.out) == (0, (greedy(model, prompt, 8) + "\n") * 2), result.err


def test_generate_as_a_chat_in_a_separate_engine_process(nonet, model):
    result = nonet("generate", "prompt=hello", "chat=true", "process.separate=true", *greedy_flags(model, 8))
    assert "<|im_start|>" in CHATML
    assert (result.code, result.out) == (0, greedy(model, as_chat(("user", "hello")), 8) + "\n"), result.err


LINES = [
    '{"id": "a", "prompt": "hello world"}',
    '{"prompt": "with \u2028 a line separator", "max_tokens": 3}',
    "",
    '{"id": 7, "messages": [{"role": "user", "content": "hi"}]}',
    '{"prompt": "x", "temprature": 1}',
    '{"prompt": "x"',
    "[1]",
    '{"id": "both", "prompt": "x", "prompt_token_ids": [5]}',
    '{"id": "long", "prompt": "x", "max_tokens": 99999}',
    '{"id": "ids", "prompt_token_ids": [40, 41, 42], "n": 2}',
]


def test_generate_answers_a_file_line_by_line(nonet, model, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    result = nonet("generate", "input=in.jsonl", "output=out.jsonl", *greedy_flags(model, 6))
    assert_one_line(result, "5 of 9 lines failed")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").rstrip("\n").split("\n")]
    texts = [[choice["text"] for choice in answer.get("choices", ())] for answer in answers]
    assert texts[:3] == [
        [greedy(model, "hello world", 6)],
        [greedy(model, "with \u2028 a line separator", 3)],
        [greedy(model, as_chat(("user", "hi")), 6)],
    ]
    assert [answer.get("id") for answer in answers] == ["a", 2, 7, 5, 6, 7, "both", "long", "ids"]
    errors = [answer.get("error", "") for answer in answers]
    for index, expected in {
        3: "'temprature'; did you mean temperature",
        4: "line 6",
        5: "JSON object",
        6: "exactly one",
        7: "99999",
    }.items():
        assert expected in errors[index]
    assert len(texts[8]) == 2 and texts[8][0] == texts[8][1]
    assert answers[8]["usage"] == {"prompt_tokens": 3, "completion_tokens": 12}


def test_good_lines_go_to_stdout_and_exit_with_0(nonet, model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    result = nonet("generate", "input=in.jsonl", "concurrency=1", *greedy_flags(model, 3))
    assert result.code == 0, result.err
    texts = [json.loads(line)["choices"][0]["text"] for line in result.out.rstrip("\n").split("\n")]
    assert texts == [greedy(model, "a", 3), greedy(model, "b", 3)]


def test_log_probabilities_are_written_per_token(nonet, model, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "logprobs": 2}\n{"prompt": "a"}\n', encoding="utf-8")
    result = nonet("generate", "input=in.jsonl", *greedy_flags(model, 3))
    assert result.code == 0, result.err
    with_them, without = (json.loads(line)["choices"][0] for line in result.out.rstrip("\n").split("\n"))
    assert [token["token_id"] for token in with_them["logprobs"]] == with_them["token_ids"] == without["token_ids"]
    for token in with_them["logprobs"]:
        assert token["rank"] == 1 and token["logprob"] <= 0
        assert [token["token_id"], token["logprob"]] == token["top"][0] and len(token["top"]) == 2
    assert "logprobs" not in without


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prompt=hello", "max_tokens=99999", "n=2"], "the context holds 4096"),
        (["prompt="], "empty prompt"),
        (["input=in.jsonl", "output=no/such/folder"], "output=no/such/folder"),
        (["input=in.jsonl", "output=in.jsonl/x"], "output="),
        (["input=."], "input=.: is a folder"),
        (["prompt=hello", "logprobs=1"], "use input=file.jsonl"),
        ([], 'prompt="…"'),
    ],
)
def test_generate_refuses_with_one_line(nonet, model, tmp_path, arguments, expected):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert_one_line(nonet("generate", f"model.source={model}", *arguments), expected)
    assert (tmp_path / "in.jsonl").read_text("utf-8") == '{"prompt": "a"}\n'


# What is checked before any model is read


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "promt=hello"], "did you mean prompt"),
        (["generate", "prompt=hello", "repetition_penalty=0.001"], "frontend.repetition_penalty"),
        (
            ["generate", "input=nothing.jsonl", "model.source=no/such/folder"],
            "nonet generate: input=nothing.jsonl: no such file\n",
        ),
        (["chat", "logprobs=1"], "a terminal chat shows no log-probabilities"),
        (["generate", "hello"], "write key=value"),
        (["generate", "prompt=hello", "temperatur=0"], "did you mean temperature"),
        (["generate", "prompt=hello", "max_tokens=many"], "max_tokens"),
        (["generate", "prompt=hello", 'stop=["a"'], "is not JSON"),
        (["generate", "prompt=hello", "scheduler=fcsf"], "did you mean fcfs"),
        (["generate", "prompt=hello", "plugins.disable=[nobody]"], "no plugin or distribution is called 'nobody'"),
        (["generate", "prompt=hello", "plugins.on_failure=ignore"], "plugins.on_failure"),
        (["generate", "prompt=hello", "model.source=no/such/folder"], "no such file or folder"),
        (["chat", "sistem=brief"], "did you mean system"),
        (["chat", "n=2"], "frontend.n"),
        (["bench", "num_request=4"], "did you mean num_requests"),
        (["bench", "workload=singel"], "did you mean single"),
        (["bench", "url=127.0.0.1:8000"], "an address as in url=http://"),
        (["serve", "+preset=caht"], "did you mean chat"),
        (["serve", "frontend.prot=1"], "did you mean port"),
        (["explain", "scheduler.max_num_runing_reqs=3"], "did you mean max_num_running_reqs"),
        (["plugins", "--jsn"], "usage: plugins"),
        (["plugins", "lst"], "did you mean list"),
        (["models", "lst"], "did you mean list"),
        (["models", "remove"], "usage: models"),
        (["models", "pull", "no/such/folder"], "no such file or folder"),
        (["models", "pull", "hf:a/b/c/d"], "hf:org/name"),
        (["doctor", "now"], "unknown argument 'now'"),
    ],
    ids=" ".join,
)
def test_what_is_misspelt_is_answered_with_one_line(nonet, arguments, expected):
    assert_one_line(nonet(*arguments), expected)


def test_an_unknown_command_and_no_command(nonet):
    wrong, none, help_ = nonet("serv"), nonet(), nonet("--help")
    assert (wrong.code, wrong.out) == (2, "") and "did you mean serve" in wrong.err
    assert none.code == 2 and help_.code == 0
    assert none.out == help_.out and "generate" in help_.out


def test_models_lists_what_is_there_and_pulls_a_path(nonet, model):
    assert "no models in" in nonet("models", "list").out
    pulled = nonet("models", "pull", str(model))
    assert (pulled.code, pulled.out) == (0, f"{model}\n")


def test_bench_prints_json(nonet, model):
    result = nonet(
        "bench",
        f"model.source={model}",
        "num_requests=3",
        "input_len=20",
        "output_len=5",
        "concurrency=2",
        "scheduler.max_num_running_reqs=5",
    )
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["workload"]["num_requests"] == 3 and report["model"] == str(model)
    steps = report["steps"]
    assert steps["count"] >= 5 and 0 < steps["framework_share"] < 1
    assert sum(steps["shares"].values()) == pytest.approx(1.0)
    assert report["tpot_s"]["p50"] > 0 and report["output_tokens_per_s"] > 0
    assert report["pipeline"][3] == {
        "stage": "scheduler", "name": "fcfs", "wheel": "nonet", "version": report["machine"]["nonet"],
        "settings": {"max_num_running_reqs": 5},
    }  # fmt: skip
    summary = result.err.rstrip().splitlines()[-8:]
    labels = ["output", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "framework share", "steps", "limits"]
    assert [line.split("  ")[0] for line in summary] == labels
    assert f"{report['output_tokens_per_s']:.1f} tokens/s" in summary[0] and f"  {steps['count']}, " in summary[6]


# chat


def test_chat_through_a_pipe(nonet, model):
    lines = [
        "/system Be brief.",
        "/set temperature 0.2",
        "/set temprature 1",
        "/set n 2",
        "/set logprobs 2",
        "/sttas",
        "/stats",
        "/set temperature 0",
        "/set max_tokens 6",
        "hello",
        "",
        "more = better?",
        "/stats",
        "/show",
    ]
    result = nonet("chat", f"model.source={model}", "model.dtype=float32", stdin="\n".join(lines))
    assert result.code == 0, result.err
    first = greedy(model, as_chat(("system", "Be brief."), ("user", "hello")), 6)
    history = (("system", "Be brief."), ("user", "hello"), ("assistant", first), ("user", "more = better?"))
    second = greedy(model, as_chat(*history), 6)
    expected = [
        "Chatting with tiny",
        "temperature = 0.2\n",
        "unknown field 'temprature'; did you mean temperature",
        "n: Input should be less than or equal to 1",
        "logprobs: Value error, a terminal chat shows no log-probabilities",
        "unknown command /sttas; did you mean stats",
        "no finished reply yet",
        "temperature = 0.0\nmax_tokens = 6\n",
        f"{first}\n{second}\n",
        "reply 6",
        "system = Be brief.",
    ]
    at = -1
    for text in expected:
        at = result.out.find(text, at + 1)
        assert at >= 0, f"{text!r} is missing, or not in this place: {result.out!r}"


def test_a_pipe_that_never_ends_can_be_interrupted(model, environ, tmp_path):
    command = [sys.executable, "-m", "core", "chat", f"model.source={model}"]
    environ = {**environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=environ) as chat:
        try:
            assert chat.stdout is not None
            assert b"Chatting with" in chat.stdout.readline()
            chat.send_signal(signal.SIGINT)
            assert chat.wait(SECONDS) == 130
        finally:
            chat.kill()


class Terminal:
    """A program in a terminal of its own, as under a shell: Ctrl-C reaches it as a signal when the terminal says so."""

    def __init__(self, command: Sequence[str], cwd: Path, environ: dict[str, str]):
        self.seen = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:  # the child: nothing but exec
            try:
                os.chdir(cwd)
                os.execve(command[0], list(command), environ)
            finally:
                os._exit(127)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait until what came since the last match matches `pattern`; returns it."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.seen)):
            assert self._read(deadline), f"{pattern!r} did not come: {self.seen[-2000:]!r}"
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def _read(self, deadline: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # the other end is closed
                raise
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)

    def exit_code(self) -> int:
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(model: Path, environ: dict[str, str], tmp_path: Path) -> Iterator[Terminal]:
    """`chat` in a terminal. The variable keeps prompt_toolkit from asking a terminal that cannot answer for its cursor."""
    command = [sys.executable, "-m", "core", "chat", f"model.source={model}", "model.dtype=float32", "max_tokens=4000"]
    chat = Terminal(command, tmp_path, {**environ, "PROMPT_TOOLKIT_NO_CPR": "1"})
    yield chat
    chat.close()


PROMPT = r"\x1b\[\?2004h[^\n]*>"  # a prompt switches bracketed paste on, in raw mode: only from then on keys are keys
ENTERED = r"\x1b\[\?2004l"  # and off at its end


def test_ctrl_c_stops_a_reply_and_not_the_program(terminal):
    terminal.expect("Chatting with tiny")
    terminal.expect(PROMPT)
    terminal.type("half a li\x03")  # at the prompt it only clears the line
    terminal.expect(PROMPT)
    terminal.type("/set ignore_eos true\r")
    terminal.expect("ignore_eos = True")
    terminal.expect(PROMPT)
    terminal.type("hello\r")
    terminal.expect(ENTERED)
    terminal.expect(r"[a-z]{2}")  # the reply has begun; it would go on for thousands of tokens
    terminal.type("\x03")
    assert len(terminal.expect(r" \[stopped\]")) < LONG
    terminal.expect(PROMPT)
    terminal.type("/set max_tokens 5\r")
    terminal.expect("max_tokens = 5")
    terminal.expect(PROMPT)
    terminal.type("and now?\r")
    terminal.expect(ENTERED)
    terminal.expect(PROMPT)
    terminal.type("/stats\r")
    assert "reply 5" in terminal.expect(r"TTFT .*reply \d+")
    terminal.expect(PROMPT)
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_a_closed_standard_output_is_one_that_nobody_reads(
    model: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    command = f'"{sys.executable}" -m core generate prompt=hello max_tokens=2 +preset=chat model.source="{model}" >&-'
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_closed_outputs_are_outputs_of_children_too(environ: dict[str, str]) -> None:
    """Else the first file that a child opens, such as a model's, is where its errors go."""
    code = (
        "import subprocess, sys, types\n"
        "from core.cli import main\n"
        "child = 'import os, sys; sys.exit(7 if os.fstat(1) and os.fstat(2) and sys.stdout and sys.stderr else 8)'\n"
        "run = lambda arguments: subprocess.run([sys.executable, '-c', child]).returncode\n"
        "sys.modules['core.commands.doctor'] = types.SimpleNamespace(run=run)\n"
        "sys.exit(main(['doctor']))\n"
    )
    command = ["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, env=environ, timeout=SECONDS).returncode == 7


def test_a_closed_standard_input_is_an_empty_one(model: Path, environ: dict[str, str], tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m core chat +preset=chat model.source="{model}" <&-'
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
