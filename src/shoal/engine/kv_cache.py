"""Keys, values and states: one slot per sequence; row b of a decode batch is slot b. Allocated once, never resized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.models import kernels
from shoal.models.decoder import LayerShape
from shoal.models.state_layers import StateCache, States


class SlotCache:
    """keys[layer]: [slots, heads, length, key_dim]; values likewise."""

    def __init__(
        self, layers: dict[int, LayerShape], slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = slots
        self.length = length
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states = StateCache.allocate({i: shape.states for i, shape in layers.items()}, slots, device)
        for layer, shape in layers.items():
            if not shape.heads:
                continue
            # Zeros: a masked key is multiplied by zero, and zero times NaN is NaN.
            self.keys[layer] = torch.zeros(slots, shape.heads, length, shape.key_dim, dtype=dtype, device=device)
            self.values[layer] = torch.zeros(slots, shape.heads, length, shape.value_dim, dtype=dtype, device=device)
        self._rows = torch.arange(slots, device=device)

    @staticmethod
    def bytes_per_token(layers: dict[int, LayerShape], dtype: torch.dtype) -> int:
        return sum(shape.numbers_per_token for shape in layers.values()) * dtype.itemsize

    def append(
        self, layer: int, positions: Tensor, key: Tensor, value: Tensor, key_length: int
    ) -> tuple[Tensor, Tensor]:
        """Write one token per row ([B, heads, D]); returns the first keys of each row, [B, heads, key_length, D]."""
        batch = len(positions)
        keys, values = self.keys[layer], self.values[layer]
        keys[self._rows[:batch], :, positions] = key
        values[self._rows[:batch], :, positions] = value
        return keys[:batch, :, :key_length], values[:batch, :, :key_length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots to other slots, with one operation per tensor."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[targets, :, :length] = tensor[sources, :, :length]
        self.states.move(sources, targets)


@dataclass
class PrefillWriter:
    """Copies prompts of a packed row into slots: `lengths[i]` tokens from `starts[i]` go to slot `slots[i]`."""

    cache: SlotCache
    starts: Tensor  # [N]
    lengths: Tensor  # [N]
    slots: Tensor  # [N]
    longest: int  # upper bound on the lengths

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """[heads, T, D] each."""
        if kernels.available(key.is_cuda):
            from shoal.engine.kernels.attention import scatter

            cache = (self.cache.keys[layer], self.cache.values[layer])
            return scatter((key, value), cache, (self.starts, self.lengths, self.slots), self.longest)
        tokens, slots, places = self._one_by_one
        self.cache.keys[layer][slots, :, places] = key[:, tokens].transpose(0, 1)
        self.cache.values[layer][slots, :, places] = value[:, tokens].transpose(0, 1)

    def write_states(self, layer: int, start: int, states: States) -> None:
        """Copy the states of the prompt that begins at `start` into its slots."""
        self.cache.states.write(layer, self.slots[self.starts == start], states)

    @cached_property
    def _one_by_one(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per written token: its index in the row, its slot, and its position in the slot."""
        starts, before, slots = (
            x.repeat_interleave(self.lengths) for x in (self.starts, self.lengths.cumsum(0) - self.lengths, self.slots)
        )
        places = torch.arange(len(slots), device=slots.device) - before
        return starts + places, slots, places
