"""The fused path of Llama-like models for training and prefill, differentiable.

Linear layers are called as modules, so adapters and quantised weights work unchanged. Norms, rotary embeddings and
SwiGLU between them are one Triton kernel each. `attach` enables the path only if it agrees with the Hugging Face
modules in fp32; otherwise the modules run, and the reason is logged.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models import kernels
from shoal.models.attention import Context, Packed, Shape
from shoal.models.tokenizer import first_line

if TYPE_CHECKING:
    from shoal.models.decoder import Decoder, LayerShape

log = logging.getLogger(__name__)
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")
TOLERANCE = 1e-3  # max relative error of one layer's update in fp32
PROBE_LENGTHS = (5, 1, 11)
MOST_HEAD = 256  # largest head_dim that varlen attention supports


@dataclass(frozen=True)
class LayerNorms:
    """Inputs shared by all layers: rotary cos and sin [T, D], and the attention context."""

    cos: Tensor
    sin: Tensor
    context: Context


class FusedBody:
    """`hidden` replaces the forward of the Hugging Face body. `recompute` enables activation checkpointing."""

    def __init__(self, body: nn.Module, shapes: Mapping[int, Shape], *, through_modules: bool = False) -> None:
        self._body: Any = body
        self.shapes = shapes
        self.recompute = False
        self._through_modules = through_modules  # sharded: calling a layer gathers its weights

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """[1, T] → [1, T, hidden]."""
        from shoal.models.kernels.elementwise import add_norm

        body = self._body
        residual = body.embed_tokens(input_ids[0])
        around = LayerNorms(*rope_of(body, residual, position_ids), context)
        x = None
        for index, layer in enumerate(body.layers):
            run = layer if self._through_modules else partial(run_layer, layer)
            arguments = (self.shapes[index], x, residual, around)
            if self.recompute and torch.is_grad_enabled():
                x, residual = checkpoint(run, *arguments, use_reentrant=False)  # type: ignore[misc]
            else:
                x, residual = run(*arguments)
        assert x is not None
        return add_norm(x, residual, body.norm.weight, body.norm.variance_epsilon)[1][None]


def rope_of(body: Any, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, D] each, in the dtype of `like`."""
    cos, sin = body.rotary_emb(like[None], position_ids)
    return cos[0].contiguous(), sin[0].contiguous()


def run_layer(
    layer: Any, shape: Shape, x: Tensor | None, residual: Tensor, around: LayerNorms
) -> tuple[Tensor, Tensor]:
    """Run one layer. `x` is the previous layer's output, not yet added to `residual` (None for the first layer)."""
    from shoal.models.kernels.elementwise import add_norm, norm, swiglu

    before, after = layer.input_layernorm, layer.post_attention_layernorm
    if x is None:
        normed = norm(residual, before.weight, before.variance_epsilon)
    else:
        residual, normed = add_norm(x, residual, before.weight, before.variance_epsilon)
    mixed = _attend(layer.self_attn, shape, normed, around)
    residual, normed = add_norm(mixed, residual, after.weight, after.variance_epsilon)
    mlp = layer.mlp
    return mlp.down_proj(swiglu(mlp.gate_proj(normed), mlp.up_proj(normed))), residual


def _attend(attention: Any, shape: Shape, x: Tensor, around: LayerNorms) -> Tensor:
    from shoal.models.kernels.elementwise import rotate_heads

    tokens, dim = len(x), attention.head_dim
    query, key, value = (
        projection(x).view(tokens, -1, dim) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    heads: list[Tensor] = []
    for head, name in ((query, "q_norm"), (key, "k_norm")) if turns(attention) else ():
        own = getattr(attention, name, None)
        weight, eps = (own.weight, own.variance_epsilon) if own is not None else (None, 0.0)
        heads.append(rotate_heads(head, around.cos, around.sin, weight, eps))
    q, k, v = (head.transpose(0, 1)[None] for head in (*(heads or (query, key)), value))  # [1, H, T, D]
    mixed = around.context.attend(int(attention.layer_idx), q, k, v, shape)
    return attention.o_proj(mixed[0].flatten(1))


def turns(attention: Any) -> bool:
    """Whether the layer uses rotary embeddings; some layers of SmolLM3 do not, and have no head norms."""
    return bool(getattr(attention, "use_rope", True))


def why_not(decoder: Decoder) -> str | None:
    """Why the model cannot take the fused path, or None if it can."""
    if not kernels.available(decoder.device.type == "cuda"):
        return "there is no Triton for this device"
    if decoder.dtype == torch.float64:
        return "the fused kernels accumulate in fp32, the model is in fp64"
    config = decoder.config
    if decoder.name not in FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return f"{decoder.name} is not one of {', '.join(FAMILIES)}"
    body = _layers(decoder)  # after the check of the family: bodies of other families may have no `layers`
    if getattr(config, "attention_dropout", 0.0):
        return "the model uses attention dropout"
    if not all("RMSNorm" in type(layer.input_layernorm).__name__ for layer in body):
        return "its norms are not RMSNorm"
    size = int(body[0].self_attn.head_dim)
    if size & (size - 1) or size > MOST_HEAD:
        return f"head_dim {size} is not supported; it must be a power of two ≤ {MOST_HEAD}"
    return None


TURNS_BY_LENGTH = "its rotary embedding depends on the text length"


def turns_by_length(decoder: Decoder) -> bool:
    """Whether rotary embeddings depend on the longest text of a batch; such models cannot use CUDA graphs."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ("dynamic", "longrope")


@torch.no_grad()
def attach(decoder: Decoder, layers: Mapping[int, LayerShape]) -> str:
    """Set `decoder.fused` if the model supports it; returns a description of the path taken."""
    reason = why_not(decoder)
    if reason is None:
        shapes = {index: layer.attention for index, layer in layers.items() if layer.attention is not None}
        gap, reason = compared(decoder, lambda: _gap(decoder, shapes))
        if reason is None:
            decoder.fused = FusedBody(decoder.body, shapes)
            return fused_path(gap, decoder)
    return f"model modules: {reason}"


def fused_path(gap: float, decoder: Decoder) -> str:
    return f"fused kernels (max relative error {gap:.0e} vs {decoder.name}, fp32)"


def compared(decoder: Decoder, find_gap: Callable[[], float]) -> tuple[float, str | None]:
    """The error of the fused path against the model's own layers, and the reason to reject it, if any."""
    try:
        gap = find_gap()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel that cannot run here: the modules still can
        log.warning("the fused kernels could not be compared with %s", decoder.name, exc_info=True)
        return float("inf"), f"the fused kernels failed on this device ({first_line(error)})"
    return gap, None if gap < TOLERANCE else f"a fused layer differs from {decoder.name} by {gap:.1e} (fp32)"


def _gap(decoder: Decoder, shapes: Mapping[int, Shape]) -> float:
    body = _layers(decoder)
    return max(_layer_gap(decoder, body[i], shapes[i]) for i in probed(body, shapes))


def probed(layers: Any, shapes: Mapping[int, Shape]) -> list[int]:
    """Layers to compare: first, middle, last, and one per attention shape. The rest have the same structure."""
    first_of = {(shapes[i], turns(layers[i].self_attn)): i for i in sorted(shapes, reverse=True)}
    return sorted({0, len(shapes) // 2, len(shapes) - 1, *first_of.values()})


def _layers(decoder: Decoder) -> Any:
    return decoder.body.layers


def _layer_gap(decoder: Decoder, layer: nn.Module, shape: Shape) -> float:
    """Relative error of one layer's update, on an fp32 copy and a packed row of three segments."""
    twin: Any = fp32_copy(layer)
    starts = np.concatenate([[0], np.cumsum(PROBE_LENGTHS)])
    positions = torch.cat([torch.arange(n, device=decoder.device) for n in PROBE_LENGTHS])[None]
    x = probe(len(positions[0]), decoder)
    around = LayerNorms(*rope_of(decoder.body, x, positions), Packed(starts, decoder.device))
    expected = own_layer(twin, x[None], positions, around)[0] - x
    added, residual = run_layer(twin, shape, None, x, around)
    return relative_gap(residual + added - x, expected)


def fp32_copy(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).float().eval()


def probe(rows: int, decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, decoder.config.hidden_size, generator=generator).to(decoder.device)


def own_layer(layer: Any, x: Tensor, positions: Tensor, around: LayerNorms) -> Tensor:
    """The Hugging Face layer itself: [B, T, hidden] in and out, positions [B, T]."""
    embeddings = tuple(t.view(*x.shape[:2], -1) for t in (around.cos, around.sin))
    out = layer(x, attention_mask=None, position_ids=positions, position_embeddings=embeddings, shoal=around.context)
    return out[0] if isinstance(out, tuple) else out


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9))
