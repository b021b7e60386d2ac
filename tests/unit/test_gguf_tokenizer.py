"""Token ids of GGUF files equal llama.cpp's (goldens made by tests/data/gguf/make_tokenizer_goldens.py)."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelFileError
from core.model import gguf_tokenizer
from core.model.gguf import GGUFFile
from core.model.gguf_fields import MetadataFields
from core.model.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from core.model.spec import ModelFiles

DATA = Path(__file__).parents[1] / "data" / "gguf"
LINES: list[str] = json.loads((DATA / "tokenizer_lines.json").read_text())
GOLDENS: dict[str, Any] = json.loads((DATA / "tokenizer_goldens.json").read_text())
SMOLLM2, GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
# Gemma's vocabulary holds HTML tags. llama.cpp takes `</s>` among them for an end of text; here it stays a tag.
TAG = "</s>"


def ids(tokenizer: GGUFTokenizer, text: str) -> list[int]:
    return tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def tiny_metadata(**changes: object) -> dict[str, object]:
    metadata = dict(GGUFFile.open(DATA / "tiny-h128-Q4_0.gguf").metadata)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def spm_metadata(space_prefix: bool = True, **changes: object) -> dict[str, object]:
    made = GOLDENS["spm"]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": tuple(made["tokens"]),
        "scores": tuple(made["scores"]),
        "token_type": tuple(made["types"]),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_eos_token": True,
        "add_space_prefix": space_prefix,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


@pytest.fixture(scope="module")
def model(real_model: ModelFiles) -> tuple[GGUFTokenizer, dict[str, Any]]:
    path = real_model.path
    return build_tokenizer(GGUFFile.open(path).metadata, str(path)), GOLDENS[path.name]


def test_corpus_covers_what_it_should() -> None:
    assert len(LINES) >= 300
    assert "Hello world! Café déjà vu — 123 😊" in LINES
    text = "".join(LINES)
    for low, high in (
        (0x0E00, 0x0E7F),
        (0x0600, 0x06FF),
        (0x4E00, 0x9FFF),
        (0, 8),
        (0x200D, 0x200D),
        (0x1F300, 0x1FAFF),
    ):
        assert any(low <= ord(character) <= high for character in text)


@pytest.mark.model
def test_ids_equal_llama_cpp(model: tuple[GGUFTokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = model
    tokenizer.tokenizer.encode_special_tokens = False
    differing = [text for text, wanted in zip(LINES, golden["ids"], strict=True) if ids(tokenizer, text) != wanted]
    assert differing == []


@pytest.mark.model
def test_ids_equal_llama_cpp_when_special_tokens_are_text(model: tuple[GGUFTokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = model
    as_text = golden["ids_as_text"]
    assert len(as_text) >= 5
    tokenizer.tokenizer.encode_special_tokens = True
    try:
        found = {i: ids(tokenizer, text) for i, text in enumerate(LINES)}
    finally:
        tokenizer.tokenizer.encode_special_tokens = False
    wanted = {i: as_text.get(str(i), golden["ids"][i]) for i in found}
    html = TAG in tokenizer.tokenizer.get_vocab()
    differing = [LINES[i] for i in found if found[i] != wanted[i] and not (html and TAG in LINES[i])]
    assert differing == []
    control = tokenizer.special_ids
    assert not any(control & set(row) for row in found.values())


@pytest.mark.model
def test_bos_is_added_once_where_the_file_asks(model: tuple[GGUFTokenizer, dict[str, Any]]) -> None:
    tokenizer, golden = model
    for text, wanted in zip(LINES, golden["framed"], strict=False):
        framed = tokenizer.tokenizer.encode(text).ids
        assert framed == wanted
        assert framed.count(tokenizer.bos_token_id) == (1 if tokenizer.add_bos else 0)


@pytest.mark.model
def test_round_trip_is_exact(model: tuple[GGUFTokenizer, dict[str, Any]]) -> None:
    """Except for text that the vocabulary cannot hold: ▁ is SentencePiece's space, and SmolLM2 lacks two bytes."""
    tokenizer, _ = model
    lossy = ("\u2581", "\x04", "\x06")
    for text in LINES:
        if not any(mark in text for mark in lossy):
            assert tokenizer.tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


@pytest.mark.model
def test_special_ids_of_real_files(model: tuple[GGUFTokenizer, dict[str, Any]]) -> None:
    tokenizer, _ = model
    vocab = tokenizer.tokenizer.get_vocab()
    if "<end_of_turn>" in vocab:
        assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0, 3)
        assert tokenizer.eos_token_ids == {1, vocab["<end_of_turn>"]}
        assert tokenizer.add_bos and tokenizer.chat_template is None
        assert vocab["\n\n"] not in tokenizer.special_ids
    else:
        assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 0)
        assert tokenizer.eos_token_ids == {vocab["<|im_end|>"], vocab["<|endoftext|>"]}
        assert not tokenizer.add_bos
        assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.eos_token_ids <= tokenizer.special_ids
    assert tokenizer.unusable_ids == frozenset()


@pytest.mark.parametrize("pre", sorted(GOLDENS["pre"]))
def test_every_pre_tokenizer_equals_llama_cpp(pre: str) -> None:
    made = {key: tuple(GOLDENS["pre_vocabulary"][key]) for key in ("tokens", "types", "merges")}
    metadata = tiny_metadata(pre=pre, tokens=made["tokens"], token_type=made["types"], merges=made["merges"])
    tokenizer = build_tokenizer(metadata)
    digests = [hashlib.sha256(json.dumps(ids(tokenizer, text)).encode()).hexdigest()[:12] for text in LINES]
    differing = [text for text, ours, theirs in zip(LINES, digests, GOLDENS["pre"][pre], strict=True) if ours != theirs]
    assert differing == []


def test_pre_tokenizers_are_told_apart() -> None:
    """The corpus would notice if one pre-tokenizer stood in for another."""
    digests = [tuple(rows) for rows in GOLDENS["pre"].values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_equals_llama_cpp(space_prefix: bool) -> None:
    tokenizer = build_tokenizer(spm_metadata(space_prefix))
    lines, wanted = GOLDENS["spm"]["lines"], GOLDENS["spm"][f"prefix_{space_prefix}"]
    found = [tokenizer.tokenizer.encode(text).ids for text in lines]
    assert [text for text, ours, theirs in zip(lines, found, wanted, strict=True) if ours != theirs] == []


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """Slow twin: SentencePiece BPE as defined: join the best-scored neighbours, leftmost first, until none join."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_merges_from_scores_equal_the_slow_twin() -> None:
    tokenizer = build_tokenizer(spm_metadata(False))
    made = GOLDENS["spm"]
    scores = {t: s for t, s, kind in zip(made["tokens"], made["scores"], made["types"], strict=True) if kind == 1}
    for number in range(3**7):
        text = "".join("ab▁"[number // 3**place % 3] for place in range(7)) + "hello"
        assert tokenizer.tokenizer.encode(text, add_special_tokens=False).tokens == merge_by_score(text, scores)


def test_record_of_a_sentencepiece_file() -> None:
    tokenizer = build_tokenizer(spm_metadata(eot_token_id=259))
    assert (tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (1, 0, None)
    assert tokenizer.eos_token_ids == {2, 259}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.unusable_ids == {GOLDENS["spm"]["tokens"].index("zz")}
    assert tokenizer.add_bos and tokenizer.add_eos
    assert tokenizer.tokenizer.decode(tokenizer.tokenizer.encode("hello  world 中").ids) == "hello  world 中"


def test_text_never_becomes_a_control_token_by_merging() -> None:
    tokens, scores, types = (list(GOLDENS["spm"][key]) for key in ("tokens", "scores", "types"))
    pieces = ("</", "</s", "s>")
    metadata = spm_metadata(
        tokens=(*tokens, *pieces), scores=(*scores, -90.0, -91.0, -92.0), token_type=(*types, *[1] * len(pieces))
    )
    tokenizer = build_tokenizer(metadata)
    tokenizer.tokenizer.encode_special_tokens = True
    assert tokenizer.eos_token_ids == {2}
    assert 2 not in ids(tokenizer, "a</s>b")


def test_tokens_without_text_or_shadowed_are_unusable() -> None:
    tokens = list(tiny_metadata()["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    types = [3, 3, 3, 3] + [1] * (len(tokens) - 4)
    tokenizer = build_tokenizer(tiny_metadata(tokens=(*tokens, "", "!", "[PAD514]"), token_type=(*types, 1, 1, 5)))
    first = tokens.index("!")
    assert tokenizer.unusable_ids == {len(tokens), first, len(tokens) + 2}


def test_end_of_turn_by_text_is_special_even_if_user_defined() -> None:
    tokens = list(tiny_metadata()["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    types = [3, 3, 3, 3] + [1] * (len(tokens) - 4)
    tokenizer = build_tokenizer(tiny_metadata(tokens=(*tokens, "<|eot_id|>"), token_type=(*types, 4)))
    assert tokenizer.eos_token_ids == {2, len(tokens)}
    assert len(tokens) in tokenizer.special_ids
    assert ids(tokenizer, "a<|eot_id|>")[-1] == len(tokens)
    assert tokenizer.tokenizer.decode([len(tokens)]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: bert is not supported"),
        ({"model": 7}, "tokenizer.ggml.model: should be a string, is int"),
        ({"pre": "smolm"}, "tokenizer.ggml.pre: smolm is not supported; did you mean smollm"),
        ({"tokens": (1, 2)}, "tokenizer.ggml.tokens: should be an array of strings"),
        ({"token_type": (1,)}, "tokenizer.ggml.token_type: has 1 entries for 512 tokens"),
        ({"merges": ("a b c",)}, "tokenizer.ggml.merges[0]: 'a b c' does not join two tokens"),
        ({"merges": ("ab",)}, "tokenizer.ggml.merges[0]"),
        ({"bos_token_id": 512}, "tokenizer.ggml.bos_token_id: 512 is not from 0 to 511"),
        ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id: should be an integer, is bool"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: should be a boolean, is int"),
    ],
)
def test_bad_metadata_names_file_and_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        build_tokenizer(tiny_metadata(**changes), source="some.gguf")
    assert str(caught.value).startswith("some.gguf: ")
    assert message in str(caught.value)


def test_scores_must_match_tokens() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores: has 1 entries"):
        build_tokenizer(spm_metadata(scores=(0.0,)))


def test_piece_of_hostile_length_is_refused() -> None:
    tokens = (*GOLDENS["spm"]["tokens"][:-1], "a" * 1_000_000)
    with pytest.raises(ModelFileError, match=rf"tokens\[{len(tokens) - 1}\]: is longer than 1024 characters"):
        build_tokenizer(spm_metadata(tokens=tokens))


def test_missing_tokenizer_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.model: is missing"):
        build_tokenizer({})


@pytest.mark.parametrize("seed", range(20))
def test_scored_merges_equal_their_definition(seed: int) -> None:
    """Every split of every token into two, by falling score; equal scores by the length of the left part, then by text."""
    source = random.Random(seed)
    pieces = sorted({"".join(source.choices("ab\u2581", k=source.randint(1, 5))) for _ in range(60)} | {"a", "b"})
    tokens = (*pieces, "<s>")
    types = (*(1 for _ in pieces), 3)
    scores = tuple(float(source.randint(-4, 0)) for _ in tokens)  # many ties
    vocabulary = gguf_tokenizer._Vocabulary(tokens, types, {text: i for i, text in enumerate(tokens)})
    splits = [(left, right) for left in pieces for right in pieces if left + right in pieces]
    wanted = sorted(splits, key=lambda pair: (-scores[tokens.index("".join(pair))], len(pair[0]), pair))
    assert len(wanted) > 20
    assert gguf_tokenizer._scored_merges(MetadataFields({}), vocabulary, scores) == wanted
