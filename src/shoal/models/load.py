"""Loading a model and its tokenizer: a local Hugging Face folder, a hub id, or a GGUF file. Never runs remote code."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from shoal.config.model_names import shape_of
from shoal.core.errors import ModelError, StorageError
from shoal.models.decoder import STATELESS
from shoal.models.file_layout import keep_published_orientation
from shoal.models.gguf import load_gguf, unquantised
from shoal.models.multimodal import SUPPORTED, auto_class, freeze_other_parts, is_multimodal
from shoal.models.precision import Precision
from shoal.models.quantize import quantise_linears
from shoal.models.random_models import random_model
from shoal.models.tokenizer import eos_token_ids, first_line, load_tokenizer, locate, turn_end_id

__all__ = ["adopt_model", "check_architecture", "check_config", "eos_token_ids", "load_model", "load_tokenizer"]
__all__ += ["read_converted", "release_model", "turn_end_id"]

log = logging.getLogger(__name__)
# transformers builds models under a process-wide default device, so only one thread may load at a time.
_LOADING = threading.Lock()
# Layer types that Shoal computes: attention, states, and layers that see one token at a time.
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", *STATELESS}
# By model_type: what no check of layer types or results would find.
_REFUSED = {"phimoe": "draws its experts at random in training"}


def load_model(name: str, dtype: torch.dtype, device: torch.device, stored: str | None = None) -> nn.Module:
    """Load the model onto `device` in `dtype`, in eval mode.

    `stored` names the format of quantised linear layers; the device then never holds all of them in `dtype` at once.
    """
    shape = shape_of(name)
    folder, gguf = ("", None) if shape is not None else locate(name)
    try:
        with _LOADING:
            if shape is not None:
                model = random_model(shape, dtype, device)
                model.name_or_path = model.config.name_or_path = name
            elif gguf:
                model = load_gguf(folder, gguf, dtype)
            else:
                config = check_architecture(folder)
                plain = _dequantised(config)
                model = auto_class(config).from_pretrained(folder, dtype=dtype, trust_remote_code=False, **plain)
                if plain:
                    model: Any = unquantised(model, dtype)
                keep_published_orientation(model)
                if not Path(name).expanduser().exists():
                    # The hub id, even if read from the cache: adapters refer to their base model by it.
                    model.name_or_path = model.config.name_or_path = name
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"no model could be loaded from {name!r}: {first_line(error)}") from error
    switch_off_dropout(model)
    freeze_other_parts(model)
    if stored is not None:
        quantise_linears(model, stored, device)
    return model.to(device).eval()  # type: ignore[arg-type]


def read_converted(folder: str, model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a folder that `save_pretrained` wrote, by the names of the model's parameters, in host memory."""
    try:
        with _LOADING:
            loaded, info = type(model).from_pretrained(
                folder, dtype=model.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except OSError as error:  # a file is missing or cannot be read: the version is published again
        raise StorageError(f"weights {folder}: {first_line(error)}") from error
    except Exception as error:
        raise ModelError(f"the weights in {folder!r} cannot be loaded: {first_line(error)}") from error
    missing, unknown = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing or unknown:
        raise ModelError(f"the weights in {folder!r} do not match the model: {(missing + unknown)[0]}")
    return dict(loaded.named_parameters())


def adopt_model(model: Any, precision: Precision) -> nn.Module:
    """Use a model object of the caller, moved to the run's device and dtype."""
    if precision.stored is not None or precision.fp8_products:
        raise ModelError("fp8 and qlora need the name of a model, not a model object")
    if hasattr(model, "peft_config"):
        raise ModelError("the model is already wrapped by PEFT; pass the plain model and enable LoRA in the config")
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"the model must be a name or a transformers model, not {type(model).__name__}")
    check_config(model.config)
    keep_published_orientation(model)
    frozen = tuple(not parameter.requires_grad for parameter in model.parameters())
    rates = switch_off_dropout(model)
    freeze_other_parts(model)
    _BEFORE[model] = _StateBefore(model.config._attn_implementation or "eager", model.training, frozen, rates)
    return model.to(device=precision.device, dtype=precision.dtype).eval()  # type: ignore[arg-type]


def release_model(model: Any) -> None:
    """Remove adapters and hooks from a model object. Trained weights stay; an adapter remains in the saved files."""
    inner = model.unload() if hasattr(model, "peft_config") else model
    found = _BEFORE.pop(inner, None)
    if found is None:
        return
    inner.set_attn_implementation(found.attention)
    inner.train(found.training)
    for parameter, frozen in zip(inner.parameters(), found.frozen, strict=True):
        parameter.requires_grad_(not frozen)
    for module, name, rate in found.rates:
        setattr(module, name, rate)


def switch_off_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Set the dropout and router jitter of the model itself to 0; returns the previous rates.

    The sampler runs without them, so a policy that trains with them would not match its own samples. The config keeps
    its rates, and an adapter keeps `train.lora_dropout`.
    """
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and _is_noise_rate(module, name)
    ]
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    # Attention dropout is left out of the notice: Shoal's attention never applies it.
    named = sorted({"dropout" if name == "p" else name for _, name, _ in rates} - {"attention_dropout"})
    if named:
        log.warning("%s: %s is switched off for training", type(model).__name__, ", ".join(named))
    return rates


def _is_noise_rate(module: nn.Module, name: str) -> bool:
    return "drop" in name or "jitter" in name or (name == "p" and isinstance(module, _DropoutNd))


@dataclass(frozen=True)
class _StateBefore:
    """State of a model object when it was adopted."""

    attention: str
    training: bool
    frozen: tuple[bool, ...]  # per parameter
    rates: list[tuple[nn.Module, str, float]]  # dropout and jitter: module, attribute, rate


_BEFORE: WeakKeyDictionary[Any, _StateBefore] = WeakKeyDictionary()


def check_architecture(folder: str) -> Any:
    """Refuse unsupported architectures before any weights are read; returns the model's config."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_config(config)
    return config


def check_config(config: Any) -> None:
    architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if getattr(config, "auto_map", None):
        raise ModelError(f"{architecture} needs remote code (auto_map), which Shoal does not run")
    if is_multimodal(config) and config.model_type not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        raise ModelError(f"{architecture} is a multimodal model; Shoal trains the text part of {known} only")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} is an encoder-decoder; Shoal supports decoders only")
    if reason := _REFUSED.get(str(getattr(config, "model_type", None))):
        raise ModelError(f"{architecture} {reason}, which Shoal does not support")
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - _KNOWN_LAYERS
    if kinds:
        raise ModelError(f"{architecture} has {', '.join(sorted(kinds))} layers, which Shoal cannot sample")


def _dequantised(config: Any) -> dict[str, Any]:
    """MXFP4 experts (gpt-oss) are loaded as plain weights, which can be trained and saved."""
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != "mxfp4":
        return {}
    log.warning("MXFP4 weights are dequantised: they need four times the memory, and final/ has plain weights")
    return {"quantization_config": Mxfp4Config(dequantize=True)}
