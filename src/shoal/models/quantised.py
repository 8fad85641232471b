"""A frozen base in few bits: linear layers that keep their weight quantised and read it for every product.

Trainer and sampler run the same layers. They stand in for nn.Linear, so peft puts its adapters around them; there is
no gradient into what is stored, and an adapter cannot be merged into it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models.formats import FORMATS


class QuantisedLinear(nn.Linear):
    """Made from a linear layer, whose weight it does not keep. Its bias, if any, stays as it is and frozen."""

    def __init__(self, linear: nn.Linear, format_name: str, device: torch.device) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: that would allocate the weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format_name = format_name
        self.compute_dtype = linear.weight.dtype  # by this name peft learns which dtype adapters are to have
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        stored = FORMATS[format_name].quantise(linear.weight.detach().to(device))
        self._stored = tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """What the stored weight stands for, computed now. Writing to it changes nothing."""
        return self.dequantised(self.compute_dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        stored: Any = {name: self._buffers[name] for name in self._stored}
        return FORMATS[self.format_name].dequantise(stored, (self.out_features, self.in_features), dtype)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, stored as {self.format_name}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """input @ weight.T + bias. Backward dequantises again: keeping the weight would undo what storing it saves."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.dequantised(input.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantised(grad.dtype), None


@functools.cache
def lora_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """What peft is to put around a quantised layer. Made when asked for: a run without adapters does without peft."""
    from peft.tuners.lora import Linear

    class QuantisedLora(Linear):
        """peft's own layer, but for merging: the weight is made for the call, and a sum written to it is lost."""

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise ModelError(
                "an adapter cannot be merged into a quantised base; load it on the base model as it was published, "
                "with PEFT, and merge it there"
            )

    return {QuantisedLinear: QuantisedLora}


@torch.no_grad()
def quantise_linears(model: nn.Module, format_name: str, device: torch.device) -> int:
    """Replace every linear layer but the head, one at a time, so `device` never holds the whole model unquantised.

    Returns how many. Embeddings, norms and the head stay as they are.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head
    ]
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers that could be stored as {format_name}")
    for parent, name, child in found:
        setattr(parent, name, QuantisedLinear(child, format_name, device))
        child.weight = None  # type: ignore[assignment]  # the list above still holds the layer
    return len(found)


def count_weights(model: nn.Module) -> int:
    """Numbers the model is made of, however many bits each takes."""
    stored = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))
    return stored + sum(p.numel() for p in model.parameters())


def held_bytes(model: nn.Module) -> int:
    """Bytes of memory the model's parameters and buffers take; what several of them share counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
