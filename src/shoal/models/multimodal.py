"""Checkpoints with a vision tower, trained as text models: the other parts are loaded, frozen and written back.

Used when a model is loaded (`load.py`), wrapped by an adapter (`lora.py`) and saved (`trainer/checkpoint.py`).
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import cached_file

log = logging.getLogger(__name__)
# By model_type; `make test-models` proves each one.
SUPPORTED = frozenset(
    ("gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
)
# What a processor loads besides the tokenizer's files.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def is_multimodal(config: Any) -> bool:
    return any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config"))


def auto_class(config: Any) -> Any:
    """The class that loads all parts: for some types, AutoModelForCausalLM would drop the vision tower."""
    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def other_parts(model: Any) -> list[str]:
    """Names of the largest submodules without a parameter of the text decoder or the output head."""
    if not is_multimodal(model.config):
        return []
    text = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    return _outside(model, text, "")


def _outside(module: nn.Module, text: set[int], prefix: str) -> list[str]:
    found = []
    for name, child in module.named_children():
        own = {id(p) for p in child.parameters()}
        if own and not own & text:
            found.append(prefix + name)
        elif own - text:
            found += _outside(child, text, f"{prefix}{name}.")
    return found


def freeze_other_parts(model: Any) -> None:
    """Frozen parameters have no fp32 masters, no moments and no gradients."""
    parts = other_parts(model)
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    if parts:
        log.warning("%s is trained on text only; frozen: %s", type(model).__name__, ", ".join(parts))


def excluded_from_adapters(model: Any) -> str | None:
    """A pattern of all modules that must not be adapted, as PEFT's `exclude_modules`."""
    parts = other_parts(model)
    return rf"(.*\.)?({'|'.join(map(re.escape, parts))})(\..*)?" if parts else None


def copy_processor(model: Any, folder: Path) -> None:
    """Copy the image processor's files from where the model was loaded, if they are there."""
    if not is_multimodal(model.config) or not model.name_or_path:
        return
    for name in PROCESSOR_FILES:
        found = cached_file(
            model.name_or_path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
        if found is not None:
            shutil.copyfile(found, folder / name)
