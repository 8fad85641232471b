"""Layers with a state instead of keys: short convolutions, gated delta rules, Mamba.

A decoder calls `attach` once. From then on each such layer (a mixer) hands its call to the context of the forward pass,
as the attention function does: `context.mix(mixer, hidden)`. The context decides which tokens belong together and
calls `run`, the layer's own code in transformers, with a cache of one layer.

Training runs segments as rows of right-padded rectangles: a mixer is causal, so padding on the right changes nothing. A
prefill runs each prompt alone, so that it rounds the same whatever else is in the batch, and writes its states.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer


@dataclass(frozen=True)
class StateShape:
    """One state of one sequence in a layer. `kind`: "conv" or "recurrent"."""

    kind: str
    number: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.number

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.size)) * self.dtype.itemsize


States = dict[tuple[str, int], Tensor]  # (kind, number) → [B, …]


class OneLayerCache:
    """What a mixer of transformers uses of a cache. Decode updates the given states in place."""

    def __init__(self, states: States | None = None) -> None:
        numbers = [number for _, number in states] if states else [0]
        self._layer = LinearAttentionLayer(max(numbers) + 1)
        for (kind, number), tensor in (states or {}).items():
            layer = self._layer
            if kind == "conv":
                layer.conv_states[number], layer.is_conv_states_initialized[number] = tensor, True
                layer.conv_kernel_size[number] = tensor.shape[-1]
            else:
                layer.recurrent_states[number], layer.is_recurrent_states_initialized[number] = tensor, True
            layer.has_previous_state[number] = True

    def states(self) -> States:
        layer = self._layer
        found = [(("conv", n), t) for n, t in layer.conv_states.items()]
        found += [(("recurrent", n), t) for n, t in layer.recurrent_states.items()]
        return {key: tensor for key, tensor in found if tensor is not None}

    # The methods of transformers.Cache that mixers call.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._layer.recurrent_states[state_idx]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **more: Any) -> Tensor:
        return self._layer.update_conv_state(conv_states, state_idx, **more)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self._layer.update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return self._layer.has_previous_state[state_idx]

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def mixers(body: nn.Module) -> list[nn.Module]:
    """Layers with a convolution over time and a cache of their own."""
    return [module for module in body.modules() if _cache_name(module) is not None]


def _cache_name(module: nn.Module) -> str | None:
    """The name of the argument with the cache; None if the module is no mixer."""
    if not hasattr(module, "layer_idx") or not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    known = inspect.signature(type(module).forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in known), None)


def attach(body: nn.Module) -> bool:
    """Let the mixers' calls go through the context; returns whether there are any."""
    found = mixers(body)
    for module in found:
        module.forward = MethodType(_forward, module)
    return bool(found)


def _forward(module: nn.Module, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
    context = named.pop("shoal", None)
    if context is None:
        return type(module).forward(module, hidden_states, *arguments, **named)
    return context.mix(module, hidden_states)


def run(module: Any, hidden: Tensor, cache: OneLayerCache | None = None) -> Tensor:
    """The layer's own forward on [B, T, hidden]."""
    name = _cache_name(module)
    assert name is not None
    return type(module).forward(module, hidden, **{name: cache})


def shapes_of(states: States) -> tuple[StateShape, ...]:
    return tuple(StateShape(*key, tuple(t.shape[1:]), t.dtype) for key, t in sorted(states.items()))


@dataclass
class StateCache:
    """The states of all slots: tensors[layer][kind, number] is [slots, …]."""

    tensors: dict[int, States] = field(default_factory=dict)

    @classmethod
    def allocate(cls, layers: dict[int, tuple[StateShape, ...]], slots: int, device: torch.device) -> StateCache:
        tensors = {
            layer: {shape.key: torch.zeros(slots, *shape.size, dtype=shape.dtype, device=device) for shape in shapes}
            for layer, shapes in layers.items()
            if shapes
        }
        return cls(tensors)

    def write(self, layer: int, slots: Tensor, states: States) -> None:
        """Copy the states of one sequence into all slots that begin with it."""
        for key, tensor in states.items():
            self.tensors[layer][key][slots] = tensor

    def rows(self, layer: int, count: int) -> OneLayerCache:
        """A cache over the first slots, which decode updates in place."""
        return OneLayerCache({key: tensor[:count] for key, tensor in self.tensors[layer].items()})

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for states in self.tensors.values():
            for tensor in states.values():
                tensor[targets] = tensor[sources]
