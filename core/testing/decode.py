"""What every decode must do, as tests::

    class TestMine(DecodeContract):
        component = Mine

Whether drafts are good is not asked: wrong ones cost time and change no output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from core.request import Request
from core.stages.decode import Decode, DecodeContext, num_drafts_left
from core.testing.contract import Contract
from core.testing.fake_loop import assert_complete, fake_engine, random_requests
from core.testing.fakes import Limits, make_request, snapshot

MAX_MODEL_LEN = 128


def repetitive_requests(count: int = 8) -> list[Request]:
    """Texts that repeat themselves, which is what drafts are taken from; some of them are nearly full."""
    requests = []
    for index in range(count):
        pattern = [10 + index, 20 + index, 30 + index, 40 + index]
        prompt, output = pattern * (3 + index * 4), pattern[: index % 4] if index % 2 else pattern * 2
        requests.append(make_request(f"r{index}", prompt, len(output) + 1 + index % 4, output_token_ids=output))
    full = make_request("nearly full", [5, 6] * (MAX_MODEL_LEN // 2 - 1), 50, output_token_ids=[5])
    return [*requests, full]


def one_more(request: Request, index: int) -> Request:
    """The same a step later."""
    output = [*request.output_token_ids, request.prompt_token_ids[index]]
    return make_request(request.request_id, request.prompt_token_ids, params=request.params, output_token_ids=output)


class DecodeContract(Contract):
    def make_decode(self, max_model_len: int = MAX_MODEL_LEN) -> Decode:
        decode: Decode = self.make(DecodeContext(max_model_len))
        return decode

    def propose_in_turn(self, decode: Decode, requests: Sequence[Request]) -> None:
        """Three steps, with a token more in each, all checked."""
        for step in range(3):
            known = {request.request_id: request for request in requests}
            drafts = decode.propose(list(requests))
            strangers = sorted(set(drafts) - set(known))
            assert not strangers, f"drafts for {strangers}, which were not asked about"
            for request_id, ids in drafts.items():
                good = isinstance(ids, tuple) and all(type(token_id) is int and token_id >= 0 for token_id in ids)
                assert good, f"drafts {ids!r} are not a tuple of token ids"
                left = num_drafts_left(known[request_id], MAX_MODEL_LEN)
                assert len(ids) <= left, f"{len(ids)} drafts for a request that has room for {left}"
            requests = [one_more(request, step) for request in requests if num_drafts_left(request, MAX_MODEL_LEN)]

    def test_drafts_are_ids_for_requests_that_were_asked_about_and_have_room(self) -> None:
        self.propose_in_turn(self.make_decode(), repetitive_requests())

    def test_requests_may_come_and_go(self) -> None:
        decode = self.make_decode()
        self.propose_in_turn(decode, repetitive_requests(4))
        self.propose_in_turn(decode, repetitive_requests()[::-1])
        assert not decode.propose([]), "drafts for nobody"

    def test_requests_are_left_as_they_are(self) -> None:
        requests = repetitive_requests()
        before = [snapshot(request) for request in requests]
        self.make_decode().propose(requests)
        assert [snapshot(request) for request in requests] == before

    @pytest.mark.parametrize("num_in_flight", [0, 1], ids=["synchronous", "overlap"])
    @pytest.mark.parametrize("num_blocks", [9, 60])
    def test_outputs_are_those_of_a_solo_run(self, num_blocks: int, num_in_flight: int) -> None:
        """Drafts are verified, so they change no output, whatever they are; also when a request is preempted."""
        limits, rng = Limits(), random.Random(num_blocks)
        decode = self.make_decode(limits.max_model_len)
        engine = fake_engine(num_blocks, limits, decode=decode, num_in_flight=num_in_flight)
        drawn = random_requests(rng, 16)
        prompts = [(list(request.prompt_token_ids[:5]) * 12)[: 20 + index] for index, request in enumerate(drawn)]
        requests = [
            make_request(r.request_id, prompt, params=r.params) for r, prompt in zip(drawn, prompts, strict=True)
        ]
        for request in requests:
            engine.add(request)
            engine.step()
        engine.abort(requests[3].request_id)
        engine.drain()
        assert_complete(engine, [request for request in requests if request is not requests[3]])
