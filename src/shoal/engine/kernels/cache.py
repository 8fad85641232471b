"""Keys and values of packed prompts into the slots of the cache, in one kernel a layer."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # of a program


@triton.jit
def _copy(source, target, tokens, there, stride_token, DIM: tl.constexpr, PADDED: tl.constexpr):
    """`tokens` of one head, [T] of which those in the mask `there`, from one place to another."""
    dims = tl.arange(0, PADDED)[None]
    real = there[:, None] & (dims < DIM)
    numbers = tl.load(source + tokens[:, None] * stride_token + dims, mask=real)
    tl.store(target + tokens[:, None] * DIM + dims, numbers, mask=real)


@triton.jit
def _scatter(
    key, value, keys, values, starts, lengths, slots,
    key_token, key_head, value_token, value_head, slot_keys, head_keys, slot_values, head_values,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tokens of it, head)."""
    at = tl.program_id(0)
    first = tl.program_id(1) * TOKENS
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + at)
    if first >= length:
        return
    start = tl.load(starts + at).to(tl.int64)
    slot = tl.load(slots + at).to(tl.int64)
    tokens = (first + tl.arange(0, TOKENS)).to(tl.int64)
    there = tokens < length
    _copy(
        key + start * key_token + head * key_head, keys + slot * slot_keys + head * head_keys,
        tokens, there, key_token, KEY_DIM, KEY_PADDED,
    )  # fmt: skip
    _copy(
        value + start * value_token + head * value_head, values + slot * slot_values + head * head_values,
        tokens, there, value_token, VALUE_DIM, VALUE_PADDED,
    )  # fmt: skip


def scatter(
    heads: tuple[Tensor, Tensor],  # key and value [heads, T, D]
    cache: tuple[Tensor, Tensor],  # [slots, heads, length, D] each
    where: tuple[Tensor, Tensor, Tensor],  # starts, lengths and slots, [N] each
    longest: int,
) -> None:
    """`lengths[i]` tokens from `starts[i]` on go to the slot `slots[i]`, none more than `longest`."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in heads)
    keys, values = cache
    _scatter[(len(where[0]), triton.cdiv(longest, TOKENS), len(key))](
        key, value, keys, values, *where,
        key.stride(1), key.stride(0), value.stride(1), value.stride(0), *keys.stride()[:2], *values.stride()[:2],
        KEY_DIM=key.shape[2], KEY_PADDED=triton.next_power_of_2(key.shape[2]),
        VALUE_DIM=value.shape[2], VALUE_PADDED=triton.next_power_of_2(value.shape[2]),
        TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
