"""Any decoder-only transformers model, run on the engine's own attention backend and paged KV cache.

The breadth of transformers for the price of its Python overhead: prefer the native model for the families it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core.batch import ModelBatch
from core.errors import ConfigError, ModelFileError, PluginError
from core.model.gguf import GGUFFile
from core.model.gguf_weights import file_weights, read_hf_tensor
from core.model.interface import AttentionSpec, Linear, ModelContext, QuantMethod
from core.model.spec import ModelSpec
from plugins.models.paged_attention import NAME, PagedStep, Probe, StepSlot, register
from plugins.models.settings import TransformersSettings

_PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_OLD_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_local_base_freq"})  # all within rope_parameters too
_OPTIONS: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


class TransformersModel:
    """Config group `model`, name `transformers`. One flat row [1, T] holds the whole batch.

    Raises PluginError, before any request, for models that cannot run this way: encoder-decoders, state-space, linear
    or chunked attention, and attention classes that bypass transformers' attention interface.
    """

    Settings = TransformersSettings

    def __init__(self, settings: TransformersSettings, context: ModelContext):
        register()
        self._device = context.device
        self._attention = context.attention
        config = _config(context.spec)
        model_class = _model_class(config)
        _refuse(config, model_class, context.spec)
        with _explained(context.spec):
            self._model = _load(model_class, config, context)
        self._slot = StepSlot()
        self._slot.attach(self._model)
        self._specs = _probe(self._model, self._slot, context.device)
        _replace_linears(self._model, context.quant)
        # transformers takes a mask of four dimensions as it is, and so builds none
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=context.dtype, device=context.device)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return self._specs

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits [R, V] float32."""
        step = PagedStep(self._attention, self._specs, kv_caches, self._attention.prepare(batch, self._specs))
        with self._slot.during(step):
            output = self._model(
                input_ids=batch.input_ids.to(self._device)[None],
                position_ids=batch.positions.to(self._device)[None],
                attention_mask=self._no_mask,
                use_cache=False,
                logits_to_keep=batch.logits_indices.to(self._device),
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def _config(spec: ModelSpec) -> transformers.PreTrainedConfig:
    with _explained(spec):
        config: transformers.PreTrainedConfig
        if spec.files.kind == "gguf":
            values = {key: value for key, value in spec.config.items() if key not in _OLD_ROPE_KEYS}
            config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        else:
            config = transformers.AutoConfig.from_pretrained(spec.files.path, **_OPTIONS)
    return config


@contextmanager
def _explained(spec: ModelSpec) -> Iterator[None]:
    """transformers' many errors on broken or unknown files, as one that names the file."""
    try:
        yield
    except ImportError as error:
        raise PluginError(
            f"model plugin transformers: {spec.files.path} needs a package that is missing: {error}"
        ) from error
    except (ValueError, KeyError, OSError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFileError(f"{spec.files.path}: transformers cannot load it: {first[:300]}") from error


def _model_class(config: transformers.PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config.is_encoder_decoder:
        raise PluginError(
            f"model plugin transformers: {config.model_type} is an encoder-decoder; only decoders are run"
        )
    if name is None:
        raise PluginError(
            f"model plugin transformers: {config.model_type} has no causal language model in transformers"
        )
    found: type[transformers.PreTrainedModel] = getattr(transformers, name)
    return found


def _refuse(
    config: transformers.PreTrainedConfig, model_class: type[transformers.PreTrainedModel], spec: ModelSpec
) -> None:
    """Say no by name before any weight is read."""
    name = f"model plugin transformers: {config.model_type}"
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _PAGED_LAYERS)
    if foreign:
        raise PluginError(f"{name} has layers without a paged KV cache ({', '.join(foreign)}); it cannot be run")
    if model_class._is_stateful:
        raise PluginError(f"{name} keeps a recurrent state instead of a KV cache; it cannot be run")
    if not model_class._supports_attention_backend:
        raise PluginError(f"{name} ({model_class.__name__}) does not use transformers' attention interface")
    if getattr(config, "quantization_config", None) is not None:
        raise PluginError(f"{name}: quantized checkpoints are not loaded here; use model.name=native")
    _refuse_batch_dependent_rope(text, name, spec.max_model_len)


def _refuse_batch_dependent_rope(text: Any, name: str, max_model_len: int) -> None:
    """`dynamic` and `longrope` pick frequencies by the longest position of a call, so batch mates would matter."""
    rope = getattr(text, "rope_parameters", None) or {}
    plans = [rope] if "rope_type" in rope else [plan for plan in rope.values() if isinstance(plan, dict)]
    for plan in plans:
        limit = plan.get("original_max_position_embeddings") or text.max_position_embeddings
        if plan.get("rope_type") in ("dynamic", "longrope") and max_model_len > limit:
            raise ConfigError(
                f"{name}: its {plan['rope_type']} RoPE changes past {limit} tokens; set model.max_model_len={limit}"
            )


def _load(
    model_class: type[transformers.PreTrainedModel], config: transformers.PreTrainedConfig, context: ModelContext
) -> transformers.PreTrainedModel:
    files, weights = context.spec.files, None
    options: dict[str, Any] = {"dtype": context.dtype, "attn_implementation": NAME, "use_safetensors": True}
    if files.kind == "gguf":
        weights = _gguf_weights(context)
    context.progress(f"loading {context.spec.name}", 0, 1)
    model: transformers.PreTrainedModel = model_class.from_pretrained(
        files.path if weights is None else None, config=config, state_dict=weights, **options, **_OPTIONS
    )
    nn.Module.to(model, context.device)
    model.train(False).requires_grad_(False)
    context.progress(f"loading {context.spec.name}", 1, 1)
    return model


def _gguf_weights(context: ModelContext) -> dict[str, torch.Tensor]:
    """The file's tensors under their Hugging Face names, dequantized by the engine's own reader."""
    file = GGUFFile.open(context.spec.files.path)
    names, weights = file_weights(file), {}
    for done, name in enumerate(names):
        context.progress(f"reading {context.spec.name}", done, len(names))
        weights[name] = read_hf_tensor(file, name, context.dtype)
    context.progress(f"reading {context.spec.name}", len(names), len(names))
    return weights


@torch.inference_mode()
def _probe(model: transformers.PreTrainedModel, slot: StepSlot, device: torch.device) -> tuple[AttentionSpec, ...]:
    """Learn the attention layers from what they ask for in a pass over two tokens: no config key is interpreted.

    The probe's attention gives each token its own value back, so no token may see the other: a second pass with another
    first token must leave the second row as it was, or the model mixes tokens somewhere that has no KV cache.
    """
    name = f"model plugin transformers: {model.config.model_type}"
    first, second = Probe(), Probe()
    try:
        row, other = (_probed_row(model, slot, probe, token, device) for token, probe in ((0, first), (2, second)))
    except PluginError as error:
        raise PluginError(f"{name}: {error}") from error
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise PluginError(f"{name} cannot be run on a paged KV cache ({type(error).__name__}: {error})") from error
    layers = sorted(first.seen)
    if not layers or layers != list(range(model.config.get_text_config().num_hidden_layers)):
        raise PluginError(f"{name}: only layers {layers} use transformers' attention interface; the others are unknown")
    if row.shape != other.shape or row.ndim != 1:
        raise PluginError(f"{name} does not select logits rows (logits_to_keep)")
    if (row - other).abs().max() > 1e-2 * row.abs().max():
        raise PluginError(f"{name} mixes tokens outside attention (a state or a convolution); it cannot be run")
    return tuple(first.seen[layer] for layer in layers)


def _probed_row(
    model: transformers.PreTrainedModel, slot: StepSlot, probe: Probe, first_token: int, device: torch.device
) -> torch.Tensor:
    """Logits [V] of the second of two tokens."""
    with slot.during(probe):
        output = model(
            input_ids=torch.tensor([[first_token, 1]], device=device),
            position_ids=torch.arange(2, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=device),
        )
    logits: torch.Tensor = output.logits
    return logits.float().squeeze(1).squeeze(0)


class _QuantizedLinear(nn.Module):
    """A linear layer kept by the quant method. Takes [..., in]."""

    def __init__(self, linear: Linear, in_features: int, out_features: int):
        super().__init__()
        self.linear = linear
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def _replace_linears(model: transformers.PreTrainedModel, quant: QuantMethod) -> None:
    """Give each linear layer to the quant method. Experts held as one tensor stay as they are.

    The output projection goes by `lm_head` in every family, so that a quant method can tell it from the others.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in found:
        bias = None if module.bias is None else module.bias.detach()
        linear = quant.linear("lm_head" if module is head else name, module.weight.detach(), bias)
        model.set_submodule(name, _QuantizedLinear(linear, module.in_features, module.out_features))
