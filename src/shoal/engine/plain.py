"""The fused decode forward in plain torch, for CPUs: the same few products a layer, without the modules around them.

Rows and keys are padded as everywhere in the engine, so a row still rounds the same in any company.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.cache import SlotCache
from shoal.engine.fused import FusedLayer, attention_of, fuse_layer, linears
from shoal.models.attention import Decode
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.fused import FAMILIES, turns


class PlainDecode:
    """`step` takes what the Hugging Face body takes in decode mode, and gives what it gives."""

    def __init__(self, decoder: Decoder, shapes: Mapping[int, LayerShape]) -> None:
        self._body: Any = decoder.body
        self._layers = [fuse_layer(layer, attention_of(shapes, i)) for i, layer in enumerate(self._body.layers)]

    def step(self, tokens: Tensor, context: Decode) -> Tensor:
        """[B] tokens at the context's positions → [B, hidden]."""
        x = self._body.embed_tokens(tokens)
        cos, sin = (t[:, 0, None] for t in self._body.rotary_emb(x[:, None], context.positions[:, None]))  # [B, 1, D]
        residual = x
        for layer in self._layers:
            x = self._attend_plain(layer, _norm(layer.module.input_layernorm, residual), (cos, sin), context)
            residual = residual + x
            gate, up = layer.gate_up(_norm(layer.module.post_attention_layernorm, residual)).chunk(2, -1)
            residual = residual + layer.down(F.silu(gate) * up)
        return _norm(self._body.norm, residual)

    def _attend_plain(self, layer: FusedLayer, x: Tensor, rope: tuple[Tensor, Tensor], context: Decode) -> Tensor:
        attention = layer.module.self_attn
        keys = context.cache.keys[layer.number]
        key_heads, dim = keys.shape[1], keys.shape[3]
        parts = layer.qkv(x).view(len(x), -1, dim)
        query_heads = parts.shape[1] - 2 * key_heads
        turned = parts[:, : query_heads + key_heads]
        if hasattr(attention, "q_norm"):
            gains = (attention.q_norm.weight.expand(query_heads, -1), attention.k_norm.weight.expand(key_heads, -1))
            turned = F.rms_norm(turned, (dim,), None, attention.q_norm.variance_epsilon) * torch.cat(gains)
        if turns(attention):
            (cos, sin), half = rope, dim // 2
            turned = turned * cos + torch.cat([-turned[..., half:], turned[..., :half]], -1) * sin
        mixed = context.attend(
            layer.number,
            turned[:, :query_heads, None],
            turned[:, query_heads:, None],
            parts[:, query_heads + key_heads :, None],
            layer.shape,
        )
        return layer.out(mixed.flatten(1))


def _norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def make_plain(decoder: Decoder, shapes: Mapping[int, LayerShape], cache: SlotCache) -> PlainDecode | None:
    """For fp32 on a CPU, if the model is of a known family and agrees with its own modules to rounding."""
    if decoder.device.type != "cpu" or decoder.dtype != torch.float32 or not _plain(decoder):
        return None
    plain = PlainDecode(decoder, shapes)
    rows = min(8, cache.slots)
    tokens = torch.arange(rows) * 13 % decoder.vocab_size
    positions = torch.arange(rows) * (cache.length - 1) // max(1, rows - 1)
    expected = decoder.hidden(tokens[:, None], positions[:, None], Decode(cache, positions, cache.length))[:, 0]
    actual = plain.step(tokens, Decode(cache, positions, cache.length))
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:rows] = 0
    gap = float((actual - expected).norm() / expected.norm().clamp_min(1e-9))
    return plain if gap < 1e-5 else None


def _plain(decoder: Decoder) -> bool:
    if decoder.name not in FAMILIES or getattr(decoder.config, "hidden_act", "") != "silu":
        return False
    layers: Any = decoder.body.layers
    plain = all(type(module) is nn.Linear for layer in layers for module in linears(layer))
    return plain and all(layer.mlp.gate_proj.bias is None for layer in layers)
