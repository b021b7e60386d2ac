"""Both built-in samplers keep the contract; the standard one equals the slow twin over all parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batch import PromptRows, SampledRow, SamplingMetadata
from core.errors import PluginError
from core.request import SamplingParams
from core.stages.logits_processor import LogitsProcessorContext, NoProcessors
from core.stages.sampler import SAMPLER_FIELDS, SamplerContext, unsupported_fields
from core.testing.logits_processor import chain_of
from core.testing.sampler import SamplerContract, assert_frequencies, make_logits, make_row, metadata_of
from core.testing.sampler_reference import ReferenceSampler, spec_of
from plugins.logits_processors.min_tokens import MinTokens
from plugins.samplers import provide_samplers
from plugins.samplers.draw import uniforms
from plugins.samplers.greedy import Greedy
from plugins.samplers.standard import Standard

V = 150
EOS = frozenset({3, 4})
UNUSABLE = frozenset({140, 145, 149})


PROVIDES = {component.name: frozenset(component.provides) for component in provide_samplers()}


class TestStandard(SamplerContract):
    component = Standard
    provides = PROVIDES["standard"]


class TestStandardInSmallPieces(SamplerContract):
    """Growth of the candidates and chunks of rows do not change a result."""

    component = Standard
    settings = {"first_candidates": 2}
    provides = PROVIDES["standard"]

    def make(self, context: SamplerContext, **settings: object) -> Standard:
        sampler = super().make(context, **settings)
        sampler._selection._chunk_floats = sampler._logprobs._chunk_floats = 150 * context.model.vocab_size
        return sampler


class TestGreedy(SamplerContract):
    component = Greedy
    provides = PROVIDES["greedy"]


def with_min_tokens(context: SamplerContext) -> SamplerContext:
    """The context with the one processor of the default config, where a test brings no chain of its own."""
    if type(context.processors) is not NoProcessors:
        return context
    of_processor = LogitsProcessorContext(context.model, context.device, load_tokenizer=lambda: None)
    processor = MinTokens(MinTokens.Settings(), of_processor)
    return replace(context, processors=chain_of(processor, "min_tokens", provides=("min_tokens",)))


class TestStandardWithProcessors(SamplerContract):
    """Together with the processor, `min_tokens` is honoured, and nothing else changes."""

    component = Standard
    provides = PROVIDES["standard"] | {"min_tokens"}

    def make(self, context: SamplerContext, **settings: object) -> Standard:
        return super().make(with_min_tokens(context), **settings)


class TestGreedyWithProcessors(SamplerContract):
    component = Greedy
    provides = PROVIDES["greedy"] | {"min_tokens"}

    def make(self, context: SamplerContext, **settings: object) -> Greedy:
        return super().make(with_min_tokens(context), **settings)


def uniform(seed: int, choice: int, position: int, attempt: int) -> float:
    return float(uniforms([seed], [choice], [position], attempt)[0])


ids = st.integers(0, V - 1)
some_ids = st.lists(ids, max_size=4).map(tuple)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 1e-5, 0.3, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 40, V - 1, V, V + 5, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=3),
    allowed_token_ids=st.one_of(st.none(), st.none(), some_ids),
    bad_words_token_ids=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    ignore_eos=st.booleans(),
    stop_token_ids=some_ids,
    logprobs=st.sampled_from([None, 0, 1, 5, V, V + 7]),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampledRow]]:
    count = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (rng.normal(size=(count, V)) * draw(st.sampled_from([0.0, 0.1, 3.0, 30.0]))).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    if draw(st.booleans()):
        cells = rng.integers(0, V, 3)
        logits[0, cells] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    rows = []
    for index in range(count):
        output = draw(st.lists(ids, max_size=4))
        place = draw(st.integers(0, 1)) + len(output)  # one id may be in flight
        fields = {"seed": draw(st.integers(-(2**63), 2**63 - 1)), "choice": index, "position": place}
        prompt = draw(st.lists(ids, min_size=1, max_size=5))
        row = make_row(f"r{index}", draw(params), output_token_ids=output, prompt_token_ids=prompt, **fields)
        rows.append(row)
    return torch.from_numpy(logits), rows


@settings(max_examples=120, deadline=None, derandomize=True)
@given(steps(), st.sampled_from([1, 16, 256]))
def test_standard_equals_its_slow_twin(step: tuple[torch.Tensor, list[SampledRow]], first: int) -> None:
    logits, rows = step
    model = spec_of(V, EOS, UNUSABLE)
    sampler = Standard(Standard.Settings(first_candidates=first), with_min_tokens(SamplerContext(model)))
    reference = ReferenceSampler(model, uniform)
    found = sampler.sample(logits.clone(), metadata_of(rows))
    for index, row in enumerate(rows):
        values, name = logits[index].numpy(), row.request_id
        assert (name in found.errors) == reference.is_bad(values, row) == (name not in found.token_ids)
        if name in found.errors:
            continue
        assert found.token_ids[name][0] in reference.acceptable(values, row)
        assert (name in found.logprobs) == (row.params.logprobs is not None)
        if row.params.logprobs is not None:
            wanted, (given_,) = (
                reference.logprobs(values, found.token_ids[name][0], row.params.logprobs),
                found.logprobs[name],
            )
            assert (given_.rank, [i for i, _ in given_.top]) == (wanted.rank, [i for i, _ in wanted.top])
            np.testing.assert_allclose(given_.logprob, wanted.logprob, atol=1e-4, rtol=1e-5)
            np.testing.assert_allclose([p for _, p in given_.top], [p for _, p in wanted.top], atol=1e-4, rtol=1e-5)


WAYS: list[dict[str, float]] = [
    {},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 9.0},
    {"top_p": 0.5},
    {"top_p": 0.3},
    {"top_p": 0.05, "temperature": 3.0},
    {"min_p": 1e-4},
    {"min_p": 0.3, "temperature": 0.5},
    {"min_p": 1e-3, "top_p": 0.8},
    {"top_k": 700, "min_p": 0.01, "top_p": 0.7},
]
"""Every way to find what is kept, at sizes at which blocks, pieces and growth are all in use."""


@pytest.mark.parametrize("kind", ["model", "flat", "ties", "masked"])
def test_large_vocabulary_equals_the_slow_twin(kind: str) -> None:
    vocab_size = 20_011
    model = spec_of(vocab_size)
    sampler, reference = Standard(Standard.Settings(), SamplerContext(model)), ReferenceSampler(model, uniform)
    rows = [make_row(f"r{i}", SamplingParams(**WAYS[i % len(WAYS)]), seed=i) for i in range(4 * len(WAYS))]  # type: ignore[arg-type]
    logits = make_logits(len(rows), vocab_size, seed=9)
    if kind in ("flat", "ties"):
        logits /= 3.0
    if kind == "ties":
        logits = logits.bfloat16().float().mul(8.0).round() / 8.0
    if kind == "masked":
        logits[:, 70:] = float("-inf")
        logits[:, 3] = 40.0
    found = sampler.sample(logits.clone(), metadata_of(rows))
    for index, row in enumerate(rows):
        assert found.token_ids[row.request_id][0] in reference.acceptable(logits[index].numpy(), row), row.params


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_frequencies_of_every_way(way: int) -> None:
    model, count = spec_of(400), 3000
    params = SamplingParams(**WAYS[way])  # type: ignore[arg-type]
    logits = make_logits(1, 400, seed=way)
    rows = [make_row(f"r{i}", params, seed=i // 60, choice=i % 3, position=i // 3 % 20) for i in range(count)]
    found = Standard(Standard.Settings(first_candidates=8), SamplerContext(model)).sample(
        logits.expand(count, -1).clone(), metadata_of(rows)
    )
    counts = np.bincount([ids[0] for ids in found.token_ids.values()], minlength=400)
    assert_frequencies(counts, ReferenceSampler(model).distribution(logits[0].numpy(), rows[0]))


def test_every_way_is_bitwise_independent_of_its_batch() -> None:
    model = spec_of(20_011)
    rows = [make_row(f"r{i}", SamplingParams(**WAYS[i % len(WAYS)]), seed=i) for i in range(2 * len(WAYS))]  # type: ignore[arg-type]
    logits = make_logits(len(rows), 20_011, seed=4) / 2.0
    sampler = Standard(Standard.Settings(), SamplerContext(model))
    together = dict(sampler.sample(logits.clone(), metadata_of(rows)).token_ids)
    backwards = dict(sampler.sample(logits.flip(0).clone(), metadata_of(rows[::-1])).token_ids)
    alone = {
        row.request_id: sampler.sample(logits[i : i + 1].clone(), metadata_of([row])).token_ids[row.request_id]
        for i, row in enumerate(rows)
    }
    assert together == backwards == alone


def test_rows_are_bitwise_independent_at_real_width() -> None:
    """Also with another number of threads: a row's sums are never split differently."""
    model = spec_of(50_257)
    logits = make_logits(7, 50_257)
    kinds = [
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(top_p=0.9, logprobs=3),
    ]
    rows = [make_row(f"r{i}", kinds[i % 3], seed=i) for i in range(7)]
    sampler, threads = Standard(Standard.Settings(), SamplerContext(model)), torch.get_num_threads()
    together = sampler.sample(logits.clone(), metadata_of(rows))
    try:
        torch.set_num_threads(1)
        alone = [sampler.sample(logits[i : i + 1].clone(), metadata_of([row])) for i, row in enumerate(rows)]
    finally:
        torch.set_num_threads(threads)
    for row, single in zip(rows, alone, strict=True):
        assert single.token_ids[row.request_id] == together.token_ids[row.request_id]
        assert single.logprobs[row.request_id] == together.logprobs[row.request_id]


def test_speculation_gives_the_tokens_of_plain_decoding() -> None:
    """Each row draws with its own position and counts the drafts before it, so right drafts are accepted in full."""
    model = spec_of(V)
    sampling = SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.8, repetition_penalty=1.2, logprobs=1)
    logits = make_logits(4, V, seed=6)
    plain: list[int] = []
    sampler = Standard(Standard.Settings(), SamplerContext(model))
    for step in range(4):
        row = make_row("a", sampling, output_token_ids=list(plain), position=step)
        plain += sampler.sample(logits[step : step + 1].clone(), metadata_of([row])).token_ids["a"]
    rows = [
        make_row("a", sampling, output_token_ids=[], position=i, draft_token_ids=tuple(plain[:i])) for i in range(4)
    ]
    found = Standard(Standard.Settings(), SamplerContext(model)).sample(logits.clone(), metadata_of(rows))
    assert list(found.token_ids["a"]) == plain
    assert [entry.token_id for entry in found.logprobs["a"]] == plain


def test_logits_of_other_types_and_layouts() -> None:
    model = spec_of(V)
    sampler = Standard(Standard.Settings(), SamplerContext(model))
    wide = make_logits(3, V + 10).bfloat16()[:, :V]
    row = make_row("a", SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2))
    metadata = SamplingMetadata((1,), (row,), (PromptRows("a", (0,), (5,), 1),))
    wanted = sampler.sample(wide.float().contiguous(), metadata)
    assert sampler.sample(wide, metadata) == wanted


def test_ids_outside_the_vocabulary_touch_no_neighbour() -> None:
    """G1, G2: refusing them is the renderer's part; here they change nothing."""
    sampler = Standard(Standard.Settings(), SamplerContext(spec_of(V)))
    wild = SamplingParams(
        temperature=0.0,
        min_tokens=9,
        stop_token_ids=(V + 10, -1, 2**40),
        logit_bias={V + 3: 100.0, -1: 100.0},
        bad_words_token_ids=((V + 1,), (5, V + 2), ()),
        allowed_token_ids=tuple(range(-5, V + 5)),
        repetition_penalty=1.5,
    )
    logits = make_logits(2, V)
    history = {"prompt_token_ids": [V + 4, -3, 1], "output_token_ids": [5, V + 9]}
    rows = [make_row("wild", wild, **history), make_row("neighbour")]
    plain = ReferenceSampler(spec_of(V)).sample(logits.numpy(), metadata_of([make_row("wild"), make_row("neighbour")]))
    found = sampler.sample(logits.clone(), metadata_of(rows))
    assert found.token_ids["neighbour"] == plain.token_ids["neighbour"]
    assert not found.errors


def test_columns_follow_a_changed_batch() -> None:
    sampler = Standard(Standard.Settings(), SamplerContext(spec_of(V)))
    only_five = SamplingParams(temperature=0.0, allowed_token_ids=(5,))
    logits = make_logits(2, V)
    best = logits.argmax(-1).tolist()
    rows = [make_row("a", only_five), make_row("b")]
    assert dict(sampler.sample(logits.clone(), metadata_of(rows)).token_ids) == {"a": (5,), "b": (best[1],)}
    assert dict(sampler.sample(logits.clone(), metadata_of(rows)).token_ids) == {"a": (5,), "b": (best[1],)}
    assert dict(sampler.sample(logits.clone(), metadata_of(rows[::-1])).token_ids) == {"b": (best[0],), "a": (5,)}


def test_bad_words_hold_for_every_choice_and_at_every_position() -> None:
    """G4, G7: forms of one and of several tokens, output and drafts as history, nothing kept from other choices."""
    sampler = Standard(Standard.Settings(), SamplerContext(spec_of(V)))
    sampling = SamplingParams(temperature=3.0, bad_words=("w",), bad_words_token_ids=((7,), (8, 9), (8, 8, 10)))
    outputs: dict[int, list[int]] = {choice: [] for choice in range(3)}
    for step in range(60):
        logits = torch.zeros(3, V)
        logits[:, 7:11] = 12.0
        rows = [
            make_row(f"r{choice}", sampling, choice=choice, position=step, output_token_ids=list(output))
            for choice, output in outputs.items()
        ]
        for choice, ids in enumerate(sampler.sample(logits, metadata_of(rows)).token_ids.values()):
            outputs[choice] += ids
    for output in outputs.values():
        text = " ".join(map(str, ["", *output, ""]))
        assert " 8 " in text and " 10 " in text
        assert not any(word in text for word in (" 7 ", " 8 9 ", " 8 8 10 "))
    assert len({tuple(output) for output in outputs.values()}) == 3


def test_provided_and_unsupported_fields() -> None:
    both = {"drafts", "logits_processors"}
    assert PROVIDES == {"standard": SAMPLER_FIELDS - {"min_tokens"} | both, "greedy": both | {"grammar"}}
    assert unsupported_fields(SamplingParams(), PROVIDES["greedy"]) == ()
    asked = SamplingParams(temperature=0.5, top_p=0.9, logprobs=0, seed=3)
    assert unsupported_fields(asked, PROVIDES["greedy"]) == ("logprobs", "temperature", "top_p")
    assert unsupported_fields(asked, PROVIDES["standard"]) == ()
    assert unsupported_fields(SamplingParams(temperature=0.0, top_p=0.9), PROVIDES["greedy"]) == ()


def test_needs_history_names_what_overlap_would_change() -> None:
    assert not Standard.needs_history(SamplingParams(top_p=0.5, bad_words_token_ids=((1,),), logit_bias={1: 2.0}))
    assert Standard.needs_history(SamplingParams(bad_words_token_ids=((1, 2),)))
    assert Standard.needs_history(SamplingParams(presence_penalty=0.1))


class Writes:
    """A processor that sets a row of requests named in `values` to one number, and revives ids that are never sampled."""

    def __init__(self, values: dict[str, float]):
        self._values = values

    def state(self, row: SampledRow, params: object) -> str | None:
        return row.request_id if row.request_id[0] != "p" else None

    def apply(self, logits: torch.Tensor, rows: list[SampledRow], states: list[str]) -> None:
        for index, name in enumerate(states):
            logits[index, sorted(UNUSABLE)] = 90.0
            logits[index, :] += self._values.get(name, 0.0)


@pytest.mark.parametrize("cls", [Standard, Greedy])
def test_a_row_that_a_processor_spoils_names_it_and_others_do_not(cls: type) -> None:
    """Bad logits of the model, and masks that bar everything, are not the processor's fault."""
    model = spec_of(V, EOS, UNUSABLE)
    logits = make_logits(6, V, seed=3)
    logits[3, 5] = float("nan")
    greedy = SamplingParams(temperature=0.0)
    barred = greedy if cls is Greedy else SamplingParams(temperature=0.0, allowed_token_ids=())
    params = [greedy, greedy, greedy, greedy, barred, greedy]
    names = ["good", "nan", "masked", "raw", "barred", "plain"]
    rows = [make_row(name, p) for name, p in zip(names, params, strict=True)]
    chain = chain_of(Writes({"nan": float("nan"), "masked": float("-inf")}), "writes", quarantine_after=9)
    wanted = cls(cls.Settings(), SamplerContext(model)).sample(logits.clone(), metadata_of(rows))
    sampler = cls(cls.Settings(), SamplerContext(model, processors=chain))
    with pytest.raises(PluginError, match=r"logits_processors=writes \(plugin test"):  # whose row it is, shows alone
        sampler.sample(logits.clone(), metadata_of(rows))
    ids, errors = {}, {}
    for index, name in enumerate(names):
        try:
            found = sampler.sample(logits[index : index + 1].clone(), metadata_of(rows[index : index + 1]))
            ids.update(found.token_ids)
            errors.update(found.errors)
        except PluginError as error:
            errors[name] = str(error)
    kept = {"good", "plain"} | ({"barred"} if cls is Greedy else set())
    assert ids == {name: wanted.token_ids[name] for name in kept}
    assert errors.keys() == set(names) - kept
    assert {name for name, text in errors.items() if "logits_processors=writes (plugin test" in text} == {
        "nan",
        "masked",
    }
    assert "the model's logits hold NaN" in errors["raw"]
    assert [incident.failures for incident in chain.incidents()] == [1, 2]


def test_a_spoilt_row_that_no_draft_reaches_is_nobodys_fault() -> None:
    logits = torch.zeros(2, V)
    logits[0, 10] = 5.0
    rows = [make_row("a", draft_token_ids=ids, position=4 + len(ids)) for ids in ((), (99,))]
    rows = [*rows, make_row("b")]
    logits = torch.cat([logits, make_logits(1, V)])
    chain = chain_of(SpoilsBehindDrafts({}), "writes")
    found = Standard(Standard.Settings(), SamplerContext(spec_of(V), processors=chain)).sample(
        logits, metadata_of(rows)
    )
    assert found.token_ids["a"] == (10,) and not found.errors
    assert not chain.incidents()


class SpoilsBehindDrafts(Writes):
    def apply(self, logits: torch.Tensor, rows: list[SampledRow], states: list[str]) -> None:
        for index, row in enumerate(rows):
            if row.draft_token_ids:
                logits[index] = float("nan")


def test_log_probabilities_are_those_before_the_processors() -> None:
    model, logits = spec_of(V), make_logits(2, V)
    rows = [make_row(name, SamplingParams(temperature=0.0, logprobs=3)) for name in ("a", "plain")]
    chain = chain_of(Writes({"a": 40.0}), "writes")
    found = Standard(Standard.Settings(), SamplerContext(model, processors=chain)).sample(
        logits.clone(), metadata_of(rows)
    )
    for index, row in enumerate(rows):
        (given_,) = found.logprobs[row.request_id]
        wanted = ReferenceSampler(model).logprobs(logits[index].numpy(), given_.token_id, 3)
        np.testing.assert_allclose(given_.logprob, wanted.logprob, atol=1e-4)
