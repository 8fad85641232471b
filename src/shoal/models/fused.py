"""The body of Llama-like models in few kernels, on the model's own modules: train and prefill mode, differentiable.

Linear layers are called as the modules they are, so adapters and quantised bases need nothing from here; norms, rotary
positions and SwiGLU between them are one kernel each. `attach` gives it to a decoder only if its layers agree with
the Hugging Face modules in fp32; otherwise the modules run, and the reason is kept in words.
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
TOLERANCE = 1e-3  # relative gap of one layer's update in fp32; a quantised base still rounds as it likes
PROBE_LENGTHS = (5, 1, 11)
MOST_HEAD = 256  # numbers of a head that attention over segments takes


@dataclass(frozen=True)
class Around:
    """What surrounds a layer: rotary positions, cos and sin [T, D], and who may see whom."""

    cos: Tensor
    sin: Tensor
    context: Context


class FusedBody:
    """`hidden` takes and gives what the Hugging Face body does; `recompute` trades a second forward for memory."""

    def __init__(self, body: nn.Module, shapes: Mapping[int, Shape], *, through_modules: bool = False) -> None:
        self._body: Any = body
        self.shapes = shapes
        self.recompute = False
        self._through_modules = through_modules  # sharded layers, whose forward is `run_layer` then: calls gather them

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """[1, T] → [1, T, hidden]."""
        from shoal.models.kernels.norm import add_norm

        body = self._body
        residual = body.embed_tokens(input_ids[0])
        around = Around(*rope_of(body, residual, position_ids), context)
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


def run_layer(layer: Any, shape: Shape, x: Tensor | None, residual: Tensor, around: Around) -> tuple[Tensor, Tensor]:
    """One layer; `x` is what the last one has still to add to the residual (None before the first)."""
    from shoal.models.kernels.norm import add_norm, norm
    from shoal.models.kernels.swiglu import swiglu

    before, after = layer.input_layernorm, layer.post_attention_layernorm
    if x is None:
        normed = norm(residual, before.weight, before.variance_epsilon)
    else:
        residual, normed = add_norm(x, residual, before.weight, before.variance_epsilon)
    mixed = _attend(layer.self_attn, shape, normed, around)
    residual, normed = add_norm(mixed, residual, after.weight, after.variance_epsilon)
    mlp = layer.mlp
    return mlp.down_proj(swiglu(mlp.gate_proj(normed), mlp.up_proj(normed))), residual


def _attend(attention: Any, shape: Shape, x: Tensor, around: Around) -> Tensor:
    from shoal.models.kernels.rotary import rotate_heads

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
    """Whether heads are rotated by their positions; in some layers of SmolLM3 they are not, and have no norms."""
    return bool(getattr(attention, "use_rope", True))


def why_not(decoder: Decoder) -> str | None:
    """What keeps a model from running in few kernels, in words; None if nothing does."""
    if not kernels.available(decoder.device.type == "cuda"):
        return "there is no Triton for this device"
    if decoder.dtype == torch.float64:
        return "the kernels sum in fp32"
    config, body = decoder.config, _layers(decoder)
    if decoder.name not in FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return f"{decoder.name} is none of {', '.join(FAMILIES)}"
    if getattr(config, "attention_dropout", 0.0):
        return "the model drops attention out"
    if not all("RMSNorm" in type(layer.input_layernorm).__name__ for layer in body):
        return "its norms are not RMSNorm"
    size = int(body[0].self_attn.head_dim)
    if size & (size - 1) or size > MOST_HEAD:
        return f"its heads of {size} numbers are no power of two up to {MOST_HEAD}"
    return None


TURNS_BY_LENGTH = "its rotation depends on the length of the text"


def turns_by_length(decoder: Decoder) -> bool:
    """Whether the rotation of heads depends on how long the longest text is: then nothing may be captured or padded."""
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") in ("dynamic", "longrope")


@torch.no_grad()
def attach(decoder: Decoder, layers: Mapping[int, LayerShape]) -> str:
    """Give the decoder a fused body if it may have one; returns how it runs, in words."""
    reason = why_not(decoder)
    if reason is None:
        shapes = {index: layer.attention for index, layer in layers.items() if layer.attention is not None}
        gap, reason = compared(decoder, lambda: _gap(decoder, shapes))
        if reason is None:
            decoder.fused = FusedBody(decoder.body, shapes)
            return f"few kernels, {gap:.0e} from {decoder.name}'s own in fp32"
    return f"its own modules: {reason}"


def compared(decoder: Decoder, find_gap: Callable[[], float]) -> tuple[float, str | None]:
    """How far the kernels are from a model's own layers, and why they may not stand in for them, if so."""
    try:
        gap = find_gap()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel cannot do on this device, the modules can
        log.warning("the kernels could not be compared with %s", decoder.name, exc_info=True)
        return float("inf"), f"its layers cannot run in few kernels here ({first_line(error)})"
    return gap, None if gap < TOLERANCE else f"a layer differs from {decoder.name}'s own by {gap:.1e} in fp32"


def _gap(decoder: Decoder, shapes: Mapping[int, Shape]) -> float:
    body = _layers(decoder)
    return max(_layer_gap(decoder, body[i], shapes[i]) for i in probed(body, shapes))


def probed(layers: Any, shapes: Mapping[int, Shape]) -> list[int]:
    """Which layers are compared: first, middle, last, and one of every way to attend. The rest are built the same."""
    first_of = {(shapes[i], turns(layers[i].self_attn)): i for i in sorted(shapes, reverse=True)}
    return sorted({0, len(shapes) // 2, len(shapes) - 1, *first_of.values()})


def _layers(decoder: Decoder) -> Any:
    return decoder.body.layers


def _layer_gap(decoder: Decoder, layer: nn.Module, shape: Shape) -> float:
    """What a layer adds to its input, both ways, on a copy in fp32: relative gap over a packed row of three."""
    twin: Any = fp32_copy(layer)
    starts = np.concatenate([[0], np.cumsum(PROBE_LENGTHS)])
    positions = torch.cat([torch.arange(n, device=decoder.device) for n in PROBE_LENGTHS])[None]
    x = probe(len(positions[0]), decoder)
    around = Around(*rope_of(decoder.body, x, positions), Packed(starts, decoder.device))
    expected = own_layer(twin, x[None], positions, around)[0] - x
    added, residual = run_layer(twin, shape, None, x, around)
    return relative_gap(residual + added - x, expected)


def fp32_copy(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).float().eval()


def probe(rows: int, decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, decoder.config.hidden_size, generator=generator).to(decoder.device)


def own_layer(layer: Any, x: Tensor, positions: Tensor, around: Around) -> Tensor:
    """The Hugging Face layer itself: [B, T, hidden] in and out, positions [B, T]."""
    embeddings = tuple(t.view(*x.shape[:2], -1) for t in (around.cos, around.sin))
    out = layer(x, attention_mask=None, position_ids=positions, position_embeddings=embeddings, shoal=around.context)
    return out[0] if isinstance(out, tuple) else out


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9))
