"""What every sampler must do, as tests::

    class TestMine(SamplerContract):
        component = Mine
        provides = frozenset({"temperature", "logprobs"})  # as in its Component

Tests of a parameter run where `provides` names it. Random results are judged by their frequencies and
by reproducibility, so a sampler may use any random stream.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from core.batch import PromptRows, SampledRow, SamplerOutput, SamplingMetadata
from core.model.spec import ModelSpec
from core.request import SamplingParams
from core.stages.logits_processor import NoProcessors
from core.stages.sampler import ArgmaxSampler, Sampler, SamplerContext
from core.testing.sampler_grammar import SamplerGrammarChecks
from core.testing.sampler_reference import ReferenceSampler, spec_of
from core.testing.sampler_rows import EOS as EOS
from core.testing.sampler_rows import GREEDY as GREEDY
from core.testing.sampler_rows import UNUSABLE as UNUSABLE
from core.testing.sampler_rows import VOCAB as VOCAB
from core.testing.sampler_rows import make_logits as make_logits
from core.testing.sampler_rows import make_row as make_row
from core.testing.sampler_rows import metadata_of as metadata_of

SHAPES = {
    "temperature": SamplingParams(temperature=1.3),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all of them": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
}
EDITS = {
    "allowed_token_ids": SamplingParams(temperature=0.0, allowed_token_ids=(3, 5, 250)),
    "bad_words": SamplingParams(temperature=0.0, bad_words=("x",), bad_words_token_ids=((42,), (2, 43), (9, 2, 44))),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={17: 30.0, 42: -100.0}),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(42,)),
    "repetition_penalty": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "frequency_penalty": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "presence_penalty": SamplingParams(temperature=0.0, presence_penalty=2.0),
}


def assert_frequencies(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> None:
    """Pearson's chi-square at about one false alarm in a million; cells expected under 5 times are joined."""
    assert counts[probabilities <= 0].sum() == 0, "a token with probability 0 was drawn"
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum()).astype(np.float64)
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(len(expected) - 1, 1)
    spread = 2.0 / (9.0 * freedom)  # Wilson and Hilferty 1931
    limit = freedom * (1.0 - spread + 4.75 * math.sqrt(spread)) ** 3
    assert statistic <= limit, f"chi-square {statistic:.1f} over {limit:.1f} for {freedom} degrees of freedom"


class Boost(NoProcessors):
    """A chain that makes one id the likeliest of some requests."""

    def __init__(self, request_ids: Collection[str], token_id: int):
        self._request_ids = request_ids
        self._token_id = token_id
        self.forgotten: list[str] = []

    def touches(self, rows: Sequence[SampledRow]) -> Sequence[int]:
        return [index for index, row in enumerate(rows) if row.request_id in self._request_ids]

    def apply(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
        for index in self.touches(rows):
            logits[index, self._token_id] += 50.0

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids


class SamplerContract(SamplerGrammarChecks):
    def make_sampler(self, model: ModelSpec) -> Sampler:
        sampler: Sampler = self.make(SamplerContext(model))
        return sampler

    def build(self, *needed: str, vocab_size: int = VOCAB) -> tuple[Sampler, ModelSpec]:
        self.needs(*needed)
        unusable = UNUSABLE if vocab_size == VOCAB else frozenset[int]()
        model = spec_of(vocab_size, EOS, unusable)
        return self.make_sampler(model), model

    def compare(
        self, sampler: Sampler, model: ModelSpec, logits: torch.Tensor, rows: Sequence[SampledRow]
    ) -> SamplerOutput:
        """The token ids of greedy rows are the reference's."""
        wanted = ReferenceSampler(model).sample(logits.numpy(), metadata_of(rows))
        found = sampler.sample(logits.clone(), metadata_of(rows))
        assert dict(found.token_ids) == dict(wanted.token_ids)
        assert found.errors.keys() == wanted.errors.keys()
        return found

    @pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 128, VOCAB, 4096])
    def test_greedy_is_argmax(self, vocab_size: int) -> None:
        sampler, model = self.build(vocab_size=vocab_size)
        self.compare(sampler, model, make_logits(6, vocab_size), [make_row(f"r{i}") for i in range(6)])

    def test_ties_go_to_the_lowest_id(self) -> None:
        sampler, _ = self.build()
        logits = torch.zeros(3, VOCAB)
        logits[1, [280, 90, 91]] = 2.0
        logits[2] = torch.where(torch.arange(VOCAB) % 2 == 0, -0.0, 0.0)
        found = sampler.sample(logits, metadata_of([make_row("a"), make_row("b"), make_row("c")]))
        assert dict(found.token_ids) == {"a": (0,), "b": (90,), "c": (0,)}

    def test_unusable_ids_are_never_sampled(self) -> None:
        sampler, _ = self.build()
        logits = make_logits(2)
        logits[:, sorted(UNUSABLE)] = 50.0
        found = sampler.sample(logits, metadata_of([make_row("a"), make_row("b", SamplingParams())]))
        assert not UNUSABLE.intersection(*found.token_ids.values())

    def test_sampled_rows_index_the_logits(self) -> None:
        sampler, _ = self.build()
        logits = make_logits(6)
        best = logits[:, :298].argmax(-1).tolist()
        metadata = SamplingMetadata((4, 1), (make_row("a"), make_row("b")))
        assert dict(sampler.sample(logits, metadata).token_ids) == {"a": (best[4],), "b": (best[1],)}

    def test_nothing_to_sample(self) -> None:
        sampler, _ = self.build()
        assert not sampler.sample(make_logits(2), SamplingMetadata((), ())).token_ids
        sampler.forget(["unknown"])

    def test_a_bad_row_fails_its_request_alone(self) -> None:
        sampler, model = self.build()
        logits = make_logits(6)
        logits[0, 100] = float("nan")
        logits[2] = float("-inf")
        logits[4] = float("inf")
        params = [GREEDY, GREEDY, GREEDY, GREEDY, SamplingParams(), GREEDY]
        found = self.compare(sampler, model, logits, [make_row(f"r{i}", p) for i, p in enumerate(params)])
        assert found.errors.keys() == {"r0", "r2", "r4"}
        assert all(found.errors.values())

    def test_drafts_are_accepted_up_to_the_first_difference(self) -> None:
        sampler, _ = self.build("drafts")
        logits = torch.zeros(8, VOCAB)
        for row, token_id in enumerate([10, 11, 12, 13, 20, 21, 30, 31]):
            logits[row, token_id] = 5.0
        logits[3] = float("nan")  # not reached: the draft before it is wrong
        logits[7] = float("nan")  # reached
        drafts = {"a": (10, 11, 99), "b": (20,), "c": (30,)}
        rows = [
            make_row(name, draft_token_ids=ids[:count], position=4 + count)
            for name, ids in drafts.items()
            for count in range(len(ids) + 1)
        ]
        found = sampler.sample(logits, metadata_of(rows))
        assert dict(found.token_ids) == {"a": (10, 11, 12), "b": (20, 21)}
        assert found.errors.keys() == {"c"}

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        sampler, model = self.build()
        fields = {"logprobs": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
        extra = {name: value for name, value in fields.items() if name in self.provides}
        shapes = list(SHAPES.values()) if "temperature" in self.provides else []
        params = [GREEDY, *shapes, SamplingParams(temperature=0.0, **extra), SamplingParams(**extra)]  # type: ignore[arg-type]
        logits = make_logits(3 * len(params), seed=5)
        rows = [make_row(f"r{i}", params[i % len(params)], seed=i) for i in range(len(logits))]
        together = sampler.sample(logits.clone(), metadata_of(rows))
        backwards = self.make_sampler(model).sample(logits.flip(0).clone(), metadata_of(rows[::-1]))
        for index, row in enumerate(rows):
            alone = self.make_sampler(model).sample(logits[index : index + 1].clone(), metadata_of([row]))
            name = row.request_id
            assert alone.token_ids[name] == together.token_ids[name] == backwards.token_ids[name]
            assert alone.logprobs.get(name) == together.logprobs.get(name) == backwards.logprobs.get(name)

    @pytest.mark.parametrize("field", EDITS)
    def test_masks_and_penalties(self, field: str) -> None:
        sampler, model = self.build(field)
        logits = make_logits(6, seed=8)
        logits[:, [2, 5, 9, 42, 43, 44]] += 8.0
        rows = [make_row(f"r{i}", EDITS[field] if i % 2 else GREEDY) for i in range(6)]
        self.compare(sampler, model, logits, rows)
        longer = [
            make_row(f"r{i}", row.params, output_token_ids=[5, 5, 9, 2, 42], position=5) for i, row in enumerate(rows)
        ]
        self.compare(sampler, model, logits, longer)
        sampler.forget([row.request_id for row in rows])
        self.compare(sampler, model, logits, rows)

    def test_everything_masked_is_an_error(self) -> None:
        sampler, model = self.build("allowed_token_ids", "logit_bias")
        params = [SamplingParams(allowed_token_ids=()), GREEDY, SamplingParams(allowed_token_ids=(299,))]
        found = self.compare(sampler, model, make_logits(3), [make_row(f"r{i}", p) for i, p in enumerate(params)])
        assert found.errors.keys() == {"r0", "r2"}

    @pytest.mark.parametrize("shape", SHAPES)
    def test_frequencies(self, shape: str) -> None:
        sampler, model = self.build("temperature", *(["top_k", "top_p", "min_p"] if shape != "temperature" else []))
        logits, count = make_logits(1, seed=3), 2000
        rows = [
            make_row(f"r{i}", SHAPES[shape], seed=i // 20 - 50, choice=i % 4, position=i // 4 % 5) for i in range(count)
        ]
        found = sampler.sample(logits.expand(count, -1).clone(), metadata_of(rows))
        counts = np.bincount([ids[0] for ids in found.token_ids.values()], minlength=VOCAB)
        assert_frequencies(counts, ReferenceSampler(model).distribution(logits[0].numpy(), rows[0]))

    def test_draws_follow_seed_choice_and_position(self) -> None:
        sampler, model = self.build("temperature")
        logits = make_logits(1).expand(40, -1) * 0.1
        params = SamplingParams()

        def texts(sampler: Sampler, seed: int, choice: int) -> tuple[int, ...]:
            rows = [make_row(f"r{i}", params, seed=seed, choice=choice, position=i) for i in range(40)]
            return tuple(ids[0] for ids in sampler.sample(logits.clone(), metadata_of(rows)).token_ids.values())

        first = texts(sampler, 7, 0)
        assert texts(sampler, 7, 0) == first == texts(self.make_sampler(model), 7, 0)
        seeds = [-(2**63), -1, 0, 1, 8, 2**63 - 1]
        others = [texts(sampler, seed, 0) for seed in seeds] + [texts(sampler, 7, choice) for choice in (1, 2, 3)]
        assert len({first, *others}) == 1 + len(others)
        assert len(set(first)) > 10

    @pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 2e-5}])
    def test_edges_that_leave_one_token(self, params: dict[str, float]) -> None:
        sampler, _ = self.build("temperature", *params)
        logits = make_logits(20)
        rows = [make_row(f"r{i}", SamplingParams(**params), seed=i) for i in range(20)]  # type: ignore[arg-type]
        found = sampler.sample(logits.clone(), metadata_of(rows))
        assert [ids[0] for ids in found.token_ids.values()] == logits[:, :298].argmax(-1).tolist()

    @pytest.mark.parametrize("edits", [{}, {"allowed_token_ids": (3, 4)}, {"top_k": 1}, {"min_p": 1.0}])
    def test_logprobs_are_the_models_own_and_finite(self, edits: dict[str, object]) -> None:
        sampler, model = self.build("logprobs", "temperature", *edits)
        logits = make_logits(4, seed=2)
        logits[1, 50:250] = float("-inf")
        logits[2, 60:] = logits[2, 60]
        rows = [make_row(f"r{i}", SamplingParams(logprobs=i * 5, **edits), seed=i) for i in range(4)]  # type: ignore[arg-type]
        found = sampler.sample(logits.clone(), metadata_of(rows))
        for index, row in enumerate(rows):
            (token,), (given,) = found.token_ids[row.request_id], found.logprobs[row.request_id]
            wanted = ReferenceSampler(model).logprobs(logits[index].numpy(), token, index * 5)
            assert (given.token_id, given.rank) == (token, wanted.rank)
            assert [i for i, _ in given.top] == [i for i, _ in wanted.top]
            numbers = [given.logprob, *(value for _, value in given.top)]
            assert np.isfinite(numbers).all()
            np.testing.assert_allclose(numbers, [wanted.logprob, *(value for _, value in wanted.top)], atol=1e-4)

    def test_prompt_logprobs(self) -> None:
        sampler, model = self.build("prompt_logprobs")
        logits = make_logits(9, seed=4)
        logits[3, 40] = float("-inf")
        logits[8, 0] = float("nan")
        parts = [
            PromptRows("p", (3, 1, 5), (40, 41, 299), 4),
            PromptRows("q", (7,), (0,), 0),
            PromptRows("bad", (8,), (1,), 1),
        ]
        metadata = SamplingMetadata((0,), (make_row("p", EDITS.get("repetition_penalty", GREEDY)),), tuple(parts))
        found = sampler.sample(logits.clone(), metadata)
        self._check_prompt_rows(model, logits, parts[:2], found)
        assert found.errors.keys() == {"bad"}
        assert "p" in found.token_ids

    def _check_prompt_rows(
        self, model: ModelSpec, logits: torch.Tensor, parts: Sequence[PromptRows], found: SamplerOutput
    ) -> None:
        for part in parts:
            for given, row, target in zip(
                found.prompt_logprobs[part.request_id], part.rows, part.target_ids, strict=True
            ):
                wanted = ReferenceSampler(model).logprobs(logits[row].numpy(), target, part.num_logprobs)
                assert (given.token_id, given.rank) == (target, wanted.rank)
                assert [i for i, _ in given.top] == [i for i, _ in wanted.top]
                assert given.logprob == pytest.approx(wanted.logprob, abs=1e-4)

    def test_processors_edit_their_rows_before_the_draw(self) -> None:
        model = spec_of(VOCAB, EOS, UNUSABLE)
        chain = Boost({"a", "c"}, token_id=77)
        self.needs("logits_processors")
        sampler: Sampler = self.make(SamplerContext(model, processors=chain))
        logits = make_logits(4, seed=6)
        best = logits[:, :298].argmax(-1).tolist()
        params = SamplingParams(temperature=0.0, logprobs=2) if "logprobs" in self.provides else GREEDY
        rows = [make_row(name, params) for name in "abcd"]
        found = sampler.sample(logits.clone(), metadata_of(rows))
        assert dict(found.token_ids) == {"a": (77,), "b": (best[1],), "c": (77,), "d": (best[3],)}
        for index, row in enumerate(rows if "logprobs" in self.provides else ()):
            wanted = ReferenceSampler(model).logprobs(logits[index].numpy(), found.token_ids[row.request_id][0], 2)
            (given,) = found.logprobs[row.request_id]
            assert given.logprob == pytest.approx(wanted.logprob, abs=1e-4), "log-probabilities are the model's own"
        sampler.forget(["a", "b"])
        assert not chain.forgotten, "the framework tells the processors which requests ended"

    @pytest.mark.parametrize("blank", [True, False])
    @pytest.mark.parametrize("field", ["", *EDITS, *SHAPES, "logprobs", "a processor", "prompt", "a draft"])
    def test_where_the_argmax_is_enough_it_is_the_whole_answer(self, field: str, blank: bool) -> None:
        """`takes_argmax` is a promise of what `sample` gives; a sampler may promise less than it could."""
        model = spec_of(VOCAB, EOS, UNUSABLE if blank else frozenset())
        chain = Boost({"r1"}, token_id=77) if field == "a processor" else NoProcessors()
        sampler: Sampler = self.make(SamplerContext(model, processors=chain))
        if not isinstance(sampler, ArgmaxSampler):
            pytest.skip("it has no takes_argmax")
        if field in (*EDITS, "logprobs") or field in SHAPES:
            self.needs(*({"temperature"} if field in SHAPES else {field}))
        given = {**EDITS, **SHAPES, "logprobs": SamplingParams(temperature=0.0, logprobs=0)}.get(field, GREEDY)
        rows = [make_row("r0"), make_row("r1", given, draft_token_ids=[3] if field == "a draft" else [])]
        prompt = (PromptRows("r1", (2,), (7,), 0),) if field == "prompt" else ()
        metadata = SamplingMetadata((0, 1), tuple(rows), prompt)
        logits = make_logits(3, seed=5)
        logits[:, [298, 299]] = 40.0  # unusable ids
        found = sampler.sample(logits.clone(), metadata)
        if sampler.takes_argmax(metadata):
            ids = logits[:2].argmax(-1).tolist()
            assert found == SamplerOutput({"r0": (ids[0],), "r1": (ids[1],)}), f"{field}: it says more than the argmax"

    def test_rows_are_left_as_they_are(self) -> None:
        """Their lists are the requests' own."""
        sampler, _ = self.build()
        rows = [make_row(f"r{index}") for index in range(3)]
        before = [(list(row.prompt_token_ids), list(row.output_token_ids)) for row in rows]
        sampler.sample(make_logits(3), metadata_of(rows))
        assert [(row.prompt_token_ids, row.output_token_ids) for row in rows] == before
