"""The front half of a simulated engine: an arrival passes the real admission, and becomes a request whose length is known."""

from __future__ import annotations

import struct
import zlib
from typing import Final, cast

import msgspec

from core.front.load import LoadMeter
from core.outputs import StepStats
from core.request import EngineRequest, SamplingParams
from core.simulation.build import SimulatedRequest, Simulation
from core.simulation.records import Arrival
from core.stages.admission import Open
from core.stages.frontend import GenerateRequest
from core.stages.renderer import TokenPrompt

PARAMS: Final = SamplingParams()  # the model ends an output: predictors have something to learn
NO_PROMPT: Final = TokenPrompt([])  # admission is given the ids beside the request
BLOCK_KEY: Final = struct.Struct("<Iqq")


class SimulatedFront:
    """Admits, and knows the load: `observe` is told of each step and of an idle engine, `started` of each first token.

    `measures`: False where admission never looks at the load; then nobody need be told, and it is always that of an idle engine.
    """

    def __init__(self, simulation: Simulation):
        self._admission, self._clock, self._prompt = simulation.admission, simulation.clock, simulation.prompt
        self._block_size = simulation.cache.block_size
        self._too_long = min(
            simulation.max_model_len, simulation.cache.num_blocks * self._block_size
        )  # tokens of a prompt
        self.measures = type(simulation.admission) is not Open
        self._meter = LoadMeter()
        self._idle = self._meter.load()
        self.observe, self.started = self._meter.step, self._meter.started

    def admit(self, arrival: Arrival, row: int) -> SimulatedRequest:
        """Raises RequestError or OverloadedError, as admission does. At the time of arrival, whatever the clock says."""
        engine_time, self._clock.now = self._clock.now, arrival.time_s
        load = self._meter.load(arrival.tenant) if self.measures else self._idle
        try:
            self._admission.check_room(1, load)
            (message,) = self._admission.admit(_asked(arrival, row), self._shown(arrival), PARAMS, load)
        finally:
            self._clock.now = engine_time
        if arrival.num_prompt_tokens >= self._too_long:
            message = msgspec.structs.replace(message, prompt_token_ids=self._prompt(arrival.num_prompt_tokens))
        if self.measures:
            self._meter.add(message)
        return self._request(message, arrival, row)

    def _shown(self, arrival: Arrival) -> list[int]:
        """The prompt as admission sees it: nobody makes a list of ten million tokens for a request that cannot run."""
        count = arrival.num_prompt_tokens
        return self._prompt(count) if count < self._too_long else cast("list[int]", range(count))

    def ended(self, request: SimulatedRequest, served: bool) -> None:
        if self.measures:
            self._meter.ended(request.request_id, request.num_output_tokens if served else None)

    def _request(self, message: EngineRequest, arrival: Arrival, row: int) -> SimulatedRequest:
        request = SimulatedRequest.from_engine_request(message)
        assert isinstance(request, SimulatedRequest)
        request.row = row
        request.left = min(arrival.num_output_tokens, message.params.max_tokens)
        if arrival.block_hashes:
            request.block_hashes.extend(block_hashes(arrival, row, self._block_size))
        return request


def idle(num_blocks: int) -> StepStats:
    """What an engine without requests says of itself."""
    return StepStats(kv_blocks_free=num_blocks, kv_blocks_total=num_blocks)


def _asked(arrival: Arrival, row: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(row),
        prompt=NO_PROMPT,
        params=PARAMS,
        max_tokens=arrival.max_tokens or arrival.num_output_tokens,
        tenant=arrival.tenant,
        priority=arrival.priority,
        ttl=arrival.ttl_s,
    )


def block_hashes(arrival: Arrival, row: int, block_size: int) -> list[bytes]:
    """One per full KV block of the prompt: equal where tenant and content are, up to the end of the block.

    What the arrival's own hashes do not cover is like nothing else.
    """
    salt, known, per = zlib.crc32(arrival.tenant.encode()), arrival.block_hashes, arrival.hash_block_size
    count = arrival.num_prompt_tokens // block_size
    covered = min(count, len(known) * per // block_size)
    pack = BLOCK_KEY.pack
    hashes = [pack(salt, known[((index + 1) * block_size - 1) // per], index) for index in range(covered)]
    return hashes + [pack(salt, -1 - row, index) for index in range(covered, count)]
