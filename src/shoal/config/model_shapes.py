"""Model shapes for `train.model: shape:NAME`, `make-model --shape` and `shoal plan`: arguments of transformers configs.

models/random_models.py builds the models.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
