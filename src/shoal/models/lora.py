"""LoRA through PEFT: attach or load an adapter, and switch between slots. Files stay in PEFT's format.

`export_folder` writes a model folder with the adapter merged, the tokenizer and a model card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.core.errors import ModelError
from shoal.models.load import load_model
from shoal.models.multimodal import copy_processor, excluded_from_adapters
from shoal.models.quantize import lora_layers
from shoal.models.tokenizer import load_tokenizer, locate
from shoal.runs.weight_files import template_of

if TYPE_CHECKING:
    from peft import PeftModel


TRAINED = "default"
REFERENCE = "reference"
SAMPLER = "sampler"
# Types whose Mamba layers PEFT refuses to adapt at the output: their kernels read that weight directly.
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@dataclass(frozen=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None  # None = every linear layer except the head
    adapter_path: str | None = None


def attach(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wrap the model. A given adapter is loaded twice: one copy is trained, a frozen copy is the reference."""
    # Adapters have the model's dtype; the optimizer holds fp32 masters, as for every other parameter.
    from peft import LoraConfig, get_peft_model  # takes a second to import

    if settings.adapter_path is not None:
        return _from_adapter(model, settings.adapter_path)
    targets = "all-linear" if settings.target_modules is None else list(settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
        exclude_modules=_never_adapted(model),
        task_type="CAUSAL_LM",
    )
    config._register_custom_module(lora_layers())
    try:
        # PEFT leaves new layers in training mode; dropout must be off for sampling.
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    except ValueError as error:
        raise ModelError(f"train.lora_target_modules: {targets!r} match no layer of {type(model).__name__}") from error
    return _in_order(wrapped).eval()  # type: ignore[arg-type,return-value]


def _never_adapted(model: Any) -> str | None:
    """A pattern of modules without adapters: parts besides the text, and what PEFT does not support."""
    mamba = r"(.*\.)?(out_proj|conv1d)" if getattr(model.config, "model_type", None) in MAMBA else None
    return "|".join(filter(None, (excluded_from_adapters(model), mamba))) or None


def _in_order(model: PeftModel) -> PeftModel:
    """Sort the sets in PEFT's configs: their order is random, and equal runs must write equal files."""
    for config in model.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))
    return model


def _from_adapter(model: nn.Module, folder: str) -> PeftModel:
    folder = str(Path(folder).expanduser())
    if not (Path(folder) / "adapter_config.json").exists():
        raise ModelError(f"train.adapter_path: {folder!r} has no adapter_config.json")
    from peft import LoraConfig, PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(folder)
    if isinstance(config, LoraConfig):
        config._register_custom_module(lora_layers())
    wrapped = PeftModel.from_pretrained(model, folder, config=config, is_trainable=True, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    wrapped.load_adapter(folder, REFERENCE, is_trainable=False, autocast_adapter_dtype=False)
    wrapped.set_adapter(TRAINED)
    return _in_order(wrapped).eval()


def merged(model: nn.Module, folder: str) -> nn.Module:
    """The model with an adapter added to its weights."""
    folder = str(Path(folder).expanduser())
    if not (Path(folder) / "adapter_config.json").exists():
        raise ModelError(f"{folder!r} has no adapter_config.json")
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False).merge_and_unload().eval()  # type: ignore[arg-type,operator]


def add_slot(model: PeftModel, name: str) -> None:
    """Add an adapter of the same shape, as a copy of the trained one."""
    model.add_adapter(name, model.peft_config[TRAINED], autocast_adapter_dtype=False)
    copy_slot(model, TRAINED, name)
    model.set_adapter(TRAINED)
    model.eval()


@torch.no_grad()
def copy_slot(model: PeftModel, source: str, target: str) -> None:
    tensors = dict(model.named_parameters())
    for name, value in tensors.items():
        if f".{source}." in name:
            tensors[name.replace(f".{source}.", f".{target}.")].copy_(value)


@contextmanager
def using_slot(model: PeftModel, name: str) -> Iterator[None]:
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(TRAINED)


@contextmanager
def as_reference(model: PeftModel) -> Iterator[None]:
    """The model before training: with the initial adapter if one was given, else the base model."""
    if REFERENCE in model.peft_config:
        with using_slot(model, REFERENCE):
            yield
    else:
        with model.disable_adapter():
            yield


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in a fixed order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


CARD = "README.md"


def export_folder(model: str, adapter: str | None, target: Path, card: str) -> None:
    """Write a folder that transformers loads, in the dtype of the stored weights; `card` becomes its README."""
    loaded: Any = load_model(model, _stored_dtype(model), torch.device("cpu"))
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, str(Path(adapter).expanduser())).merge_and_unload()  # type: ignore[operator]
    loaded.save_pretrained(target)
    load_tokenizer(model, template_of(adapter)).save_pretrained(target)
    copy_processor(loaded, target)
    (target / CARD).write_text(card, "utf-8")


def _stored_dtype(model: str) -> torch.dtype:
    """The dtype of the saved weights: a smaller one would round, a larger one would double the folder."""
    from transformers import AutoConfig

    if model.endswith(".gguf"):
        return torch.float32
    dtype = getattr(AutoConfig.from_pretrained(locate(model)[0], trust_remote_code=False), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
