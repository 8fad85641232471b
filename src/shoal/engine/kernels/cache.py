"""Keys and values of packed prompts into the slots of the cache, in one kernel a layer."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scatter(
    key, value, keys, values, tokens, slots, positions,
    stride_token, stride_head, stride_slot, stride_cache_head,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program: one token of one slot, all its heads."""
    at = tl.program_id(0)
    token = tl.load(tokens + at)
    slot = tl.load(slots + at)
    position = tl.load(positions + at)
    heads = tl.arange(0, PADDED)[:, None]
    dims = tl.arange(0, DIM)[None]
    real = heads < HEADS
    source = token * stride_token + heads * stride_head + dims
    target = slot * stride_slot + heads * stride_cache_head + position * DIM + dims
    tl.store(keys + target, tl.load(key + source, mask=real), mask=real)
    tl.store(values + target, tl.load(value + source, mask=real), mask=real)


def scatter(heads: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], where: tuple[Tensor, Tensor, Tensor]) -> None:
    """Key and value [heads, T, D]: token tokens[i] goes to (slots[i], positions[i]) of [slots, heads, length, D]."""
    key, value = heads
    keys, values = cache
    tokens, slots, positions = where
    if value.stride() != key.stride() or key.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    count, _, dim = key.shape
    padded = triton.next_power_of_2(count)
    _scatter[(len(tokens),)](
        key, value, keys, values, tokens, slots, positions,
        key.stride(1), key.stride(0), keys.stride(0), keys.stride(1),
        HEADS=count, PADDED=padded, DIM=dim, num_warps=1 if padded * dim <= 1024 else 4,
    )  # fmt: skip
