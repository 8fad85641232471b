"""A folder to publish: an adapter merged into its base, tokenizer beside it, and a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from shoal.models.load import load_model, load_tokenizer
from shoal.models.tokenizer import locate

CARD = "README.md"


def export_folder(model: str, adapter: str | None, target: Path, card: str) -> None:
    """Weights as transformers load them, in the dtype they were stored in; `card` is written as the folder's README."""
    loaded: Any = load_model(model, _stored_dtype(model), torch.device("cpu"))
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, str(Path(adapter).expanduser())).merge_and_unload()  # type: ignore[operator]
    loaded.save_pretrained(target)
    load_tokenizer(model).save_pretrained(target)
    (target / CARD).write_text(card, "utf-8")


def _stored_dtype(model: str) -> torch.dtype:
    """What the weights were saved in: merging in less would round, in more would double the folder."""
    from transformers import AutoConfig

    if model.endswith(".gguf"):
        return torch.float32
    dtype = getattr(AutoConfig.from_pretrained(locate(model)[0], trust_remote_code=False), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
