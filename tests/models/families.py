"""A tiny random model of every causal-LM architecture in transformers: four layers, hidden size 64.

Sizes are set by the names of config fields. Windows, chunks and top-k limits are shorter than the texts of the tests,
so that an implementation that ignores them fails.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.models import EOS, VOCABULARY

WINDOW = 12
LAYERS = 4
MOST_PARAMETERS = 10_000_000

# Types of the registry that are not decoder-only text models: encoder-decoders, speech, images, parts of other models.
NO_DECODERS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "prophetnet", "trocr", "whisper", "musicgen", "musicgen_melody", "moshi", "moss_transcribe_diarize", "git",
    "got_ocr2", "fuyu", "emu3", "mllama", "phi4_multimodal", "gemma4_assistant", "gemma4_unified_assistant",
    "gemma3n", "gemma4_unified", "qwen4_exp", "reformer", "xlm", "xlnet", "blt",
}  # fmt: skip


_HIDDEN = ("hidden_size", "d_model", "n_embd", "attention_hidden_size", "embedding_size")
_WIDE = ("intermediate_size", "ffn_dim", "n_inner", "dff", "dim_ff", "ffn_hidden_size", "shared_intermediate_size")
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_WIDE, 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels", "dim_head", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "vocab_size": VOCABULARY,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "index_n_heads": 4,
    "index_topk": 16,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 16,
    "state_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"] * 2
_GATED = ["linear_attention", "full_attention"] * 2

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# Additional fields of a family.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _GATED, "head_dim": 16},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cwm": {"bos_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "layer_types": _MIXED, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "vocab_size_per_layer_input": VOCABULARY, "intermediate_size": [128] * LAYERS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": _MIXED, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": _GATED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {"layer_types": _GATED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"], "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {"layer_types": _GATED},
    "qwen3_5_moe_text": {"layer_types": _GATED},
    "qwen3_5_text": {"layer_types": _GATED},
    "qwen3_next": {"layer_types": _GATED},
    "qwen2_5_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
    # Only the cache of `generate` reads the window, not the model. Square matrices of experts are refused.
    "qwen3_vl_moe_text": {"sliding_window": None, "moe_intermediate_size": 48},
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim"), 32), "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14, "num_position_embeddings": 16, "position_embedding_size": 16, "global_head_dim": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1],
}  # fmt: skip
# Checkpoints with a vision tower: type of the complete model → type of its text part, and fields of the complete model.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", {}),
    "mistral3": ("mistral", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "llama4": ("llama4_text", {}),
}


FAMILIES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL} - NO_DECODERS))


Fields = dict[str, Any]


def tiny_config(name: str, sizes: Fields | None = None, own: Fields | None = None) -> PreTrainedConfig:
    """`sizes` replace usual values of fields that the text part has; `own` are additional fields of the text part."""
    if name in MULTIMODAL:
        return _tiny_multimodal(name, sizes, own)
    kind = CONFIG_MAPPING[name]
    return kind(**{**_tiny_fields(kind, {**_SMALL, **(sizes or {})}), **_OWN.get(name, {}), **(own or {})})


def _tiny_fields(kind: Any, small: dict[str, Any]) -> dict[str, Any]:
    known = kind().to_dict()
    values = {key: value for key, value in small.items() if key in known}
    if set(known.get("layer_types") or ()) == set(_MIXED):
        values["layer_types"] = _MIXED
    if "qk_rope_head_dim" in values:  # latent attention: `head_dim` is the size of the rotated part
        values.pop("head_dim", None)
        values["num_key_value_heads"] = small["num_attention_heads"]
    return values


def _tiny_multimodal(name: str, sizes: Fields | None, own_text: Fields | None) -> PreTrainedConfig:
    kind: Any = CONFIG_MAPPING[name]
    text, own = MULTIMODAL[name]
    vision = kind.sub_configs["vision_config"]
    vision = type(kind().vision_config) if not hasattr(vision, "model_type") or vision.model_type == "" else vision
    text_config = tiny_config(text, sizes, own_text)
    ids = {key: VOCABULARY + i for i, key in enumerate(_token_ids(kind()))}
    return kind(
        text_config=text_config,
        vision_config=vision(**_tiny_fields(vision, _VISION)),
        tie_word_embeddings=False,
        **ids,
        **own,
    )


def _token_ids(config: PreTrainedConfig) -> list[str]:
    """The ids of image and audio placeholders. They are outside the vocabulary, so no text contains them."""
    marks = ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")
    return [k for k in config.to_dict() if k.endswith(("token_id", "token_index")) and k.startswith(marks)]


def build(name: str, seed: int = 0, sizes: Fields | None = None, own: Fields | None = None) -> Any:
    torch.manual_seed(seed)
    auto: Any = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    config = tiny_config(name, sizes, own)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    assert size < MOST_PARAMETERS, f"{name} has {size:,} parameters"
    return shake(auto.from_config(config, dtype=torch.float32), seed).eval()


@torch.no_grad()
def shake(model: Any, seed: int) -> Any:
    """Matrices with standard deviation .1. Vectors keep their initial values, such as decay rates of state layers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise if parameter.ndim >= 2 else parameter + noise)
    return model
