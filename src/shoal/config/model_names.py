"""Model names and shapes: what `train.model` refers to (a shape, a folder, a GGUF file or a hub id). Loads nothing.

The rules refuse a missing path before anything starts, and models/tokenizer.py before it requests a file from the hub.
Shapes are arguments of transformers configs, for `shape:NAME`, `make-model --shape` and `shoal plan`;
models/random_models.py builds the models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.fields import nearest
from shoal.config.problems import show

PREFIX = "shape:"


@dataclass(frozen=True)
class ModelShape:
    """The config class of transformers and its arguments. Without a vocabulary size: that of the tokenizer."""

    config: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _shape(config: str, **arguments: Any) -> ModelShape:
    return ModelShape(config, arguments)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_LLAMA_3 = {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_parameters": _rope(500_000.0)}
_QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "rope_parameters": _rope(1_000_000.0)}
SHAPES: dict[str, ModelShape] = {
    # Three layers, wide initial weights, and a small rotary base that separates the positions of short texts.
    "tiny": _shape(
        "Qwen3Config", hidden_size=128, intermediate_size=384, num_hidden_layers=3, initializer_range=0.04,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=True, rope_parameters=_rope(100.0),
    ),
    "smollm2-135m": _shape(
        "LlamaConfig", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, vocab_size=49_152, max_position_embeddings=8192,
        rope_parameters=_rope(100_000.0),
    ),
    "qwen3-0.6b": _shape(
        "Qwen3Config", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **_QWEN,
    ),
    "qwen2.5-0.5b": _shape(
        "Qwen2Config", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, **_QWEN,
    ),
    "qwen2.5-7b": _shape(
        "Qwen2Config", hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, **_QWEN,
    ),
    "llama-3-8b": _shape(
        "LlamaConfig", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False, **_LLAMA_3,
    ),
    "llama-3-70b": _shape(
        "LlamaConfig", hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False, **_LLAMA_3,
    ),
    "qwen3.5-0.8b": _shape(
        "Qwen3_5TextConfig", vocab_size=248_320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, tie_word_embeddings=True,
        rope_parameters={**_rope(10_000_000.0), "partial_rotary_factor": 0.25},
    ),
    "qwen3-30b-a3b": _shape(
        "Qwen3MoeConfig", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        tie_word_embeddings=False, **_QWEN,
    ),
    "gemma-3-4b": _shape(
        "Gemma3TextConfig", vocab_size=262_208, hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
        rope_parameters={
            "sliding_attention": _rope(10_000.0),
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    ),
    "gpt-oss-20b": _shape("GptOssConfig", vocab_size=201_088, num_hidden_layers=24, num_local_experts=32),
}  # fmt: skip


def shape_of(model: str) -> str | None:
    """The name after `shape:`; None for a model with files."""
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else None


def shape_problem(name: str) -> tuple[str, str] | None:
    """(problem, remedy) if there is no such shape, else None."""
    if name in SHAPES:
        return None
    near = difflib.get_close_matches(name, SHAPES, n=1)
    return f"there is no shape {name!r}", f"did you mean {near[0]}?" if near else f"known: {', '.join(SHAPES)}"


GGUF = ".gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")


def model_problem(model: str) -> tuple[str, str] | None:
    """(problem, remedy) if there is no such local model or shape, else None."""
    if (shape := shape_of(model)) is not None:
        return shape_problem(shape)
    path = expanded(model)
    if not _exists(path):
        return missing_path(model)
    if path.is_file():
        what = f"{show(model)} is a file without the suffix {GGUF}"
        return None if path.suffix == GGUF else (what, "use the model folder")
    return _folder_problem(model, path)


def missing_path(model: str) -> tuple[str, str] | None:
    """(problem, remedy) if `model` is a path and nothing exists there, else None."""
    if _may_be_hub_id(model) or _exists(expanded(model)):
        return None
    return f"{show(model)} does not exist", similar_path(model) or (
        "check the path; `shoal make-model tiny DIR` builds a small model"
    )


def similar_path(text: str) -> str | None:
    """The existing path that `text` most likely means, as the remedy of a message; None without a similar name.

    Each component that does not exist is replaced by its nearest neighbour in the folder. If only the first components
    can be followed, the message names that folder.
    """
    found = Path(expanded(text).anchor)
    for part in expanded(text).relative_to(found).parts:
        entry = part if _exists(found / part) else nearest(part, _models_in(found))
        if entry is None:
            return f"the nearest existing folder is {_path(found)}" if found.name else None
        found = found / entry
    return f"did you mean {_path(found)}?"


def _folder_problem(model: str, folder: Path) -> tuple[str, str] | None:
    if (folder / "config.json").is_file():
        return None
    what = f"{show(model)} is a run directory, not a model"
    if (folder / "final" / "adapter_config.json").is_file():
        return what, f"use its base model, with train.lora=true and train.adapter_path={folder / 'final'}"
    if (folder / "final").is_dir():
        return what, f"use its weights: {_path(folder / 'final')}"
    return f"{show(model)} is a folder without config.json", "use a folder written by save_pretrained, or a .gguf file"


def _may_be_hub_id(model: str) -> bool:
    """False for a path, also for owner/name if there is a local folder called owner."""
    in_folder = "/" in model and Path(model.split("/")[0]).is_dir()
    return bool(_HUB_ID.match(model)) and not model.endswith(GGUF) and not in_folder


def _path(path: Path) -> str:
    """Not shortened, so that it can be copied."""
    return show(str(path), limit=4096)


def expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of an unknown user
        return Path(text)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no access, or a name that is too long
        return False


def _models_in(folder: Path) -> list[str]:
    """Names of the subfolders and GGUF files of a folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == GGUF or entry.is_dir())
    except OSError:
        return []
