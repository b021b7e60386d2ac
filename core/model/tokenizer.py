"""Text <-> token ids, over the `tokenizers` library; loaded from a Hugging Face folder or a GGUF file. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from core.errors import ModelFileError
from core.model.spec import ModelFiles
from core.model.token_text import TextStream, compile_decoder

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning beyond their text. `names` are the variables a chat template sees (`bos_token` …)."""

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    pad_token_id: int | None = None
    unk_token_id: int | None = None
    special_ids: frozenset[int] = frozenset()  # hidden by skip_special_tokens
    unusable_ids: frozenset[int] = frozenset()  # in the vocabulary but never to be sampled
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Safe to use from several threads at once.

    `vocab_size` counts the ids that the tokenizer knows, with holes: the largest id + 1. The model's logits may be wider.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens | None = None,
        *,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special = special or SpecialTokens()
        self.chat_template = chat_template
        self._text = compile_decoder(_decoder_json(backend), source)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        known = vocabulary.values()
        self.vocab_size = max(known, default=-1) + 1
        self.max_token_length = max(map(len, vocabulary), default=0)  # characters; no token stands for more
        self.special_token_ids = self.special.special_ids | _added_special_ids(backend)
        self.unusable_token_ids = self.special.unusable_ids | (frozenset(range(self.vocab_size)) - frozenset(known))
        # Two threads may fill one entry at once; both write the same bytes.
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def bos_token_id(self) -> int | None:
        return self.special.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.special.eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Control tokens written in `text` become their ids. `text` must be encodable as UTF-8 (no lone surrogates)."""
        # The batch call, unlike `encode`, gives up the GIL, so a long text does not stop the event loop.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` on their own, in one go. Ids without a token are "" (see `token_text` for ill-formed UTF-8)."""
        shown = [token_id for token_id in ids if not self._hides(token_id, skip_special_tokens)]
        data = b"".join(
            [self._first_bytes(token_id) for token_id in shown[:1]] + [self.token_bytes(i) for i in shown[1:]]
        )
        return data.decode("utf-8", "replace").removeprefix(self._text.strip_start)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token inside a text; b"" for an id without a token. Special tokens give their own text."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        data = self._bytes[token_id]
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else self._text.token_bytes(token)
        return data

    def token_text(self, token_id: int) -> str:
        """Printable form of one token; U+FFFD for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its vocabulary string."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def stream(
        self,
        prompt_ids: Iterable[int] = (),
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
    ) -> TokenStream:
        """Decode what follows `prompt_ids` token by token. `shown_token_ids`: special tokens that are not skipped behind it."""
        shown = (token_id for token_id in prompt_ids if not self._hides(token_id, skip_special_tokens))
        if self._text.strip_start:
            at_start = not any(self.token_bytes(token_id) for token_id in shown)
        else:
            at_start = next(shown, None) is None
        hidden = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return TokenStream(self, hidden.difference(shown_token_ids) if shown_token_ids else hidden, at_start)

    def _hides(self, token_id: int, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token_id in self.special_token_ids) or self._backend_token(token_id) is None

    def _backend_token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token

    def _first_bytes(self, token_id: int) -> bytes:
        token = self._backend_token(token_id)
        return b"" if token is None else self._text.first_token_bytes(token)


class TokenStream:
    """Token ids -> text, one by one: the concatenation is `decode(prompt + output)` after `decode(prompt)`."""

    __slots__ = ("_at_start", "_hidden", "_text", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden  # ids without a text here
        self._at_start = at_start
        self._text = TextStream(tokenizer._text.strip_start if at_start else "")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token. Any id is fine; one without a token gives ""."""
        if self._at_start:
            return self._push_first(token_id)
        if token_id in self._hidden:
            return ""
        return self._text.push(self._tokenizer.token_bytes(token_id))

    def _push_first(self, token_id: int) -> str:
        if token_id in self._hidden or self._tokenizer._backend_token(token_id) is None:
            return ""
        self._at_start = False
        return self._text.push(self._tokenizer._first_bytes(token_id))

    def flush(self) -> str:
        return self._text.flush()


def _decoder_json(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    """The decoder alone: writing out a whole tokenizer takes seconds for a large vocabulary."""
    if backend.decoder is None:
        return None
    state: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _added_special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises ModelFileError naming the file and what is wrong with it."""
    if files.kind == "gguf":
        return _load_gguf(files.path)
    if files.kind == "hf":
        return _load_hf(files.path)
    raise ModelFileError(
        f"{files.source}: no tokenizer reader for model files of kind {files.kind!r}; use 'gguf' or 'hf'"
    )


def _load_gguf(path: Path) -> Tokenizer:
    from core.model.gguf import GGUFFile
    from core.model.gguf_tokenizer import build_tokenizer

    built = build_tokenizer(GGUFFile.open(path).metadata, str(path))
    ids = {"bos_token": built.bos_token_id, "eos_token": min(built.eos_token_ids, default=None)}
    ids |= {"pad_token": built.pad_token_id, "unk_token": built.unk_token_id}
    special = SpecialTokens(
        bos_token_id=built.bos_token_id,
        eos_token_ids=built.eos_token_ids,
        pad_token_id=built.pad_token_id,
        unk_token_id=built.unk_token_id,
        special_ids=built.special_ids,
        unusable_ids=built.unusable_ids,
        names=_texts(built.tokenizer, ids),
    )
    return Tokenizer(built.tokenizer, special, chat_template=built.chat_template, source=str(path))


def _texts(backend: tokenizers.Tokenizer, ids: Mapping[str, int | None]) -> dict[str, str]:
    texts = {name: backend.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _load_hf(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            f"{path} is missing: the slow tokenizers of `transformers` (tokenizer.model, vocab.json + merges.txt) are not "
            "read; save the fast one with AutoTokenizer.from_pretrained(…).save_pretrained(folder), or use a GGUF file"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from error
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    names = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None}
    _add_configured_tokens(backend, config, names)
    special = _hf_special(backend, folder, config, names)
    _frame_as_configured(backend, config, names)
    return Tokenizer(backend, special, chat_template=_hf_chat_template(folder, config), source=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: object) -> str | None:
    """A token is written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {
        name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return tokenizers.AddedToken(str(entry.get("content", "")), **flags)


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json lacks or does not mark as added or special.

    A token that the vocabulary has keeps its id; others are appended in the order of their configured ids.
    """
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for _, entry in listed:
        token = _added_token(entry)
        if token.content and token.content not in present:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    extra = [_content(token) for token in config.get("additional_special_tokens") or ()]
    for content in [*names.values(), *(text for text in extra if text)]:
        if content not in present or not present[content].special:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _hf_special(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], names: Mapping[str, str]
) -> SpecialTokens:
    ids = {name: backend.token_to_id(text) for name, text in names.items()}
    model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    eos = [ids.get("eos_token")]
    for value in (model.get("eos_token_id"), generation.get("eos_token_id")):
        eos += value if isinstance(value, list) else [value]
    return SpecialTokens(
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=frozenset(item for item in eos if isinstance(item, int)),
        pad_token_id=ids.get("pad_token"),
        unk_token_id=ids.get("unk_token"),
        special_ids=frozenset(token_id for token_id in ids.values() if token_id is not None),
        names=dict(names),
    )


def _frame_as_configured(backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where written, decide over the post-processor of tokenizer.json."""
    if not isinstance(config.get("add_bos_token"), bool) and not isinstance(config.get("add_eos_token"), bool):
        return
    bos = names.get("bos_token") if config.get("add_bos_token") else None
    eos = names.get("eos_token") if config.get("add_eos_token") else None
    used = [text for text in (bos, eos) if text is not None]
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    special = [(text, backend.token_to_id(text)) for text in dict.fromkeys(used)]
    backend.post_processor = TemplateProcessing(single=single, pair="$A:0 $B:1", special_tokens=special)


def _hf_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json (its "default" where there are several)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
