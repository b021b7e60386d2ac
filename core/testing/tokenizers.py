"""Small tokenizers made in code: one of each kind that models use. Same ids on every run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from core.model.tokenizer import SpecialTokens, Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ENGLISH = [
    "the engine. It was described as one engine, and described again: hello world!",
    "Hello, the alphabet goes ABC DEFGHIJ and the numbers 0 1 2 3; user assistant system",
    "  indented text\n\twith tabs\n\nand lines  and  spaces",
]
_OTHER = ["ďábelské kódy", "👩‍👩‍👧‍👦 🔥 🔥🔥", "ครับ สวัสดีครับ", "漢字 在线 北京", "é ü ñ"]
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")


def _special(names: Sequence[str] = _SPECIAL) -> SpecialTokens:
    ids = {name: index for index, name in enumerate(names)}
    return SpecialTokens(
        bos_token_id=ids["<s>"],
        eos_token_ids=frozenset({ids["</s>"], ids["<|im_end|>"]}),
        pad_token_id=ids["<pad>"],
        unk_token_id=ids["<unk>"],
        special_ids=frozenset(ids.values()),
        names={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    )


def _finish(backend: tokenizers.Tokenizer, add_bos: bool, chat_template: str | None) -> Tokenizer:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    if add_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, _special(), chat_template=chat_template)


def byte_level_bpe(*, vocab_size: int = 330, add_bos: bool = False, chat_template: str | None = CHATML) -> Tokenizer:
    """GPT-2's kind: every byte is a token; some merges end in the middle of a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_ENGLISH * 3 + _OTHER, trainer)
    return _finish(backend, add_bos, chat_template)


def sentencepiece_bpe(
    *, prefix_space: bool = False, add_bos: bool = True, chat_template: str | None = CHATML
) -> Tokenizer:
    """Sentencepiece's kind: spaces are part of tokens, characters without a token are written as byte tokens.

    `prefix_space` as Llama 2 has it: a text starts with a space that decoding takes away; without it as Gemma.
    """
    pieces, merges = _pieces_and_merges()
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return _finish(backend, add_bos, chat_template)


def _pieces_and_merges() -> tuple[list[str], list[tuple[str, str]]]:
    """Trained on English alone, so that all else falls back to bytes."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(_ENGLISH * 3, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [(left, right) for left, right in model["merges"]]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files of a Hugging Face folder, so that `core.model.tokenizer.load_tokenizer` gives the same one."""
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special.names,
        **({"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
