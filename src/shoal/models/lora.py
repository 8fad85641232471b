"""LoRA through peft: attach an adapter, read one, switch between slots. Files stay in PEFT's own format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models.quantised import lora_layers

if TYPE_CHECKING:
    from peft import PeftModel

TRAINED = "default"
REFERENCE = "reference"
SAMPLER = "sampler"


@dataclass(frozen=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None  # None = every linear layer but the head
    adapter_path: str | None = None


def attach(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wrap the model. An adapter given as a start is loaded twice: once to train, once, frozen, as the reference."""
    # Adapters are kept in the model's own dtype; the optimizer holds fp32 masters, as for every other parameter.
    from peft import LoraConfig, get_peft_model  # a second that only runs with adapters spend

    if settings.adapter_path is not None:
        return _from_adapter(model, settings.adapter_path)
    targets = "all-linear" if settings.target_modules is None else list(settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module(lora_layers())
    try:
        # PEFT leaves new layers in training mode, and a sampler must not drop anything out.
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    except ValueError as error:
        raise ModelError(f"train.lora_target_modules {targets!r} match no layer of {type(model).__name__}") from error
    return _in_order(wrapped).eval()  # type: ignore[arg-type,return-value]


def _in_order(model: PeftModel) -> PeftModel:
    """PEFT keeps names as sets and writes them in the order of the day; equal runs are to write equal files."""
    for config in model.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))
    return model


def _from_adapter(model: nn.Module, folder: str) -> PeftModel:
    folder = str(Path(folder).expanduser())
    if not (Path(folder) / "adapter_config.json").exists():
        raise ModelError(f"train.adapter_path: {folder!r} holds no adapter_config.json")
    from peft import LoraConfig, PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(folder)
    if isinstance(config, LoraConfig):
        config._register_custom_module(lora_layers())
    wrapped = PeftModel.from_pretrained(model, folder, config=config, is_trainable=True, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    wrapped.load_adapter(folder, REFERENCE, is_trainable=False, autocast_adapter_dtype=False)
    wrapped.set_adapter(TRAINED)
    return _in_order(wrapped).eval()


def add_slot(model: PeftModel, name: str) -> None:
    """A second adapter of the same shape, equal to the trained one now."""
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
    """The model before training: the start adapter if one was given, else the bare base."""
    if REFERENCE in model.peft_config:
        with using_slot(model, REFERENCE):
            yield
    else:
        with model.disable_adapter():
            yield


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter the optimizer moves, in a fixed order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
