"""The decode forward of Llama-like models in few kernels, on the trainer's own parameters.

Query, key and value weights (and gate and up) are laid side by side once, and each parameter becomes a view of its
rows: one matrix product reads them together, while optimizer and checkpoint still see the originals. `make_fused` hands
this out only if it agrees with the Hugging Face modules on the loaded model; otherwise the modules decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.cache import SlotCache
from shoal.engine.kernel_context import KernelDecode
from shoal.models.attention import Shape
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.hybrid import samples_plainly

# Relative error of hidden states that rounding alone explains: in fp32, and in 16 bits.
TOLERANCE = (1e-4, 3e-2)
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass
class FusedLayer:
    module: Any
    shape: Shape
    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor


def side_by_side(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights (and biases) of linear layers as one matrix each; the parameters become views of its rows."""
    weight = _adjoin([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    return weight, _adjoin(biases) if len(biases) == len(modules) else None


@torch.no_grad()
def _adjoin(parameters: Sequence[Tensor]) -> Tensor:
    """Idempotent: parameters that already stand side by side are only looked at together."""
    first = parameters[0]
    rows = sum(len(p) for p in parameters)
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for parameter in parameters:
        # Neighbours in memory may still be two allocations; only one storage can be looked at as a whole.
        shared = parameter.untyped_storage().data_ptr() == storage
        if not shared or parameter.data_ptr() != at or not parameter.is_contiguous():
            break
        at += parameter.numel() * parameter.element_size()
    else:
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([p.data for p in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = joined[at : at + len(parameter)]
        at += len(parameter)
    return joined


class FusedDecode:
    """One decode step: [B] tokens at [B] positions → last hidden states [B, hidden]."""

    def __init__(self, decoder: Decoder, shapes: dict[int, LayerShape]) -> None:
        body: Any = decoder.body
        self._body = body
        config = decoder.config
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._heads = (config.num_attention_heads, config.num_key_value_heads, self._head_dim)
        self._layers: list[FusedLayer] = []
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv, bias = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
            gate_up, _ = side_by_side([mlp.gate_proj, mlp.up_proj])
            shape = shapes[int(attention.layer_idx)].attention
            assert shape is not None
            self._layers.append(FusedLayer(layer, shape, qkv, bias, gate_up))

    def hidden(self, tokens: Tensor, positions: Tensor, cache: SlotCache, splits: int) -> Tensor:
        from shoal.engine.kernels.layer import add_norm

        x = self._body.embed_tokens(tokens)
        cos, sin = (t[:, 0].contiguous() for t in self._body.rotary_emb(x[:, None], positions[:, None]))
        residual = torch.empty_like(x)
        for index, layer in enumerate(self._layers):
            norm = layer.module.input_layernorm
            normed = add_norm(x, residual, norm.weight, norm.variance_epsilon, first=index == 0)
            x = self._attend(layer, normed, (cos, sin), positions, cache, splits)
            norm = layer.module.post_attention_layernorm
            x = self._mlp(layer, add_norm(x, residual, norm.weight, norm.variance_epsilon))
        return add_norm(x, residual, self._body.norm.weight, self._body.norm.variance_epsilon)

    def _attend(
        self,
        layer: FusedLayer,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        cache: SlotCache,
        splits: int,
    ) -> Tensor:
        from shoal.engine.kernels.attention import decode_attention
        from shoal.engine.kernels.layer import rotate

        attention = layer.module.self_attn
        query_heads, key_heads, dim = self._heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        norms = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
        rotate(qkv, *rope, self._heads, norms)
        parts = qkv.view(-1, query_heads + 2 * key_heads, dim)
        number = int(attention.layer_idx)
        mixed = decode_attention(
            parts[:, :query_heads],
            parts[:, query_heads : query_heads + key_heads],
            parts[:, query_heads + key_heads :],
            cache.keys[number],
            cache.values[number],
            positions,
            layer.shape.scale,
            layer.shape.window,
            layer.shape.softcap,
            splits,
        )
        return attention.o_proj(mixed.flatten(1))

    def _mlp(self, layer: FusedLayer, x: Tensor) -> Tensor:
        from shoal.engine.kernels.layer import swiglu

        return layer.module.mlp.down_proj(swiglu(F.linear(x, layer.gate_up)))


def make_fused(decoder: Decoder, shapes: dict[int, LayerShape], cache: SlotCache) -> tuple[FusedDecode | None, str]:
    """The fused path if the model is of a known family and both paths agree on it; and the reason in words."""
    if not fits(decoder):
        return None, f"{decoder.name} as loaded has no fused path"
    fused = FusedDecode(decoder, shapes)
    gap = _gap(decoder, fused, cache)
    if not gap < TOLERANCE[decoder.dtype.itemsize < 4]:
        return None, f"the fused path differs from {decoder.name}'s own by {gap:.1e}"
    return fused, f"fused, {gap:.0e} from {decoder.name}'s own"


def fits(decoder: Decoder) -> bool:
    """A family whose layers this computes, silu, and plain linear layers: nothing wrapped, nothing stored quantised."""
    if type(decoder.inner).__name__ not in FAMILIES or getattr(decoder.config, "hidden_act", "") != "silu":
        return False
    body: Any = decoder.body
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
        if not all(samples_plainly(module) for module in (*inputs, attention.o_proj, mlp.down_proj)):
            return False
        if mlp.gate_proj.bias is not None or mlp.up_proj.bias is not None:
            return False
    return True


@torch.no_grad()
def _gap(decoder: Decoder, fused: FusedDecode, cache: SlotCache) -> float:
    """Relative gap of hidden states: eight rows at different positions of the empty cache; it is emptied again."""
    rows = min(8, cache.slots)
    device = decoder.device
    tokens = torch.arange(rows, device=device) * 13 % decoder.vocab_size
    positions = torch.arange(rows, device=device) * (cache.length - 1) // max(1, rows - 1)
    expected = decoder.hidden(tokens[:, None], positions[:, None], KernelDecode(cache, positions))[:, 0]
    actual = fused.hidden(tokens, positions, cache, 1)
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:rows] = 0
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9))
