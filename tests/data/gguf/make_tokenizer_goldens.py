"""Regenerates tokenizer_goldens.json: what llama.cpp makes of tokenizer_lines.json. Needs llama-cpp-python and gguf.

Usage: python make_tokenizer_goldens.py FOLDER_WITH_MODELS
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

from gguf import GGUFReader, GGUFWriter
from llama_cpp import Llama

HERE = Path(__file__).parent
MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
PRE_TOKENIZERS = ("gpt-2", "default", "llama-bpe", "qwen2", "smollm", "tekken", "smaug-bpe")
SPM_PIECES = (
    "▁h he ll el lo hel lo▁ hell llo hello ▁hello ▁w or ld wo wor worl world ▁world aa ab ba aaa aaaa aab abab "
    "▁a ▁▁ ▁▁▁ 12 23 123 ca caf café de dé ▁. .. ... ▁the th the her ther"
).split()
SPM_LINES = (
    "hello",
    "hello world",
    " hello  world ",
    "aaaaaaaaaaa",
    "abaababaabab",
    "aabaabbbaaab ababab",
    "café déjà",
    "123 321 1232312",
    "<s>hello</s>world",
    "<tool>hello<tool> world",
    "<unk> <s> </s>",
    "中文 hello 😊",
    "\n\t hello\r\n",
    "zz top",
    "theretherthe hell....",
    "",
    " ",
    "    ",
)

# Merges across the borders that pre-tokenizers draw, and a token that no merge reaches: the variants then differ.
EXTRA_MERGES = (
    *("1 2", "12 3", "123 4", "0 0", "00 0", "000 0", "2 3", "3 4", "5 5"),
    *("Ġ 1", "Ġ (", "Ġ +", "Ġ {", "Ġ ==", "= =", "( l", "$ (", ". x", "@ d", ": /"),
    *("; Ċ", "} Ċ", "/ Ċ", "* Ċ", "l C", "' M", "' S"),
)
EXTRA_TOKENS = ("kebab", "Ġfox")


def spm_vocabulary():
    """A SentencePiece-like vocabulary: specials, 256 bytes, one user-defined and one unused token, characters, pieces."""
    named = [("<unk>", 2), ("<s>", 3), ("</s>", 3)] + [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    named += [("<tool>", 4), ("zz", 5)]
    scores = [0.0] * len(named)
    characters = sorted(set("".join(SPM_PIECES)) | set("z<>/s"))
    named += [(text, 1) for text in [*SPM_PIECES, *characters]]
    scores += [-1.0 - rank for rank in range(len(SPM_PIECES) + len(characters))]
    tokens, types = zip(*named, strict=True)
    return {"tokens": list(tokens), "scores": scores, "types": list(types)}


def spm_file(path, vocabulary, space_prefix):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_scores(vocabulary["scores"])
    writer.add_token_types(vocabulary["types"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(space_prefix)
    finish(writer)


def pre_vocabulary():
    """The vocabulary of the tiny fixture with the extra tokens and merges that it lacks."""
    fields = GGUFReader(HERE / "tiny-h128-Q4_0.gguf").fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    new = [text for text in (*(merge.replace(" ", "") for merge in EXTRA_MERGES), *EXTRA_TOKENS) if text not in tokens]
    new_merges = [merge for merge in EXTRA_MERGES if merge not in merges]
    return {"tokens": tokens + new, "types": types + [1] * len(new), "merges": merges + new_merges}


def pre_file(path, vocabulary, pre):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ids_of(model, lines, *, special, framed=False):
    return [model.tokenize(line.encode(), add_bos=framed, special=special) for line in lines]


def load(path):
    return Llama(str(path), vocab_only=True, verbose=False)


def of_model(path, lines):
    model = load(path)
    parsed, as_text = (ids_of(model, lines, special=special) for special in (True, False))
    differ = {str(i): as_text[i] for i in range(len(lines)) if as_text[i] != parsed[i]}
    return {"ids": parsed, "ids_as_text": differ, "framed": ids_of(model, lines[:20], special=True, framed=True)}


def of_spm(path, vocabulary):
    found = {**vocabulary, "lines": SPM_LINES}
    for prefix in (True, False):
        spm_file(path, vocabulary, prefix)
        found[f"prefix_{prefix}"] = ids_of(load(path), SPM_LINES, special=True, framed=True)
    return found


def digest(ids):
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def main():
    lines = json.loads((HERE / "tokenizer_lines.json").read_text())
    goldens = {"made_by": "llama.cpp as vendored in llama-cpp-python 0.3.36"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        goldens["spm"] = of_spm(path, spm_vocabulary())
        vocabulary = pre_vocabulary()
        goldens["pre_vocabulary"], goldens["pre"] = vocabulary, {}
        for pre in PRE_TOKENIZERS:
            pre_file(path, vocabulary, pre)
            goldens["pre"][pre] = [digest(ids) for ids in ids_of(load(path), lines, special=True)]
    for name in MODELS:
        goldens[name] = of_model(Path(sys.argv[1]) / name, lines)
    (HERE / "tokenizer_goldens.json").write_text(json.dumps(goldens, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
