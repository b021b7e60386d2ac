"""Frames between the front process and the engine process: one version byte, then one msgpack message.

A frame is typed and bounded, unknown fields are refused, and decoding never runs code that the frame names.
Whatever is not a message of this version is a `WireError`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from core.errors import NonetError
from core.model.roofline import Roofline
from core.outputs import StepOutput, StepStats, TokenDelta
from core.request import EngineRequest, FinishReason

WIRE_VERSION = 1
MAX_FRAME_BYTES = 16 * 2**20  # version byte included

StartError = Literal["ConfigError", "PluginError", "ModelFileError", "EngineDeadError"]


class WireError(NonetError):
    """A frame that is no message of this version, or a message that makes no frame."""


class FrameTooLargeError(WireError):
    """The encoded message is past `MAX_FRAME_BYTES`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine turned out to be once it was built."""

    model_name: str
    max_model_len: int  # tokens, prompt and output together
    num_kv_blocks: int
    num_kv_slots: int = 0  # tokens of the longest sequence that they hold; 0: all of them
    block_size: int  # tokens per KV block
    dtype: str
    device: str
    plugins: list[str] = []  # "name==version" of every loaded plugin distribution


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages; the class name is the tag."""


class Hello(Message, frozen=True, tag=True):
    """Front -> engine, first: who the front is and what to build."""

    version: str
    settings: str  # the root settings as JSON
    plugins: list[str] | None = None  # `EngineInfo.plugins` as the front has it; None: nothing to compare


class Add(Message, frozen=True, tag=True):
    requests: list[EngineRequest]


class Abort(Message, frozen=True, tag=True):
    request_ids: list[str]


class ResetPrefixCache(Message, frozen=True, tag=True):
    call_id: int


class MeasureRoofline(Message, frozen=True, tag=True):
    call_id: int


class Shutdown(Message, frozen=True, tag=True):
    """Stop after the work in hand, or after `drain_s` seconds."""

    drain_s: float = 0.0


class Loading(Message, frozen=True, tag=True):
    """Engine -> front while it starts; also the engine's first sign of life."""

    what: str
    done: int
    total: int


class Ready(Message, frozen=True, tag=True):
    info: EngineInfo


class StartFailed(Message, frozen=True, tag=True):
    message: str
    error: StartError


class Output(Message, frozen=True, tag=True):
    """One step's output, or one part of it: a step past the frame bound is cut into parts, `more` but in the last."""

    sequence: int  # 1, 2, 3 … within one life of the engine
    output: StepOutput
    more: bool = False


class Heartbeat(Message, frozen=True, tag=True):
    loop_time: float  # time.monotonic() seconds of the step loop; one clock for both processes
    step: int
    dropped: int = 0  # frames the engine could not read so far


class Reply(Message, frozen=True, tag=True):
    call_id: int
    ok: bool
    roofline: Roofline | None = None  # to MeasureRoofline, where the model has one


class Stopped(Message, frozen=True, tag=True):
    reason: str


FrontMessage = Hello | Add | Abort | ResetPrefixCache | MeasureRoofline | Shutdown
EngineMessage = Loading | Ready | StartFailed | Output | Heartbeat | Reply | Stopped
AnyMessage = FrontMessage | EngineMessage


class Boot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One JSON line on the standard input of a new engine process: where the front listens, and as whom to call."""

    address: str
    identity: str  # the routing id that only this child knows; the front drops every other peer
    factory: str  # "module:function" that builds the engine loop; fixed in code, never read from a config


_VERSION_BYTE = bytes([WIRE_VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The frame of a message. Raises FrameTooLargeError, or WireError for a value that msgpack cannot carry."""
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise WireError(f"a {type(message).__name__} message cannot be encoded: {error}") from error
    if len(body) >= MAX_FRAME_BYTES:
        raise FrameTooLargeError(
            f"a {type(message).__name__} message takes {len(body) + 1} bytes; a frame holds {MAX_FRAME_BYTES}"
        )
    return _VERSION_BYTE + body


def decode(frame: bytes) -> AnyMessage:
    """The message of a frame; raises WireError for anything else. Memory stays within a small multiple of the frame."""
    if not 2 <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"a frame has 2 to {MAX_FRAME_BYTES} bytes, not {len(frame)}")
    if frame[0] != WIRE_VERSION:
        raise WireError(f"wire version {frame[0]}, expected {WIRE_VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"no message: {error}") from error


def output_frames(output: StepOutput, sequence: int) -> list[bytes]:
    """Frames of one step output, numbered from `sequence`. A single delta past the bound becomes an error delta,
    and so does one that msgpack cannot carry: a plugin's value is nobody else's trouble."""
    try:
        return [encode(Output(sequence=sequence, output=output))]
    except FrameTooLargeError:
        parts = _halves(output)
    except WireError:
        return output_frames(_sendable(output), sequence)
    frames: list[bytes] = []
    for part in parts[:-1]:
        frames += _part_frames(part, sequence + len(frames))
    return frames + output_frames(parts[-1], sequence + len(frames))


def is_sendable(value: msgspec.Struct) -> bool:
    """Whether it can be encoded, and is what its class says once it is decoded again."""
    try:
        msgspec.msgpack.decode(_encoder.encode(value), type=type(value))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False
    return True


def _sendable(output: StepOutput) -> StepOutput:
    """What can be sent of it, and errors in place of the rest."""
    deltas = [delta if is_sendable(delta) else _unsendable(delta) for delta in output.deltas]
    return StepOutput(
        deltas=[delta for delta in deltas if is_sendable(delta)],
        stats=output.stats if is_sendable(output.stats) else StepStats(),
        incidents=[incident for incident in output.incidents if is_sendable(incident)],
    )


def _unsendable(delta: TokenDelta) -> TokenDelta:
    error = "a plugin made a result that cannot be sent: a number of more than 64 bits, text without a UTF-8 form, or no value"
    return TokenDelta(request_id=delta.request_id, finish_reason=FinishReason.ERROR, error=error)


def _part_frames(part: StepOutput, sequence: int) -> list[bytes]:
    try:
        return [encode(Output(sequence=sequence, output=part, more=True))]
    except FrameTooLargeError:
        frames: list[bytes] = []
        for half in _halves(part):
            frames += _part_frames(half, sequence + len(frames))
        return frames


def _halves(output: StepOutput) -> list[StepOutput]:
    """Two parts, statistics and incidents with the second; or one, where a single delta was too large."""
    deltas = output.deltas
    if len(deltas) <= 1:
        return [msgspec.structs.replace(output, deltas=[_too_large(delta) for delta in deltas])]
    half = len(deltas) // 2
    return [StepOutput(deltas=deltas[:half]), msgspec.structs.replace(output, deltas=deltas[half:])]


def _too_large(delta: TokenDelta) -> TokenDelta:
    return TokenDelta(
        request_id=delta.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"the result is larger than {MAX_FRAME_BYTES} bytes; ask for fewer logprobs",
    )
