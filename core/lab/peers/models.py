"""One model in the forms that engines read: a Hugging Face folder in bfloat16, and GGUF files of one weight type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError

FILE_TYPES: Mapping[str, int] = {"BF16": 32, "F16": 1, "Q8_0": 7, "Q4_0": 2}
"""Weight type -> `general.file_type` of a file of it."""

HEADS = ("token_embd.weight", "output.weight")
HEAD_TYPE = "Q8_0"  # of a file with fewer bits: as llama-quantize has it where rows are no multiple of 256
_COMPUTED = ("general.file_type", "general.quantization_version")


def requantized(source: Path, folder: Path, weight_type: str) -> Path:
    """The GGUF file with its matrices in another type and all else as it is. Raises ConfigError for a type that it has not.

    What is rounded already is rounded again: the speed is that of the type, the quality nobody's.
    """
    import gguf

    if weight_type not in FILE_TYPES:
        raise ConfigError(f"{weight_type}: choose one of {', '.join(FILE_TYPES)}")
    target = folder / f"{source.stem}-{weight_type}.gguf"
    if target.exists():
        return target
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target.with_suffix(".part"), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", *_COMPUTED):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    writer.add_file_type(FILE_TYPES[weight_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        _add(writer, tensor, weight_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".part").rename(target)


def _add(writer: Any, tensor: Any, weight_type: str) -> None:
    """Vectors stay in float32."""
    import gguf

    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if len(tensor.shape) < 2:
        writer.add_tensor(tensor.name, values)
        return
    of_head = tensor.name in HEADS and weight_type.startswith("Q")
    kind = gguf.GGMLQuantizationType[HEAD_TYPE if of_head else weight_type]
    packed = gguf.quants.quantize(values, kind)
    writer.add_tensor(tensor.name, packed, raw_shape=packed.shape, raw_dtype=kind)


def in_bfloat16(gguf_file: Path, folder: Path) -> Path:
    """A folder as Hugging Face has them."""
    import torch
    import transformers

    if (folder / "config.json").exists():
        return folder
    known = {"gguf_file": gguf_file.name}
    whole = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, **known, quantization_config=whole, dtype=torch.bfloat16
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf_file.parent, **known).save_pretrained(folder)
    return folder


def gguf_of(overrides: Iterable[str]) -> Path:
    """The file that a config selects. Raises ConfigError where it is none of GGUF."""
    from core.assembly import read_model
    from core.session import open_session

    files = read_model(open_session([*overrides]).settings).files
    if files.kind != "gguf":
        raise ConfigError(f"{files.path}: peers are given GGUF files made from one; name a GGUF file as model.source")
    return files.path
