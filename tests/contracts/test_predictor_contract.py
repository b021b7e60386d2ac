"""The built-in predictors keep the contract of their group."""

from __future__ import annotations

import json

import pytest

from core.request import SamplingParams
from core.stages.predictor import MaxTokens, PredictorContext
from core.testing.fakes import make_request
from core.testing.predictor import PredictorContract
from plugins.predictors.learnt import Learnt
from plugins.predictors.oracle import Oracle


class TestMaxTokens(PredictorContract):
    component = MaxTokens

    def test_what_is_left_is_what_the_request_may_have(self) -> None:
        predictor = self.make_predictor()
        request = make_request("a", [1] * 100, params=SamplingParams(max_tokens=500), output_token_ids=[2] * 40)
        assert predictor.remaining(request) == 460.0
        near = make_request("b", [1] * 4000, params=SamplingParams(max_tokens=500), output_token_ids=[2] * 40)
        assert predictor.remaining(near) == 56.0  # the context ends first


class TestLearnt(PredictorContract):
    component = Learnt


class TestLearntInATinyTable(PredictorContract):
    component = Learnt
    settings = {"table_size": 16, "prior": 1.0}


class TestOracle(PredictorContract):
    component = Oracle


class TestOracleThatKnows(PredictorContract):
    component = Oracle

    @pytest.fixture(autouse=True)
    def _lengths(self, tmp_path):
        rows = [{"request_id": f"r{index}", "output_len": index * 20} for index in range(200)]
        (tmp_path / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.settings = {"path": str(tmp_path / "lengths.jsonl")}

    def make_predictor(self, max_model_len=4096):
        context = PredictorContext(max_model_len, {"r1": 7, "long": 50}.get)
        return self.make(context)
