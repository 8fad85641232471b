"""Loading a model and its tokenizer: a local Hugging Face folder, a hub id, or a GGUF file. Never runs remote code."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.errors import ModelError
from shoal.models.precision import Precision
from shoal.models.quantised import quantise_linears
from shoal.models.tokenizer import eos_token_ids, first_line, load_tokenizer, locate, turn_end_id

__all__ = ["adopt_model", "check_architecture", "check_config", "eos_token_ids", "load_model", "load_tokenizer"]
__all__ += ["release_model", "turn_end_id"]

# transformers builds models under a default device that all threads share, so two of them must take turns.
_LOADING = threading.Lock()
# What the attention function computes. Chunks, convolutions and states that are carried along it does not.
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def load_model(name: str, dtype: torch.dtype, device: torch.device, stored: str | None = None) -> nn.Module:
    """The model on `device` in `dtype`, in training mode off, with gradients as loaded.

    `stored` names the format its linear layers are kept in; then the device never holds them in `dtype` all at once.
    """
    folder, gguf = locate(name)
    try:
        with _LOADING:
            if gguf:
                model = _load_gguf(folder, gguf, dtype)
            else:
                check_architecture(folder)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
                if not Path(name).expanduser().exists():
                    # Of the hub, wherever it was read from: adapters name their base by it.
                    model.name_or_path = model.config.name_or_path = name
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"no model could be loaded from {name!r}: {first_line(error)}") from error
    if stored is not None:
        quantise_linears(model, stored, device)
    return model.to(device).eval()  # type: ignore[arg-type]


def adopt_model(model: Any, precision: Precision) -> nn.Module:
    """A model object of the caller's, moved to the run's device and dtype and used as it is."""
    if precision.stored is not None or precision.fp8_products:
        raise ModelError("a model given as an object is trained in its own precision; give its name for fp8 or qlora")
    if hasattr(model, "peft_config"):
        raise ModelError("the model is wrapped by PEFT; give the plain model, and ask for LoRA here")
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"the model is of type {type(model).__name__}, not a transformers model nor a name")
    check_config(model.config)
    frozen = tuple(not parameter.requires_grad for parameter in model.parameters())
    _BEFORE[model] = _Found(model.config._attn_implementation or "eager", model.training, frozen)
    return model.to(device=precision.device, dtype=precision.dtype).eval()  # type: ignore[arg-type]


def release_model(model: Any) -> None:
    """Undo what training put around and into a model object; its trained weights stay, an adapter is in the files."""
    inner = model.unload() if hasattr(model, "peft_config") else model
    found = _BEFORE.pop(inner, None)
    if found is None:
        return
    inner.set_attn_implementation(found.attention)
    inner.train(found.training)
    for parameter, frozen in zip(inner.parameters(), found.frozen, strict=True):
        parameter.requires_grad_(not frozen)


@dataclass(frozen=True)
class _Found:
    """How a model object was when it was handed over."""

    attention: str
    training: bool
    frozen: tuple[bool, ...]  # by parameter


_BEFORE: WeakKeyDictionary[Any, _Found] = WeakKeyDictionary()


def check_architecture(folder: str) -> None:
    """Refuse by name what the engine cannot sample, before any weights are read."""
    check_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def check_config(config: Any) -> None:
    architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    if getattr(config, "auto_map", None):
        raise ModelError(f"{architecture} brings its own code (auto_map), which Shoal does not run")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ModelError(f"{architecture} is a multimodal model; Shoal trains text decoders only")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} is an encoder-decoder; Shoal trains decoders only")
    kinds = set(getattr(config, "layer_types", None) or []) - _KNOWN_LAYERS
    if kinds:
        raise ModelError(f"{architecture} has {', '.join(sorted(kinds))} layers, which Shoal cannot sample")


def _load_gguf(folder: str, file: str, dtype: torch.dtype) -> nn.Module:
    # transformers marks what it read from GGUF as quantised and then refuses to save it, though the weights are plain
    # tensors by now: the same weights in a model built from a clean config know nothing of where they came from.
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    fields: dict[str, Any] = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    clean = AutoModelForCausalLM.from_config(type(loaded.config)(**fields), dtype=dtype)
    clean.load_state_dict(loaded.state_dict())
    return clean
