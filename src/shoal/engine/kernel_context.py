"""Decode mode through the Triton attention kernel, for the Hugging Face modules; and whether a model can have it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.engine.cache import SlotCache
from shoal.models import kernels
from shoal.models.attention import Shape
from shoal.models.decoder import Decoder
from shoal.models.fused import TURNS_BY_LENGTH, turns_by_length


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


def why_no_graphs(decoder: Decoder, cache: SlotCache) -> str | None:
    """What keeps decode steps of this model from being graphs on this device, in words; None if nothing does."""
    if not kernels.available(decoder.device.type == "cuda"):
        return "there is no Triton for this device"
    if turns_by_length(decoder):
        return TURNS_BY_LENGTH
    from shoal.engine.kernels.attention import supports

    heads = decoder.config.num_attention_heads
    for keys, values in zip(cache.keys.values(), cache.values.values(), strict=True):
        if not supports(heads, keys.shape[1], keys.shape[3], values.shape[3]):
            return f"the kernel takes no heads of {keys.shape[3]} and {values.shape[3]} numbers"
    return None
