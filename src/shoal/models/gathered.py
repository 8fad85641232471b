"""Keys and values that several segments read, gathered for each; their gradients come together again, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.models import kernels


def gather(keys: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    """Which token each key is of, [n]; and, token by token, which keys are of it: `copies` [n], `copy_starts` [T+1]."""
    starts = np.append(0, np.cumsum(np.bincount(keys, minlength=tokens)))
    arrays = {"keys": keys, "copies": np.argsort(keys, kind="stable"), "copy_starts": starts}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def take_tokens(tokens: Tensor, plan: Mapping[str, Tensor]) -> Tensor:
    """[T, ...] → [n, ...]."""
    return _TakeTokens.apply(tokens, plan["keys"], plan["copies"], plan["copy_starts"])  # type: ignore[return-value]


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, keys: Tensor, copies: Tensor, copy_starts: Tensor) -> Tensor:
        ctx.save_for_backward(keys, copies, copy_starts)
        return tokens.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (keys, copies, copy_starts), (grad,) = ctx.saved_tensors, grads
        if grad.dtype.itemsize <= 4 and kernels.available(grad.is_cuda):
            from shoal.models.kernels.copies import sum_copies

            return sum_copies(grad, copies, copy_starts), None, None, None
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(len(copy_starts) - 1, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, keys, grad.to(wide)).to(grad.dtype), None, None, None
