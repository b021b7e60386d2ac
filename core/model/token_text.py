"""From token strings to text: what each decoder of `tokenizers` does to one token, and a decoder that works token by token.

A token is a run of bytes; a text is the UTF-8 of the bytes of all its tokens. Bytes that can never complete a character
become U+FFFD, one for each maximal part (Unicode 15, section 3.9), as in `bytes.decode("utf-8", "replace")`.
This equals the `tokenizers` library's decode, except in a run of byte-fallback tokens that is ill-formed somewhere: the
library replaces every byte of that run, here its well-formed characters stay. Streaming needs that: a character that was
delivered cannot be taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.errors import ModelFileError

TextStep = Callable[[str], str]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (Radford et al. 2019, `encoder.py`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _utf8(token: str) -> bytes:
    return token.encode("utf-8", "replace")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return _utf8(token)


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_fallback(token: str) -> bytes:
    byte = _fallback_byte(token)
    return _utf8(token) if byte is None else bytes([byte])


@dataclass(frozen=True, slots=True)
class TokenText:
    """How one vocabulary's tokens become bytes, and what happens at the very start of a text."""

    steps: tuple[TextStep, ...] = ()
    to_bytes: Callable[[str], bytes] = field(default=_utf8)
    strip_start: str = ""  # one such character is dropped from the start of a text
    first_token_drop: str = ""  # every such character is dropped from the first token (Metaspace)

    def token_bytes(self, token: str) -> bytes:
        if self.to_bytes is _byte_fallback and _fallback_byte(token) is not None:
            return _byte_fallback(token)
        for step in self.steps:
            token = step(token)
        return self.to_bytes(token)

    def first_token_bytes(self, token: str) -> bytes:
        return self.token_bytes(token.replace(self.first_token_drop, "") if self.first_token_drop else token)


def _replace(old: str, new: str) -> TextStep:
    return lambda token: token.replace(old, new)


def _strip_left(char: str, count: int) -> TextStep:
    def strip(token: str) -> str:
        leading = len(token) - len(token.lstrip(char))
        return token[min(leading, count) :]

    return strip


def _unsupported(what: str, source: str) -> ModelFileError:
    return ModelFileError(
        f"{source}: decoder {what} is not supported; supported are ByteLevel, Metaspace, and a Sequence of Replace (plain "
        "text), ByteFallback, Fuse and Strip (start)"
    )


class _Compiler:
    """Reads the `decoder` object of a tokenizer.json step by step."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.steps: list[TextStep] = []
        self.to_bytes: Callable[[str], bytes] = _utf8
        self.strip_start = ""
        self.first_token_drop = ""
        self.fused = False

    def add(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder.get("type")
        handler = getattr(self, f"_{str(kind).lower()}", None)
        if handler is None or (self.fused and kind not in ("Strip", "Fuse")):
            raise _unsupported(repr(kind), self.source)
        handler(decoder)

    def _sequence(self, decoder: Mapping[str, Any]) -> None:
        for step in decoder.get("decoders", ()):
            self.add(step)

    def _bytelevel(self, decoder: Mapping[str, Any]) -> None:
        self.to_bytes, self.fused = _byte_level, True

    def _bytefallback(self, decoder: Mapping[str, Any]) -> None:
        self.to_bytes = _byte_fallback

    def _fuse(self, decoder: Mapping[str, Any]) -> None:
        self.fused = True

    def _replace(self, decoder: Mapping[str, Any]) -> None:
        pattern = decoder.get("pattern", {})
        if "String" not in pattern:
            raise _unsupported("Replace with a regular expression", self.source)
        self.steps.append(_replace(pattern["String"], decoder["content"]))

    def _strip(self, decoder: Mapping[str, Any]) -> None:
        content, start, stop = decoder.get("content", " "), decoder.get("start", 0), decoder.get("stop", 0)
        if stop or (self.fused and start > 1):
            raise _unsupported(f"Strip with start {start} and stop {stop}", self.source)
        if not self.fused:
            self.steps.append(_strip_left(content, start))
        elif start:
            self.strip_start = content

    def _metaspace(self, decoder: Mapping[str, Any]) -> None:
        replacement = decoder.get("replacement", "▁")
        self.steps.append(_replace(replacement, " "))
        if decoder.get("prepend_scheme", "always") != "never":
            self.first_token_drop = replacement


def compile_decoder(decoder: Mapping[str, Any] | None, source: str) -> TokenText:
    """The `decoder` object of a tokenizer.json. None joins tokens with one space, as the library does.

    Raises ModelFileError for a decoder that has no token-by-token form.
    """
    if decoder is None:
        return TokenText(steps=(lambda token: " " + token,), strip_start=" ")
    compiler = _Compiler(source)
    compiler.add(decoder)
    return TokenText(tuple(compiler.steps), compiler.to_bytes, compiler.strip_start, compiler.first_token_drop)


class TextStream:
    """Bytes of successive tokens -> text, each character once its last byte is there. O(bytes) in all.

    `strip` is the character that is dropped, once, from the start of the text; "" where the text goes on from a prompt.
    """

    __slots__ = ("_decoder", "_strip")

    def __init__(self, strip: str = "") -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip

    def push(self, data: bytes) -> str:
        return self._after_strip(self._decoder.decode(data))

    def flush(self) -> str:
        """The end: U+FFFD for a character whose bytes never came."""
        return self._after_strip(self._decoder.decode(b"", True))

    def _after_strip(self, text: str) -> str:
        if self._strip and text:
            text, self._strip = text.removeprefix(self._strip), ""
        return text
