import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ModelFileError
from core.model.spec import ModelFiles
from core.model.token_text import compile_decoder
from core.model.tokenizer import load_tokenizer
from core.testing.tokenizers import byte_level_bpe, sentencepiece_bpe

DATA = Path(__file__).parents[1] / "data" / "tokenizer_byte_level"
BYTE_LEVEL, GEMMA, LLAMA = byte_level_bpe(), sentencepiece_bpe(), sentencepiece_bpe(prefix_space=True)
ids_of = st.lists(st.integers(0, 340), max_size=30)


def hf(path: Path):
    return load_tokenizer(ModelFiles("hf", path, str(path)))


@given(ids_of, st.booleans())
def test_byte_level_decode_equals_the_library(ids, skip):
    assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)


@given(ids_of, st.booleans(), st.sampled_from([GEMMA, LLAMA]))
def test_byte_fallback_decode_equals_the_library_where_well_formed(ids, skip, tokenizer):
    library = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert tokenizer.decode(ids, skip) == library
    else:  # the library replaces each byte of an ill-formed run, we each part that can never complete
        assert library.count("\ufffd") >= tokenizer.decode(ids, skip).count("\ufffd")


@given(st.text(max_size=40).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)))
def test_encode_then_decode_gives_the_text(text):
    for tokenizer in (BYTE_LEVEL, GEMMA):
        if "<" not in text and "▁" not in text:  # ▁ is how sentencepiece writes a space
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False) == text


def test_bytes_of_one_token():
    fallback = GEMMA.token_id("<0xF0>")
    assert GEMMA.token_bytes(fallback) == b"\xf0" and GEMMA.token_text(fallback) == "\ufffd"
    lone = next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == b"\xf0")
    assert BYTE_LEVEL.token_text(lone) == "\ufffd"
    assert b"".join(map(BYTE_LEVEL.token_bytes, BYTE_LEVEL.encode(" 🔥"))) == " 🔥".encode()
    assert GEMMA.token_bytes(4) == b"<|im_start|>"


def test_ids_without_a_token_have_no_text():
    assert [BYTE_LEVEL.token_bytes(i) for i in (-1, BYTE_LEVEL.vocab_size, 2**63)] == [b""] * 3
    assert BYTE_LEVEL.decode([-1, 2**63]) == ""


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_equals_the_library(scheme):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from core.model.tokenizer import Tokenizer

    backend = Backend(models.BPE({"▁▁": 0, "▁a": 1, "b▁": 2, "c": 3}, []))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    ours = Tokenizer(backend)
    for ids in ([0, 1, 2], [1, 1], [3, 0, 1], [2], []):
        assert ours.decode(ids) == backend.decode(ids)
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == backend.decode(ids)


def test_no_decoder_joins_with_spaces_as_the_library():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    from core.model.tokenizer import Tokenizer

    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(backend).decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "a b b"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece"},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_decoders_without_a_token_by_token_form_are_refused(decoder):
    with pytest.raises(ModelFileError, match=r"folder/tokenizer\.json.*not supported"):
        compile_decoder(decoder, "folder/tokenizer.json")


def test_hf_folder():
    tokenizer = hf(DATA)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special.pad_token_id) == (1, {2}, 3)
    assert tokenizer.vocab_size == 512 and not tokenizer.adds_bos and tokenizer.chat_template is None
    assert tokenizer.special_token_ids == {0, 1, 2, 3} and tokenizer.unusable_token_ids == frozenset()
    assert tokenizer.special.names["bos_token"] == "<s>"
    assert tokenizer.decode([1, *tokenizer.encode("hello"), 2]) == "hello"


def changed(tmp_path: Path, **files: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DATA, folder)
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        old = json.loads(path.read_text()) if path.exists() and isinstance(value, dict) else {}
        path.write_text(value if isinstance(value, str) else json.dumps(old | value))
    return folder


def test_add_bos_token_decides_over_the_post_processor(tmp_path):
    tokenizer = hf(changed(tmp_path, tokenizer_config__json={"add_bos_token": True, "bos_token": {"content": "<s>"}}))
    assert tokenizer.adds_bos and tokenizer.encode("a")[0] == 1 and tokenizer.encode("a", False)[0] != 1


def test_eos_ids_of_generation_config_count(tmp_path):
    assert hf(changed(tmp_path, generation_config__json={"eos_token_id": [2, 7]})).eos_token_ids == {2, 7}


def test_tokens_only_in_the_config_are_added_and_special(tmp_path):
    added = {"600": {"content": "<|tool|>", "special": False}, "601": {"content": "<|end|>", "special": True}}
    config = {"added_tokens_decoder": added, "additional_special_tokens": ["<|user|>"]}
    tokenizer = hf(changed(tmp_path, tokenizer_config__json=config))
    tool, end, user = (tokenizer.token_id(token) for token in ("<|tool|>", "<|end|>", "<|user|>"))
    assert tokenizer.encode("<|tool|><|end|><|user|>") == [tool, end, user]
    assert tokenizer.decode([tool, end, user]) == "<|tool|>"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template__jinja": "J", "tokenizer_config__json": {"chat_template": "C"}}, "J"),
        ({"tokenizer_config__json": {"chat_template": "C"}}, "C"),
        ({"chat_template__json": {"chat_template": "P"}}, "P"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
    ],
)
def test_where_the_chat_template_is(tmp_path, files, template):
    assert hf(changed(tmp_path, **files)).chat_template == template


def test_folder_without_fast_tokenizer_names_the_file(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing.*slow tokenizers of `transformers`"):
        hf(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer__json", "tokenizer_config__json"])
def test_broken_files_are_named(tmp_path, name):
    with pytest.raises(ModelFileError, match=name.replace("__", r"\.")):
        hf(changed(tmp_path, **{name: "{broken"}))


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    value = {"truncation": {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}}
    assert len(hf(changed(tmp_path, tokenizer__json=value)).encode("one two three four")) > 2


def test_import_needs_neither_torch_nor_transformers():
    code = "import sys, core.model.tokenizer as t; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@settings(max_examples=30)
@given(st.lists(st.integers(0, 330), max_size=20))
def test_gguf_like_special_ids_are_hidden(ids):
    shown = [token_id for token_id in ids if token_id not in GEMMA.special_token_ids]
    assert GEMMA.decode(ids) == GEMMA.decode(shown)
