"""Linear layers that read the same input, joined into one product on the model's own weights, with their adapters.

The weights are joined in memory, and each parameter becomes a view of its rows. Adapter matrices cannot be joined as
views, since their products form a block diagonal: they are copied into two small matrices when the weights change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.fp8_linear import samples_plainly


class JoinedLinear:
    """`x @ weight.T + bias`, and with adapters `+ x @ down.T @ up.T`: down [all ranks, in], up [out, all ranks]."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules: list[Any] = list(modules)
        bases = [base_of(module) for module in modules]
        self.weight = _adjoin([base.weight for base in bases])
        biases = [base.bias for base in bases if base.bias is not None]
        self.bias = _adjoin(biases) if biases else None
        ranks = sum(_rank(module) for module in modules)
        self._down = self.weight.new_zeros(ranks, self.weight.shape[1])
        self._up = self.weight.new_zeros(self.weight.shape[0], ranks)

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if not self.adapted:
            return out
        return torch.addmm(out, F.linear(x, self._down), self._up.T)

    @property
    def adapted(self) -> bool:
        return len(self._down) > 0

    @property
    def plain(self) -> bool:
        """Whether this is only the product with `weight`."""
        return self.bias is None and not self.adapted and self.weight.is_contiguous()

    def adapter_parts(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """(target, source, scale) of each copy of the active adapters."""
        row = column = 0
        for module in self._modules:
            outputs, rank = len(base_of(module).weight), _rank(module)
            if rank:
                name = module.active_adapters[0]
                yield self._down[column : column + rank], module.lora_A[name].weight, 1.0
                block = self._up[row : row + outputs, column : column + rank]
                yield block, module.lora_B[name].weight, float(module.scaling[name])
            row, column = row + outputs, column + rank


@torch.no_grad()
def copy_adapters(products: Iterable[JoinedLinear]) -> None:
    """Copy the active adapters in place: CUDA graphs read these tensors."""
    parts = [part for product in products for part in product.adapter_parts()]
    if parts:
        targets, sources, scales = zip(*parts, strict=True)
        torch._foreach_copy_(list(targets), torch._foreach_mul(list(sources), list(scales)))


def _rank(module: Any) -> int:
    if not hasattr(module, "lora_A"):
        return 0
    return int(module.lora_A[module.active_adapters[0]].weight.shape[0])


def base_of(module: Any) -> nn.Linear:
    return module.base_layer if hasattr(module, "base_layer") else module


def can_join(module: Any) -> bool:
    """Whether the module is a plain linear layer, alone or under a plain LoRA adapter."""
    if not samples_plainly(base_of(module)):
        return False
    if not hasattr(module, "base_layer"):
        return True
    special = any(module.use_dora.values()) or bool(getattr(module, "lora_embedding_A", None))
    return hasattr(module, "lora_A") and not special and not any(getattr(module, "lora_bias", {}).values())


@torch.no_grad()
def _adjoin(parameters: Sequence[Tensor]) -> Tensor:
    """Join parameters in memory. Idempotent: if they are adjacent already, returns a view of them."""
    first = parameters[0]
    rows = sum(len(p) for p in parameters)
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for parameter in parameters:
        # Adjacent addresses may still be two allocations; a view must stay within one storage.
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
