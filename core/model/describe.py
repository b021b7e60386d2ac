"""Model files -> ModelSpec, from headers and JSON alone: no weight is read, no code of the model is run."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from core.errors import ConfigError, ModelFileError
from core.model.checkpoint_files import check_safetensors, read_json
from core.model.spec import ModelFiles, ModelSpec, quantization_of

MAX_VOCAB = 1 << 22
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")


class _AnyModelType:
    def __contains__(self, model_type: object) -> bool:
        return True


ANY_MODEL_TYPE: Container[str] = _AnyModelType()
"""For a process that builds no model: the one that does checks, without which transformers would be imported in both."""


def read_spec(
    files: ModelFiles, *, max_model_len: int | None = None, known_model_types: Container[str] | None = None
) -> ModelSpec:
    """Describe a model. `max_model_len` overrides the model's own length, downwards only.

    `known_model_types` are those that some installed model plugin or transformers can build without the repository's
    own code; it is asked only for configs with `auto_map`, and defaults to transformers' table.
    Raises ModelFileError (names file and field) and ConfigError (`max_model_len` too large).
    """
    if files.kind == "gguf":
        return _read_gguf(files, max_model_len)
    if files.kind == "hf":
        return _read_folder(files, max_model_len, known_model_types)
    raise ModelFileError(f"{files.path}: model kind {files.kind!r} is unknown; use gguf or hf")


class _Extra(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The two parts of tokenizer.json that hold ids."""

    model: _Vocabulary
    added_tokens: list[_Extra] = []

    def ids(self) -> dict[str, int]:
        vocab = self.model.vocab
        if isinstance(vocab, list):  # Unigram: [[text, score], …], the id is the position
            vocab = {str(entry[0]): token_id for token_id, entry in enumerate(vocab)}
        return vocab | {token.content: token.id for token in self.added_tokens}


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Checked access to a JSON object; messages name the file and the field."""

    values: Mapping[str, Any]
    source: str

    def fail(self, field: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.source}: {field}: {problem}")

    def optional_integer(self, field: str, low: int, high: int) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(field, f"should be an integer, is {type(value).__name__}")
        if not low <= value <= high:
            self.fail(field, f"{value} is not from {low} to {high}")
        return value

    def ids(self, field: str, vocab_size: int) -> frozenset[int]:
        """One token id, a list of them, or nothing."""
        value = self.values.get(field)
        found = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in found:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not -1 <= token_id < vocab_size:
                self.fail(field, f"{token_id!r} is not a token id below vocab_size {vocab_size}")
        return frozenset(token_id for token_id in found if token_id >= 0)  # -1 is how some configs write "none"


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_folder(files: ModelFiles, max_model_len: int | None, known: Container[str] | None) -> ModelSpec:
    path = files.path / "config.json"
    config = read_json(path)
    _check_model_type(config, path, known)
    check_safetensors(files.path)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    fields = ConfigFields(text or {}, str(path))
    vocab_size = fields.optional_integer("vocab_size", 1, MAX_VOCAB)
    if vocab_size is None:
        fields.fail("vocab_size", "is missing")
    generation = _optional_json(files.path / "generation_config.json")
    extra = ConfigFields(generation, str(files.path / "generation_config.json"))
    token_ids = _tokenizer_ids(files.path)
    named = ConfigFields(_named_tokens(files.path, token_ids), str(files.path / "tokenizer_config.json"))
    eos = (source.ids("eos_token_id", vocab_size) for source in (ConfigFields(config, str(path)), fields, extra, named))
    return ModelSpec(
        name=_folder_name(files),
        files=files,
        config=config,
        vocab_size=vocab_size,
        max_model_len=_model_len(_declared_length(fields), max_model_len, str(path)),
        eos_token_ids=frozenset().union(*eos),
        bos_token_id=_first(fields.ids("bos_token_id", vocab_size) or named.ids("bos_token_id", vocab_size)),
        pad_token_id=_first(fields.ids("pad_token_id", vocab_size) or named.ids("pad_token_id", vocab_size)),
        unusable_token_ids=_rows_without_text(token_ids, vocab_size),
        generation_config=generation,
        weights=_checkpoint_kind(config),
    )


def _checkpoint_kind(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the weights of a folder are kept: as its config says, or dense."""
    quantized = quantization_of(config)
    if not quantized:
        return ("dense",)
    return (str(quantized.get("quant_method", "unknown")) if isinstance(quantized, dict) else "unknown",)


def _folder_name(files: ModelFiles) -> str:
    """The repository's own name: a snapshot's folder is called by its commit."""
    if files.source.startswith("hf:"):
        return files.source.removeprefix("hf:").split("@")[0].rpartition("/")[2]
    return files.path.resolve().name


def _first(ids: frozenset[int]) -> int | None:
    return min(ids, default=None)


def _check_model_type(config: Mapping[str, Any], path: Path, known: Container[str] | None) -> None:
    """A repository's own code (`auto_map`) is never run: fine for known model types, an error for others."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelFileError(f"{path}: model_type: is missing or not a string")
    if not config.get("auto_map"):
        return  # whoever builds the model says whether it knows the type
    if known is None:
        from transformers.models.auto import configuration_auto

        known = configuration_auto.CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]  # not in its __all__
    if model_type not in known:
        raise ModelFileError(
            f"{path}: model_type: {model_type!r} needs the code its repository brings (auto_map), which is never run; "
            "choose a model whose type transformers or a model plugin knows"
        )


def _declared_length(fields: ConfigFields) -> int | None:
    lengths = (fields.optional_integer(key, 1, 1 << 31) for key in _LENGTH_KEYS)
    length = next((found for found in lengths if found is not None), None)
    return _extended(fields, length)


def _extended(fields: ConfigFields, length: int | None) -> int | None:
    """YaRN files keep the trained length in `max_position_embeddings` and the factor beside it (arXiv:2309.00071)."""
    scaling = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if length is None or not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return length
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(original, int) and 1 <= factor <= 1 << 10:
        return max(length, int(original * factor))
    return length


def _model_len(declared: int | None, wanted: int | None, source: str) -> int:
    if wanted is not None and wanted < 1:
        raise ConfigError(f"model.max_model_len: {wanted} is not above zero")
    if declared is None and wanted is None:
        raise ConfigError(f"{source}: {_LENGTH_KEYS[0]} is missing; set model.max_model_len")
    if declared is not None and wanted is not None and wanted > declared:
        raise ConfigError(f"model.max_model_len: {wanted} is more than the model's {declared} ({source}); lower it")
    return wanted or declared or 0


def _named_tokens(folder: Path, ids: Mapping[str, int]) -> dict[str, int]:
    """`eos_token` and kin of tokenizer_config.json are texts; tokenizer.json has their ids."""
    config = _optional_json(folder / "tokenizer_config.json")
    found: dict[str, int] = {}
    for name in ("eos_token", "bos_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in ids:
            found[f"{name}_id"] = ids[text]
    return found


def _tokenizer_ids(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).ids()
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, TypeError) as error:
        raise ModelFileError(f"{path}: {error}; fetch the file again") from error


def _rows_without_text(ids: Mapping[str, int], vocab_size: int) -> frozenset[int]:
    """Logits rows that no token of the tokenizer uses, such as padding to a round vocabulary size."""
    return frozenset(range(vocab_size)) - set(ids.values()) if ids else frozenset()


def _read_gguf(files: ModelFiles, max_model_len: int | None) -> ModelSpec:
    from core.model.block_formats import weights_kind
    from core.model.gguf import GGUFFile
    from core.model.gguf_config import read_hf_config
    from core.model.gguf_tokenizer import token_roles

    file = GGUFFile.open(files.path)
    config = read_hf_config(file)
    roles = token_roles(file.metadata, str(files.path))
    fields = ConfigFields(config, str(files.path))
    vocab_size = int(config["vocab_size"])
    if roles.num_tokens > vocab_size:
        fields.fail("tokenizer.ggml.tokens", f"{roles.num_tokens} tokens for {vocab_size} rows of token_embd.weight")
    return ModelSpec(
        name=files.path.stem,
        files=files,
        config=config,
        vocab_size=vocab_size,
        max_model_len=_model_len(_declared_length(fields), max_model_len, str(files.path)),
        eos_token_ids=roles.eos_token_ids,
        bos_token_id=_first(fields.ids("bos_token_id", vocab_size)),
        pad_token_id=_first(fields.ids("pad_token_id", vocab_size)),
        unusable_token_ids=roles.unusable_ids | frozenset(range(roles.num_tokens, vocab_size)),
        weights=tuple(sorted({weights_kind(tensor.block_format) for tensor in file.tensors.values()})),
    )
