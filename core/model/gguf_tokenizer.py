"""GGUF metadata -> a `tokenizers.Tokenizer` that gives the ids llama.cpp gives on the same file.

Where llama.cpp and the model's own Hugging Face tokenizer differ (no NFC for Qwen, split rules), llama.cpp is followed,
with two exceptions: text never turns into a control token through merges, and `</s>` ends a text only where the file
says that it is the EOS or a control token (Gemma's vocabulary has it as an HTML tag).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from types import MappingProxyType

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from core.errors import near_matches
from core.model.gguf_fields import MetadataFields


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer with what the renderer and the completion stage need to know of it.

    `tokenizer.encode(text)` adds BOS/EOS as the file asks; pass add_special_tokens=False for rendered chat templates.
    Control tokens written in the text are parsed; set `tokenizer.encode_special_tokens = True` to take them as text.
    """

    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None = field(repr=False)
    bos_token_id: int | None
    eos_token_ids: frozenset[int]  # EOS, end of turn, end of message
    pad_token_id: int | None
    unk_token_id: int | None
    add_bos: bool
    add_eos: bool
    special_ids: frozenset[int] = field(repr=False)
    unusable_ids: frozenset[int] = field(repr=False)  # unused or without text of their own: never sample them


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: Mapping[str, int]  # of two tokens with one text, the later wins, as in llama.cpp

    def is_special(self, token_id: int) -> bool:
        """Parsed in prompts only on request and hidden from output."""
        kind = self.types[token_id]
        return kind in (TokenType.CONTROL, TokenType.UNKNOWN) or self.tokens[token_id] in _END_OF_TURN

    def mergeable(self, token_id: int) -> bool:
        return self.types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Regular expressions that cut text into words, each applied to the pieces that the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # when the file does not say


# Texts that end a turn whatever type the file gives them; converters often leave them user-defined.
_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)
MAX_PIECE_LENGTH = 1024  # characters; finding the splits of a piece takes time in the square of its length
_SPACE = "\u2581"  # how SentencePiece vocabularies write a space

_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = _PreTokenizer((_WORDS_GPT2,))
_DIGITS = _PreTokenizer((r"\p{N}", _WORDS_GPT2))
_LLAMA3 = _PreTokenizer((_WORDS_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((_WORDS_QWEN2,))
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = MappingProxyType(
    {
        "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _WORDS_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
        "smaug-bpe": _PreTokenizer((_WORDS_LLAMA3,)),
        "dbrx": _PreTokenizer((_WORDS_LLAMA3,)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
        "tekken": _PreTokenizer((_WORDS_TEKKEN,), ignore_merges=True, add_bos=True),
    }
)


def build_tokenizer(metadata: Mapping[str, object], source: str = "GGUF metadata") -> GGUFTokenizer:
    """The tokenizer of a GGUF file from its `tokenizer.*` keys; `source` names the file in messages.

    Raises ModelFileError naming the key for tokenizer kinds and pre-tokenizers that are not supported and for values
    that are missing, mistyped or out of range.
    """
    fields = MetadataFields(metadata, source)
    kind = fields.text("tokenizer.ggml.model")
    vocabulary = _vocabulary(fields)
    if kind == "gpt2":
        pre = _pre_tokenizer(fields)
        tokenizer, bos_by_default = _byte_level(fields, vocabulary, pre), pre.add_bos
    elif kind == "llama":
        tokenizer, bos_by_default = _sentencepiece(fields, vocabulary), True
    else:
        fields.fail("tokenizer.ggml.model", f"{kind} is not supported{near_matches(kind, ('gpt2', 'llama'))}")
    _add_marked_tokens(tokenizer, vocabulary)
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", bos_by_default)
    return _finish(fields, tokenizer, vocabulary, add_bos)


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """What the engine must know of the vocabulary. `unusable_ids` are unused or without text of their own."""

    num_tokens: int
    eos_token_ids: frozenset[int]  # EOS, end of turn, end of message
    unusable_ids: frozenset[int] = field(repr=False)


def token_roles(metadata: Mapping[str, object], source: str = "GGUF metadata") -> TokenRoles:
    """Read without building the tokenizer, which takes seconds for large SentencePiece vocabularies."""
    fields = MetadataFields(metadata, source)
    return _roles(fields, _vocabulary(fields))


def _roles(fields: MetadataFields, vocabulary: _Vocabulary) -> TokenRoles:
    named = (_token_id(fields, vocabulary, name) for name in ("eos", "eot", "eom"))
    by_text = (vocabulary.ids.get(text) for text in _END_OF_TURN)
    eos_token_ids = frozenset(found for found in (*named, *by_text) if found is not None)
    return TokenRoles(len(vocabulary.tokens), eos_token_ids, _unusable(vocabulary))


def _finish(fields: MetadataFields, tokenizer: Tokenizer, vocabulary: _Vocabulary, add_bos: bool) -> GGUFTokenizer:
    bos = _token_id(fields, vocabulary, "bos")
    eos = _token_id(fields, vocabulary, "eos")
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    _frame_with(tokenizer, vocabulary, bos if add_bos else None, eos if add_eos else None)
    roles = _roles(fields, vocabulary)
    return GGUFTokenizer(
        tokenizer=tokenizer,
        chat_template=fields.optional_text("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_ids=roles.eos_token_ids,
        pad_token_id=_token_id(fields, vocabulary, "padding"),
        unk_token_id=_token_id(fields, vocabulary, "unknown"),
        add_bos=add_bos and bos is not None,
        add_eos=add_eos and eos is not None,
        special_ids=frozenset(i for i in range(len(vocabulary.tokens)) if vocabulary.is_special(i)),
        unusable_ids=roles.unusable_ids,
    )


def _vocabulary(fields: MetadataFields) -> _Vocabulary:
    key = "tokenizer.ggml.token_type"
    tokens = fields.texts("tokenizer.ggml.tokens")
    types = fields.integers(key) if key in fields else (int(TokenType.NORMAL),) * len(tokens)
    if len(types) != len(tokens):
        fields.fail(key, f"has {len(types)} entries for {len(tokens)} tokens")
    return _Vocabulary(tokens, types, {text: token_id for token_id, text in enumerate(tokens)})


def _unusable(vocabulary: _Vocabulary) -> frozenset[int]:
    unused, ids = int(TokenType.UNUSED), vocabulary.ids
    return frozenset(
        token_id
        for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if not text or kind == unused or ids[text] != token_id
    )


def _token_id(fields: MetadataFields, vocabulary: _Vocabulary, name: str) -> int | None:
    return fields.optional_integer(f"tokenizer.ggml.{name}_token_id", high=len(vocabulary.tokens) - 1)


def _pre_tokenizer(fields: MetadataFields) -> _PreTokenizer:
    name = fields.optional_text("tokenizer.ggml.pre") or "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        fields.fail("tokenizer.ggml.pre", f"{name} is not supported{near_matches(name, _PRE_TOKENIZERS)}")
    return pre


def _byte_level(fields: MetadataFields, vocabulary: _Vocabulary, pre: _PreTokenizer) -> Tokenizer:
    """GPT-2's byte-level BPE: each byte is one of 256 printable characters, merges are listed in rank order."""
    merges = _listed_merges(fields, vocabulary)
    tokenizer = Tokenizer(BPE(vocab=dict(vocabulary.ids), merges=merges, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(fields: MetadataFields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    ids = vocabulary.ids
    merges: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(fields.texts(key)):
        space = line.find(" ", 1)
        left, right = line[:space], line[space + 1 :]
        if space < 0 or left not in ids or right not in ids or left + right not in ids:
            fields.fail(f"{key}[{rank}]", f"{line!r} does not join two tokens into a third")
        merges.setdefault((left, right))
    return list(merges)


def _sentencepiece(fields: MetadataFields, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: of all neighbours whose concatenation is a token, the one with the best score joins first."""
    key = "tokenizer.ggml.scores"
    scores = fields.numbers(key)
    if len(scores) != len(vocabulary.tokens):
        fields.fail(key, f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    unknown = _token_id(fields, vocabulary, "unknown")
    model = BPE(
        vocab=dict(vocabulary.ids),
        merges=_scored_merges(fields, vocabulary, scores),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        byte_fallback=all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256)),
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if prefix else escape
    unescape = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)] if prefix else unescape)
    return tokenizer


def _scored_merges(fields: MetadataFields, vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, best score first.

    Splits of one token tie; the shorter left part goes first, which is what leftmost-first merging of a run needs.
    """
    ids = vocabulary.ids
    usable = {text: scores[token_id] for text, token_id in ids.items() if vocabulary.mergeable(token_id)}
    longest = max(usable, key=len, default="")
    if len(longest) > MAX_PIECE_LENGTH:
        fields.fail(f"tokenizer.ggml.tokens[{ids[longest]}]", f"is longer than {MAX_PIECE_LENGTH} characters")
    ranked: list[tuple[str, str]] = []
    for _, tied in groupby(sorted(usable, key=usable.__getitem__, reverse=True), key=usable.__getitem__):
        texts = list(tied)
        # a large vocabulary has a million places to cut: this line is most of the time that loading a tokenizer takes
        pairs = [
            (left, right)
            for text in texts
            for cut in range(1, len(text))
            if (left := text[:cut]) in usable and (right := text[cut:]) in usable
        ]
        ranked += pairs if len(texts) == 1 else sorted(pairs, key=lambda pair: (len(pair[0]), pair))
    return ranked


def _add_marked_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens become special, user-defined ones plain added tokens: both are cut out before any splitting."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for text, token_id in vocabulary.ids.items():
        if not text:
            continue
        if vocabulary.is_special(token_id):
            special.append(AddedToken(text, special=True, normalized=False))
        elif vocabulary.types[token_id] == TokenType.USER_DEFINED:
            plain.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _frame_with(tokenizer: Tokenizer, vocabulary: _Vocabulary, first: int | None, last: int | None) -> None:
    """Put `first` before and `last` behind what `encode(add_special_tokens=True)` returns."""
    if first is None and last is None:
        return
    ends = [token_id for token_id in (first, last) if token_id is not None]
    names = {token_id: f"token_{token_id}" for token_id in ends}
    opening = [] if first is None else [names[first]]
    closing = [] if last is None else [names[last]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*opening, "$A", *closing],
        pair=[*opening, "$A", *closing, *opening, "$B:1", *closing],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]} for token_id, name in names.items()
        ],
    )
