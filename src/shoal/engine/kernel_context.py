"""Decode mode through the Triton attention kernel, for the Hugging Face modules; and whether a model can have it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.engine.cache import SlotCache
from shoal.models import kernels
from shoal.models.attention import Shape
from shoal.models.decoder import Decoder


@dataclass
class KernelDecode:
    """Decode mode with the Triton kernel: every row looks at its own length, whatever the batch's longest."""

    cache: SlotCache
    positions: Tensor  # [B]
    longest: int  # keys of any row at most

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        from shoal.engine.kernels.attention import decode_attention, launch_for

        heads = (query[:, :, 0].contiguous(), key[:, :, 0].contiguous(), value[:, :, 0].contiguous())
        cache = (self.cache.keys[layer], self.cache.values[layer])
        launch = launch_for(len(query) * key.shape[1], query.shape[3], self.longest)
        return decode_attention(heads, cache, self.positions, shape, launch).unsqueeze(1)  # [B, 1, H, D]


def supported(decoder: Decoder, cache: SlotCache) -> bool:
    """Whether the kernels can decode this model on this device."""
    if not kernels.available(decoder.device.type == "cuda"):
        return False
    from shoal.engine.kernels.attention import supports

    heads = decoder.config.num_attention_heads
    shapes = (
        (k.shape[1], k.shape[3], v.shape[3]) for k, v in zip(cache.keys.values(), cache.values.values(), strict=True)
    )
    return all(supports(heads, kv_heads, key_dim, value_dim) for kv_heads, key_dim, value_dim in shapes)
