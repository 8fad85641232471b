"""Small random models of every tested architecture: two layers and the vocabulary of the character tokenizer.

Windows are shorter than the prompts of the tests and soft-caps are low, so that an implementation that ignores either
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from shoal.models import fp8_linear as hybrid
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.lora import LoraSettings, attach
from shoal.models.quantize import quantise_linears
from shoal.models.random_models import character_tokenizer

# As Shoal does for models of this size. Results then do not depend on the number of cores.
torch.set_num_threads(1)

TOKENIZER = character_tokenizer()
VOCABULARY = len(TOKENIZER)
EOS = 2  # <|im_end|>
WINDOW = 12

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_GEMMA: dict[str, Any] = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, head_dim=32),
    "llama-tied": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layer_interval=2),  # its second layer has no rotary embedding
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=32, sliding_window=WINDOW),
    "granite": lambda: GraniteConfig(
        **_SHAPE, logits_scaling=0.5, residual_multiplier=0.7, embedding_multiplier=1.5, attention_multiplier=0.3
    ),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE, **_GEMMA, **_MIXED, head_dim=32, attn_logit_softcapping=4.0, final_logit_softcapping=5.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, **_GEMMA, **_MIXED, head_dim=32),
}
ARCHITECTURES = tuple(CONFIGS)


def small_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, wild: bool = False, **overrides: Any
) -> Any:
    """A Hugging Face model with seeded random weights. `overrides` change its config.

    `wild` weights are so large that greedy text does not repeat itself, but rounding errors grow. Other weights have
    the size of trained ones, where log-probs are exact to six digits.
    """
    config = CONFIGS[name]()
    for key, value in overrides.items():
        setattr(config, key, value)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed, wild).to(dtype).eval()
    return in_float64(model) if dtype == torch.float64 else model


def in_float64(model: Any) -> Any:
    """Transformers computes every RMSNorm in fp32 for any dtype. A test to 1e-10 needs float64 everywhere."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = partial(_rms_norm, module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    return model


def _rms_norm(module: Any, offset: float, hidden: torch.Tensor) -> torch.Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * (module.weight + offset)


@torch.no_grad()
def randomise(model: Any, seed: int, wild: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed)
    gemma = "gemma" in model.config.model_type
    for name, parameter in model.named_parameters():
        mean, std = (0.0, 0.25 if wild else 0.1) if parameter.ndim >= 2 else (1.0, 0.1)
        if gemma and not wild:
            mean = 0.0  # Gemma's norms multiply by 1 + weight
        if gemma and "embed_tokens" in name:
            std = (
                0.01 if wild else 0.03
            )  # Gemma multiplies embeddings by sqrt(hidden); large ones only repeat themselves
        if gemma and name == "model.norm.weight":
            mean = 12.0 if wild else 3.0
        if wild and name.endswith(("q_norm.weight", "k_norm.weight")):
            mean = 2.0  # sharp attention: the attended token decides the next token
        if name.endswith(".bias"):
            mean = 0.0
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))
    return model


# For Triton's interpreter, whose time grows with heads and widths.
LEAST = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def small_decoder(name: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Decoder:
    """A verified decoder, ready to sample and train."""
    return as_decoder(small_model(name, seed, dtype, **overrides))


def as_decoder(model: Any) -> Decoder:
    decoder = Decoder(model)
    decoder.verify()
    return decoder


def layer_shapes(decoder: Decoder) -> dict[int, LayerShape]:
    return decoder.verify()


def lora_decoder(
    name: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    stored: str | None = None,
    device: str = "cpu",
    overrides: dict[str, Any] | None = None,
    **settings: Any,
) -> Decoder:
    """The same with LoRA and a non-zero adapter (PEFT starts with B = 0, which changes nothing).

    `stored` is the format of a quantised base. `overrides` change the config of the model.
    """
    model = small_model(name, seed, dtype, **(overrides or {}))
    if stored is not None:
        quantise_linears(model, stored, torch.device(device))
    decoder = as_decoder(model.to(device))
    torch.manual_seed(seed)
    wrapped = Decoder(attach(decoder.model, LoraSettings(**{"rank": 4, "alpha": 8, **settings})))
    if settings.get("adapter_path") is None:
        shake_adapter(wrapped, seed)
    return wrapped


def hybrid_decoder(
    name: str, lora: bool, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cuda"
) -> Decoder:
    """In fp8-hybrid, by default on a GPU."""
    pytest.importorskip("torchao", reason="an extra")
    decoder = as_decoder(small_model(name, dtype=dtype).to(device))
    assert hybrid.convert(decoder.model) == 14
    if not lora:
        return Decoder(decoder.model)
    torch.manual_seed(0)
    wrapped = Decoder(attach(decoder.model, LoraSettings(rank=4, alpha=8)))
    shake_adapter(wrapped, 0)
    return wrapped


@torch.no_grad()
def shake_adapter(decoder: Decoder, seed: int, std: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for p in decoder.model.parameters() if p.requires_grad):
        parameter.add_((std * torch.randn(parameter.shape, generator=generator)).to(parameter))


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Ids without special tokens, one prompt per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(14, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
