"""What sampling and structured output promise, in figures: `python -m core.lab.check_structured [--quick] [PIECE …]`.

Each piece prints its table; the last line has the figures of all, and the exit code is 1 where one of them fails. `--quick` runs
the same pieces on less, and with a model of a few thousand weights: a smoke test of minutes, in which no time is held against
anyone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from core.lab.pieces import Outcome, Size, given, main, sized

MAX_HOSTILE_S = 2.0  # of a hostile grammar, from asking to the answer
MAX_GROWTH_BYTES = 32 * 2**20  # of a process, while grammars come that are all new
NUM_UNIQUE: Mapping[Size, int] = {"quick": 400, "full": 20_000}
MIN_POINTS_ABOVE = 10.0  # of the cases of the JSON-Schema-Test-Suite, over llguidance alone
MAX_TOOL_MS = 50.0  # p99 of compiling the schema of a tool for the first time
MAX_GREEDY_RATIO = 1.05  # of the sampler's time, over argmax of the same 32 rows of the model
MAX_TRUNCATED_RATIO = 1.5
HELD = ("top_k 50", "top_k 50, top_p 0.9", "min_p 0.05")  # with one thread; top-p alone has to weigh every token
MAX_GRAMMAR_RATIO = 1.05  # of the time per token of 8 streams, over that without a grammar
COST_ROUNDS: Mapping[Size, tuple[int, int]] = {"quick": (2, 24), "full": (7, 96)}  # rounds, tokens of a stream
NUM_ROUNDS: Mapping[Size, int] = {"quick": 2, "full": 30}
NUM_HOSTILE: Mapping[Size, int | None] = {"quick": 100, "full": None}
NUM_PROMPTS: Mapping[Size, int] = {"quick": 20, "full": 300}
MAX_CUT = 0.05  # of the answers, by `max_tokens`
MAX_DRIFTED = 0.02  # of the pairs, by the arithmetic of another batch


def hostile(size: Size) -> Outcome:
    """Grammars that engines have died of: each is refused or compiled in time, and the server lives."""
    from core.lab.grammar_load import hostile_run
    from core.lab.quiet import quiet

    with quiet(), _model(size) as overrides:
        run = asyncio.run(hostile_run(overrides, NUM_HOSTILE[size]))
    for code, count in run.codes.most_common():
        print(f"{count:5} {code}")
    late, wrong = run.slower_than(MAX_HOSTILE_S), run.not_answered()
    for one in [*late, *wrong][:10]:
        print(f"{one.seconds:.2f} s  {one.name}: {one.code} {one.message[:100]}")
    for incident in run.incidents:
        print(f"{incident.group}={incident.name}, {incident.failures} times, the last: {incident.reason}")
    times = sorted(one.seconds for one in run.told)
    memory = f"front {run.front_bytes / 2**20:.0f} MiB, compiler {run.compiler_bytes / 2**20:.0f} MiB"
    lost = f"{run.figures.lost_processes} processes lost"
    print(f"p50 {times[len(times) // 2] * 1e3:.1f} ms, longest {times[-1]:.2f} s, {lost}, {memory}")
    good = run.is_alive and not wrong and (not late or size == "quick")
    named = f"{len(run.told):,} hostile grammars: {run.codes['compiled']} compiled, the rest refused, longest {times[-1]:.2f} s"
    return Outcome(good, f"{named}, {len(wrong)} errors, {memory}")


def unique(size: Size) -> Outcome:
    """Requests with a grammar that nobody has sent before: the server's memory stays where it is."""
    from core.lab.grammar_load import unique_run

    num = NUM_UNIQUE[size]
    with _model("quick") as overrides:  # memory does not depend on the model's weights
        run = asyncio.run(unique_run([*overrides, "structured_outputs.cache_memory=4MiB"], num))
    for server, compiler in zip(run.server_bytes, run.compiler_bytes, strict=True):
        print(f"server {server / 2**20:7.1f} MiB   compiler {compiler / 2**20:7.1f} MiB")
    for error, count in run.errors.most_common(5):
        print(f"{count:5} {error}")
    server, compiler = run.growth(lambda run: run.server_bytes), run.growth(lambda run: run.compiler_bytes)
    again = f"{run.hits_again} of the last {run.num_again} found again"
    print(f"{num / run.seconds:.0f} requests/s, {again}, cache {run.cached_bytes / 2**20:.1f} MiB")
    good = run.num_ended == num and run.hits_again == run.num_again and max(server, compiler) <= MAX_GROWTH_BYTES
    return Outcome(
        good, f"{num:,} unique grammars: server {server / 2**20:+.1f} MiB, compiler {compiler / 2**20:+.1f} MiB"
    )


def suite(_: Size) -> Outcome:
    """The JSON-Schema-Test-Suite: what compiles lets valid values through, and no others."""
    from core.lab import json_schema_suite as lab
    from core.lab.json_schema_suite import Verdict

    with lab.fetched_suite() as folder:
        groups = list(lab.read_groups(folder))
    ours, alone = lab.run(groups, lab.through(["llguidance"])), lab.run(groups, lab.alone)
    print(lab.table({"nonet": ours, "llguidance": alone}))
    counts, others = lab.count(ours), lab.count(alone)
    total, num_passed = sum(counts.values()), counts[Verdict.PASSED]
    changed = lab.worse(ours, lab.read_ratchet(lab.RATCHET))
    for line in [*changed, f"{lab.better(ours, lab.read_ratchet(lab.RATCHET))} better than the ratchet"]:
        print(line)
    points = 100 * (num_passed - others[Verdict.PASSED]) / total
    wrong = counts[Verdict.FALSE_POSITIVE] + counts[Verdict.CRASH]
    figures = (
        f"JSON-Schema-Test-Suite {num_passed:,} of {total:,} pass ({num_passed / total:.1%}, {points:+.1f} points over "
        f"llguidance alone), {wrong} false positives and crashes, {len(changed)} worse than the ratchet"
    )
    return Outcome(not wrong and not changed and points >= MIN_POINTS_ABOVE, figures)


def bfcl(size: Size) -> Outcome:
    """The tools of the Berkeley Function-Calling Leaderboard: each compiles, or is refused with a reason."""
    from core.grammar.backends import backends_from_json
    from core.lab.bfcl_tools import fetched_wheel, read_parameters, run
    from core.session import open_session
    from core.stages.grammar import GROUP

    with fetched_wheel() as wheel:
        parameters = read_parameters(wheel)
    with _model(size) as overrides:
        settings = open_session(overrides).settings
        backends = backends_from_json(settings.to_json())
        backends.warm_first()
        found = run(parameters, backends, [selected.name for selected in settings.chains[GROUP]])
    for reason, count in [*found.refusals.most_common(), *found.faults.most_common(10)]:
        print(f"{count:5} {reason}")
    p50, p99, longest = (found.percentile(share) * 1e3 for share in (0.5, 0.99, 1.0))
    refused, failed = found.refusals.total(), found.faults.total()
    figures = (
        f"{found.num_tools:,} tools of BFCL ({found.num_foreign:,} with types that are not JSON Schema's): {refused} refused, "
        f"{failed} failed, compiled in {p50:.1f} ms, p99 {p99:.1f}, longest {longest:.1f}"
    )
    return Outcome(not failed and (p99 <= MAX_TOOL_MS or size == "quick"), figures)


def tools(size: Size) -> Outcome:
    """Questions of BFCL over HTTP: required and named calls are whole and valid, and streamed they are the same."""
    from core.lab import tool_calls as lab
    from core.lab.bfcl_tools import fetched_wheel, read_questions
    from core.lab.quiet import quiet

    with fetched_wheel() as wheel:
        questions = read_questions(wheel, NUM_PROMPTS[size])
    with tempfile.TemporaryDirectory() as folder, quiet():
        overrides, ends = (lab.tiny_model(Path(folder)), lab.ENDS) if size == "quick" else ([], "")
        found = asyncio.run(lab.run(overrides, questions, ends))
    print(lab.report(found))
    rare = found.num_cut <= MAX_CUT * found.num_pairs and found.num_drifted <= MAX_DRIFTED * found.num_pairs
    good = not found.flaws and found.num_pairs == len(questions) and (rare or size == "quick")
    return Outcome(good, lab.figures(found))


def sampler(size: Size) -> Outcome:
    """Choosing the tokens of 32 rows, over `torch.argmax` of the same matrix."""
    import os

    from core.lab import sampler_cost as lab

    with _model(size) as overrides:
        kinds = {"model": lab.model_logits(overrides), **lab.other_logits()}
    costs = [
        cost
        for num_threads in range(1, min(2, os.cpu_count() or 1) + 1)
        for rows, logits in kinds.items()
        for cost in lab.measure(rows, logits, num_threads, NUM_ROUNDS[size])
    ]
    print("\n".join(map(str, costs)))
    model = {(cost.case, cost.num_threads): cost.ratio for cost in costs if cost.rows == "model"}
    greedy = max(ratio for (case, _), ratio in model.items() if case == "greedy")
    held = {case: model[case, 1] for case in HELD}
    worst = max(held, key=held.__getitem__)
    good = greedy <= MAX_GREEDY_RATIO and held[worst] <= MAX_TRUNCATED_RATIO
    figures = (
        f"32 rows of the model: greedy {greedy:.2f}x argmax, truncated at most {held[worst]:.2f}x ({worst}), a mix "
        f"{model['a mix of these', 1]:.2f}x, top-p alone {model['top_p 0.9', 1]:.2f}x"
    )
    return Outcome(good or size == "quick", figures)


def cost(size: Size) -> Outcome:
    """What a grammar adds to the time of a token, and what forced tokens take off it."""
    from core.lab.grammar_cost import measure
    from core.lab.quiet import quiet

    with quiet(), _model(size) as overrides:
        found = asyncio.run(measure(overrides, *COST_ROUNDS[size]))
    print(found)
    good = found.ratio <= MAX_GRAMMAR_RATIO and found.speedup > 1.0
    figures = (
        f"a JSON schema {found.ratio:.3f}x the time per token, one with many names {found.speedup:.2f} times as fast"
    )
    return Outcome(good or size == "quick", figures)


@contextmanager
def _model(size: Size) -> Iterator[list[str]]:
    """Overrides that select the model: that of the preset, or a random one of a few thousand weights."""
    if size == "full":
        yield ["+preset=chat"]
        return
    from core.testing.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        yield [f"model.source={make_tiny_model(Path(folder) / 'tiny')}"]


PIECES: Mapping[str, Callable[[Size], Outcome]] = {
    piece.__name__: piece for piece in (suite, bfcl, tools, cost, sampler, hostile, unique)
}


def run(arguments: Sequence[str]) -> int:
    names, size = sized(arguments)
    return main(names, given(PIECES, size), "structured")


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
