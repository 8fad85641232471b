"""The fused decode forward in plain torch, for CPUs: the same few products a layer, without the modules around them.

Rows and keys are padded as everywhere in the engine, so a row still rounds the same in any company.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.cache import SlotCache
from shoal.engine.fused import FusedDecode, FusedLayer, fits
from shoal.models.attention import Decode
from shoal.models.decoder import Decoder, LayerShape


class PlainDecode(FusedDecode):
    """`hidden` takes what the Hugging Face body takes in decode mode, and gives what it gives."""

    def step(self, tokens: Tensor, context: Decode) -> Tensor:
        """[B] tokens at the context's positions → [B, hidden]."""
        x = self._body.embed_tokens(tokens)
        cos, sin = (t[:, 0, None] for t in self._body.rotary_emb(x[:, None], context.positions[:, None]))  # [B, 1, D]
        residual = x
        for layer in self._layers:
            x = self._attend_plain(layer, _norm(layer.module.input_layernorm, residual), (cos, sin), context)
            residual = residual + x
            gate, up = F.linear(_norm(layer.module.post_attention_layernorm, residual), layer.gate_up).chunk(2, -1)
            residual = residual + layer.module.mlp.down_proj(F.silu(gate) * up)
        return _norm(self._body.norm, residual)

    def _attend_plain(self, layer: FusedLayer, x: Tensor, rope: tuple[Tensor, Tensor], context: Decode) -> Tensor:
        attention = layer.module.self_attn
        query_heads, key_heads, dim = self._heads
        parts = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, dim)
        turned = parts[:, : query_heads + key_heads]
        if hasattr(attention, "q_norm"):
            gains = (attention.q_norm.weight.expand(query_heads, -1), attention.k_norm.weight.expand(key_heads, -1))
            turned = F.rms_norm(turned, (dim,), None, attention.q_norm.variance_epsilon) * torch.cat(gains)
        cos, sin = rope
        half = dim // 2
        turned = turned * cos + torch.cat([-turned[..., half:], turned[..., :half]], -1) * sin
        mixed = context.attend(
            int(attention.layer_idx),
            turned[:, :query_heads, None],
            turned[:, query_heads:, None],
            parts[:, query_heads + key_heads :, None],
            layer.shape,
        )
        return attention.o_proj(mixed.flatten(1))


def _norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def make_plain(decoder: Decoder, shapes: dict[int, LayerShape], cache: SlotCache) -> PlainDecode | None:
    """For fp32 on a CPU, if the model is of a known family and agrees with its own modules to rounding."""
    if decoder.device.type != "cpu" or decoder.dtype != torch.float32 or not fits(decoder):
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
