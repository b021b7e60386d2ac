"""Frames: what goes in comes out, and nothing else comes out (P10, F20)."""

from __future__ import annotations

import math
import resource
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import wire
from core.batch import TokenLogprobs
from core.outputs import PluginIncident, StepOutput, StepStats, TokenDelta
from core.request import EngineRequest, FinishReason, RepetitionDetection, SamplingParams
from core.wire import (
    MAX_FRAME_BYTES,
    Abort,
    Add,
    EngineInfo,
    FrameTooLargeError,
    Heartbeat,
    Hello,
    Loading,
    Output,
    Ready,
    Reply,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    Stopped,
    WireError,
    decode,
    encode,
    output_frames,
)

ids = st.integers(0, 2**31)
number = st.floats(allow_nan=False, allow_infinity=True)
word = st.text(max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | number | word | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(word, inner, max_size=3),
    max_leaves=8,
)
params = st.builds(
    SamplingParams,
    max_tokens=ids,
    temperature=number,
    stop=st.lists(word, max_size=3).map(tuple),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    seed=st.none() | ids,
    logit_bias=st.dictionaries(ids, number, max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(ids, max_size=2).map(tuple), max_size=2).map(tuple),
    repetition_detection=st.none() | st.builds(RepetitionDetection, max_pattern_size=ids),
)
requests = st.builds(
    EngineRequest,
    request_id=word,
    prompt_token_ids=st.lists(ids, max_size=8),
    params=params,
    seed=st.integers(0, 2**64 - 1),
    choice=ids,
    priority=st.integers(-(2**31), 2**31),
    tenant=word,
    arrival_time=number,
)
logprobs = st.builds(
    TokenLogprobs,
    token_id=ids,
    logprob=number,
    rank=ids,
    top=st.lists(st.tuples(ids, number), max_size=3),
)
deltas = st.builds(
    TokenDelta,
    request_id=word,
    token_ids=st.lists(ids, max_size=5),
    logprobs=st.lists(logprobs, max_size=2),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | ids | word,
    error=st.none() | word,
    scheduled_time=st.none() | number,
)
outputs = st.builds(
    StepOutput, deltas=st.lists(deltas, max_size=4), stats=st.builds(StepStats, step=ids, running=ids, forward_s=number)
)
infos = st.builds(
    EngineInfo,
    model_name=word,
    max_model_len=ids,
    num_kv_blocks=ids,
    block_size=ids,
    dtype=word,
    device=word,
    plugins=st.lists(word, max_size=3),
)
messages = st.one_of(
    st.builds(Hello, version=word, settings=word, plugins=st.none() | st.lists(word, max_size=3)),
    st.builds(Add, requests=st.lists(requests, max_size=3)),
    st.builds(Abort, request_ids=st.lists(word, max_size=3)),
    st.builds(ResetPrefixCache, call_id=ids),
    st.builds(Shutdown, drain_s=number),
    st.builds(Loading, what=word, done=ids, total=ids),
    st.builds(Ready, info=infos),
    st.builds(StartFailed, message=word, error=st.sampled_from(["ConfigError", "PluginError"])),
    st.builds(Output, sequence=ids, output=outputs, more=st.booleans()),
    st.builds(Heartbeat, loop_time=number, step=ids, dropped=ids),
    st.builds(Reply, call_id=ids, ok=st.booleans()),
    st.builds(Stopped, reason=word),
)


@settings(max_examples=300, deadline=None)
@given(messages)
def test_a_message_survives_the_wire(message: wire.AnyMessage) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda body: b"\x01" + body))
def test_any_bytes_are_a_message_or_a_wire_error(frame: bytes) -> None:
    try:
        message = decode(frame)
    except WireError:
        return
    assert isinstance(message, wire.AnyMessage)


@settings(max_examples=300, deadline=None)
@given(messages, st.data())
def test_a_damaged_frame_is_a_message_or_a_wire_error(message: wire.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    try:
        assert isinstance(decode(damaged), wire.AnyMessage)
    except WireError:
        pass


def with_version(body: bytes) -> bytes:
    return bytes([wire.WIRE_VERSION]) + body


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x00" + encode(Stopped(reason="x"))[1:],
        b"\x02" + encode(Stopped(reason="x"))[1:],
        encode(Stopped(reason="x")) + b"\x00",
        encode(Stopped(reason="x"))[:-1],
        with_version(msgspec.msgpack.encode({"type": "Nothing"})),
        with_version(msgspec.msgpack.encode({"reason": "no type"})),
        with_version(msgspec.msgpack.encode({"type": "Stopped", "reason": "x", "unknown": 1})),
        with_version(msgspec.msgpack.encode({"type": "Stopped", "reason": 1})),
        with_version(msgspec.msgpack.encode({"type": "Output", "sequence": 1, "output": {"unknown": 1}})),
        with_version(b"\x91" * 100_000),
        with_version(b"\xdd\xff\xff\xff\xff"),
        with_version(b"\xdf\xff\xff\xff\xff"),
        with_version(b"\x82\xa4type\xa3Add\xa8requests\xdd\xff\xff\xff\xff"),
        with_version(b"\x82\xa4type\xa5Abort\xabrequest_ids\xdd\x7f\xff\xff\xff" + b"\xa0" * 1000),
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


def test_lengths_that_a_frame_only_claims_take_no_memory() -> None:
    """4 billion elements are announced; 1,000 are there."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        with pytest.raises(WireError):
            decode(with_version(b"\x82\xa4type\xa5Abort\xabrequest_ids" + kind + b"\xff\xff\xff\xff" + b"\xa0" * 1000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_frames_are_bounded_on_both_sides() -> None:
    with pytest.raises(WireError, match="bytes"):
        decode(with_version(bytes(MAX_FRAME_BYTES)))
    room = MAX_FRAME_BYTES - len(encode(Stopped(reason="x" * 70_000))) + 70_000
    assert len(encode(Stopped(reason="x" * room))) == MAX_FRAME_BYTES
    assert decode(encode(Stopped(reason="x" * room))) == Stopped(reason="x" * room)
    with pytest.raises(FrameTooLargeError, match=str(MAX_FRAME_BYTES)):
        encode(Stopped(reason="x" * (room + 1)))


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", {1, 2}.__iter__()], ids=["object", "int", "str", "it"])
def test_a_value_that_cannot_cross_is_refused_at_the_sender(value: Any) -> None:
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(logit_bias={1: value}), seed=0)
    with pytest.raises(WireError, match="Add"):
        encode(Add(requests=[request]))


def test_infinite_and_not_a_number_cross_unchanged() -> None:
    delta = TokenDelta(request_id="a", scheduled_time=math.nan)
    decoded = decode(encode(Output(sequence=1, output=StepOutput(deltas=[delta]))))
    assert isinstance(decoded, Output)
    assert math.isnan(decoded.output.deltas[0].scheduled_time or 0.0)


def joined(frames: list[bytes], first: int) -> StepOutput:
    """The parts put together, as the front does it."""
    parts = [decode(frame) for frame in frames]
    assert all(isinstance(part, Output) for part in parts)
    assert [part.sequence for part in parts] == list(range(first, first + len(parts)))
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    deltas = [delta for part in parts for delta in part.output.deltas]
    return msgspec.structs.replace(parts[-1].output, deltas=deltas)


def test_a_step_past_the_bound_is_cut_into_parts() -> None:
    stats = StepStats(step=5, running=7)
    many = [TokenDelta(request_id=str(index), token_ids=list(range(70_000, 570_000))) for index in range(17)]
    small = StepOutput(deltas=many[:1], stats=stats)
    assert joined(output_frames(small, 9), 9) == small
    incident = PluginIncident(group="sampler", name="chaos", plugin="chaos, acme 1.0", reason="RuntimeError: boom")
    large = StepOutput(deltas=many, stats=stats, incidents=[incident])
    frames = output_frames(large, 3)
    assert len(frames) > 1
    assert joined(frames, 3) == large


def test_a_delta_past_the_bound_fails_alone() -> None:
    huge = TokenDelta(request_id="huge", token_ids=list(range(70_000, 4_070_000)))
    small = [TokenDelta(request_id=name, token_ids=[1, 2]) for name in "abc"]
    for deltas in ([huge], [huge, *small], [*small, huge], [small[0], huge, *small[1:]]):
        result = joined(output_frames(StepOutput(deltas=deltas, stats=StepStats(step=1)), 1), 1)
        assert [delta.request_id for delta in result.deltas] == [delta.request_id for delta in deltas]
        assert [delta for delta in result.deltas if delta.request_id != "huge"] == [d for d in deltas if d is not huge]
        (failed,) = [delta for delta in result.deltas if delta.request_id == "huge"]
        assert failed.finish_reason is FinishReason.ERROR
        assert str(MAX_FRAME_BYTES) in (failed.error or "")
        assert result.stats == StepStats(step=1)
