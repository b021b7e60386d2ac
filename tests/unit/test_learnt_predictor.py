"""`predictor=learnt`: it ranks requests much better than their bounds do, and knows that what goes on goes on."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest

from core.request import FinishReason, Request, SamplingParams
from core.stages.predictor import MaxTokens, Predictor, PredictorContext
from core.testing.fakes import make_request
from plugins.predictors.features import Kind, features_of
from plugins.predictors.learnt import Learnt
from plugins.predictors.regression import PRIOR_VARIANCES, Regression
from plugins.predictors.spread import Spread

CONTEXT = PredictorContext(8192)
APPLICATIONS = ((90, 3, 0.3, 2048), (300, 120, 0.8, 2048), (1400, 50, 1.0, 256), (700, 400, 0.5, 4096))
"""Median tokens of prompt and output, spread of log output, and the max_tokens that its clients ask for."""


def learnt(**settings: object) -> Learnt:
    return Learnt(Learnt.Settings.model_validate(settings), CONTEXT)


def drawn(rng: random.Random, number: int) -> tuple[Request, int]:
    """A request, and how long its output gets. What is long shows in nothing but the prompt: application, and how it ends."""
    application = rng.randrange(len(APPLICATIONS))
    prompt, output, spread, max_tokens = APPLICATIONS[application]
    is_brief = rng.random() < 0.3  # "in one sentence, please"
    middle = [rng.randrange(1000, 50_000) for _ in range(round(prompt * math.exp(rng.gauss(0, 0.4))))]
    ids = [application * 100 + place for place in range(20)] + middle + [7 if is_brief else 8, 1, 2, 3]
    length = min(max(round(output * math.exp(rng.gauss(-1.2 * is_brief, spread))), 1), max_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    return make_request(f"r{number}", ids, params=params, tenant=f"t{application % 2}"), length


def end(request: Request, length: int) -> Request:
    request.append_output([5] * (length - request.num_output_tokens))
    request.finish_reason = FinishReason.LENGTH if length >= request.params.max_tokens else FinishReason.STOP
    return request


def kendall(said: list[float], true: list[float]) -> float:
    """Pairs in the right order less those in the wrong one, of all: 1 is perfect, 0 is chance; a tie counts as neither."""
    pairs = list(combinations(zip(said, true, strict=True), 2))
    signs = [(a - c) * (b - d) for (a, b), (c, d) in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)


def rank_quality(predictor: Predictor, num_past: int) -> float:
    rng = random.Random(11)
    for number in range(num_past):
        predictor.observe(end(*drawn(rng, number)))
    asked = [drawn(rng, num_past + number) for number in range(300)]
    return kendall([predictor.remaining(request) for request, _ in asked], [length for _, length in asked])


def test_it_ranks_far_better_than_bounds_once_it_has_seen_a_few_hundred():
    bounds = rank_quality(MaxTokens(MaxTokens.Settings(), CONTEXT), 0)
    assert bounds < 0.3
    assert rank_quality(learnt(), 50) > bounds + 0.15
    assert rank_quality(learnt(), 500) > bounds + 0.3
    assert rank_quality(learnt(), 3000) > 0.6


def test_it_predicts_the_mean_of_each_application():
    predictor, rng = learnt(), random.Random(2)
    lengths: dict[int, list[int]] = {}
    for number in range(3000):
        request, length = drawn(rng, number)
        lengths.setdefault(request.prompt_token_ids[0] // 100, []).append(length)
        predictor.observe(end(request, length))
    said: dict[int, list[float]] = {}
    for number in range(400):
        request, _ = drawn(rng, number)
        said.setdefault(request.prompt_token_ids[0] // 100, []).append(predictor.remaining(request))
    for application, true in lengths.items():
        mean, expected = sum(said[application]) / len(said[application]), sum(true) / len(true)
        assert 0.5 * expected < mean < 2.0 * expected + 3, (application, mean, expected)


def test_what_goes_on_is_expected_to_go_on():
    """Of two kinds of output that no feature tells apart, one that is past the short kind is of the long one."""
    predictor = learnt()
    for number in range(600):
        request = make_request(f"r{number}", [1] * 30, params=SamplingParams(max_tokens=4096))
        predictor.observe(end(request, 400 if number % 4 == 0 else 10))
    request = make_request("asked", [1] * 30, params=SamplingParams(max_tokens=4096))
    first = predictor.remaining(request)
    request.append_output([5] * 40)
    later = predictor.remaining(request)
    request.append_output([5] * 300)
    assert 50 < first < 250  # 107 is the mean
    assert later > 1.3 * first and 200 < later < 600  # not the mean less 40: 360 are left
    assert predictor.remaining(request) < later / 2


def test_outputs_that_were_cut_off_are_taken_for_longer_ones():
    """Nobody ends by itself before 100, where half of all are cut."""
    short, open_ended = SamplingParams(max_tokens=100), SamplingParams(max_tokens=4096)
    predictor = learnt()
    for number in range(400):
        params, length = (short, 100) if number % 2 else (open_ended, 300)
        predictor.observe(end(make_request(f"r{number}", [1] * 30, params=params), length))
    asked = make_request("a", [1] * 30, params=open_ended)
    assert 200 < predictor.remaining(asked) < 450
    assert predictor.remaining(make_request("b", [1] * 30, params=short)) == 100.0


def test_a_request_that_only_its_length_ends_is_known_at_once_and_teaches_nothing():
    predictor, params = learnt(), SamplingParams(max_tokens=700, ignore_eos=True)
    fixed = make_request("a", [1] * 30, params=params, output_token_ids=[2] * 10)
    assert predictor.remaining(fixed) == 690.0
    before = predictor.remaining(make_request("b", [1] * 30, params=SamplingParams(max_tokens=4096)))
    for _ in range(50):
        predictor.observe(end(make_request("c", [1] * 30, params=params), 700))
    assert predictor.remaining(make_request("b", [1] * 30, params=SamplingParams(max_tokens=4096))) == before


def test_min_tokens_is_kept():
    predictor = learnt()
    for number in range(100):
        predictor.observe(end(make_request(f"r{number}", [1], params=SamplingParams(max_tokens=50)), 1))
    asked = make_request("a", [1], params=SamplingParams(max_tokens=50, min_tokens=20), output_token_ids=[2] * 5)
    assert predictor.remaining(asked) == 15.0


def test_before_anything_has_ended_the_prior_is_expected():
    asked = make_request("a", [1] * 10, params=SamplingParams(max_tokens=4096))
    assert learnt(prior=200.0).remaining(asked) == pytest.approx(200, rel=0.1)
    assert learnt(prior=200.0).remaining(make_request("b", [1], 16, params=SamplingParams(max_tokens=16))) == 16.0


def test_it_follows_traffic_that_changes():
    predictor, params = learnt(), SamplingParams(max_tokens=4096)
    for length in (20, 500):
        for number in range(400):
            predictor.observe(end(make_request(f"r{number}", [1] * 30, params=params), length))
        assert predictor.remaining(make_request("a", [1] * 30, params=params)) == pytest.approx(length, rel=0.5)


def test_features_are_few_and_bounded_whatever_the_prompt():
    for length in (0, 1, 15, 16, 17, 5000):
        found = features_of(make_request("a", [2**40 + index for index in range(length)], tenant="\udc80"))
        assert len(found) <= 23 and len(set(found)) == len(found)
        assert {kind for kind, _ in found} >= set(Kind) - {Kind.TAIL_TOKEN}
        assert all(1 <= key < 2**32 for _, key in found)
    assert len(PRIOR_VARIANCES) == len(Kind)


def test_a_key_never_reads_what_was_learnt_of_another_in_its_place():
    regression = Regression(size=16, first=1.0)
    regression.update([(0, 3)], 2.0)
    assert regression.predict([(0, 3)]) > 2.0
    assert regression.predict([(0, 3 + 16)]) == 1.0
    regression.update([(0, 3 + 16)], -2.0)
    assert regression.predict([(0, 3 + 16)]) < 0.0
    assert regression.predict([(0, 3)]) == 1.0  # forgotten


def test_a_weight_that_was_seen_often_explains_and_one_that_is_new_does_not():
    regression = Regression(size=64, first=0.0)
    for number in range(200):
        features = [(1, 1 + number % 2), (2, 1), (6, 10 + number % 50)]
        regression.update(features, (2.0 if number % 2 else -2.0) - regression.predict(features))
    assert regression.predict([(1, 2), (2, 1)]) > 1.2
    assert regression.predict([(1, 1), (2, 1)]) < -1.2


def left_by_counting(residuals: list[float], prediction: float, num_tokens: int) -> float:
    """The slow twin: the mean of the outputs that are longer, less what there is."""
    longer = [size for one in residuals if (size := math.exp(prediction + one)) > 1 + num_tokens]
    return sum(longer) / len(longer) - 1 - num_tokens


@pytest.mark.parametrize("num_tokens", [0, 5, 20, 60, 150, 400])
def test_what_is_left_is_the_mean_of_those_that_go_on(num_tokens):
    rng, spread = random.Random(3), Spread()
    residuals = [min(max(rng.gauss(0.1, 0.9), -4.9), 4.9) for _ in range(1600)]
    for residual in residuals:
        spread.add(residual, is_cut=False)
    prediction = math.log(80)
    expected = left_by_counting(residuals, prediction, num_tokens)
    assert spread.left(prediction, num_tokens) == pytest.approx(expected, rel=0.15, abs=3)


def test_what_is_left_is_never_negative_and_grows_past_all_that_was_seen():
    spread = Spread()
    for _ in range(500):
        spread.add(0.0, is_cut=False)
    left = [spread.left(math.log(50), num_tokens) for num_tokens in (0, 49, 60, 1000, 10_000, 10**6)]
    assert all(one >= 0 for one in left)
    assert left[0] > left[1] and left[3] < left[4] < left[5]
