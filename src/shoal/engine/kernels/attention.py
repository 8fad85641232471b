"""Decode attention on the slot cache: one new token a row, heads that share a key head together, contexts split.

The new token's key and value are written by the same kernel that reads the rest, and take part from registers, so there
is no second pass and no hazard. Partial results of the splits are joined by a second, small kernel.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_KEYS = 64
MIN_HEADS = 16  # a tensor-core tile has at least 16 rows; heads are padded up to it


@triton.jit
def _attend(
    query, new_key, new_value, keys, values, positions, out, partial_max, partial_sum,
    scale, window, softcap,
    stride_slot, stride_head, stride_query, stride_new,
    LENGTH: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, split): HEADS query heads against this split's keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    position = tl.load(positions + row)
    dims = tl.arange(0, DIM)
    group = tl.arange(0, PADDED)
    real = group < HEADS
    q_at = query + row * stride_query + (head * HEADS + group)[:, None] * DIM + dims[None]
    q = tl.load(q_at, mask=real[:, None], other=0.0)
    start = 0
    if WINDOWED:
        start = tl.maximum(position - window + 1, 0)
    # This split's share of the keys before the new one, in whole blocks.
    blocks = tl.cdiv(position - start, BLOCK)
    share = tl.cdiv(blocks, SPLITS)
    first = start + split * share * BLOCK
    last = tl.minimum(position, first + share * BLOCK)
    top = tl.full([PADDED], -1.0e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, DIM], tl.float32)
    base = row * stride_slot + head * stride_head
    for at in range(first, last, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < last
        k = tl.load(keys + base + columns[:, None] * DIM + dims[None], mask=inside[:, None], other=0.0)
        if EXACT:
            scores = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2) * scale
        else:
            scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(inside[None], scores, -1.0e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(top - higher)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(values + base + columns[:, None] * DIM + dims[None], mask=inside[:, None], other=0.0)
        if EXACT:
            update = tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], 1)
        else:
            update = tl.dot(weights.to(v.dtype), v).to(tl.float32)
        mixed = mixed * rescale[:, None] + update
        top = higher
    if split == 0:
        # The token itself: seen by every query, stored for those to come.
        k_new = tl.load(new_key + row * stride_new + head * DIM + dims)
        v_new = tl.load(new_value + row * stride_new + head * DIM + dims)
        tl.store(keys + base + position * DIM + dims, k_new)
        tl.store(values + base + position * DIM + dims, v_new)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None], 1) * scale
        if CAPPED:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
        higher = tl.maximum(top, score)
        rescale = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * rescale + weight
        mixed = mixed * rescale[:, None] + weight[:, None] * v_new.to(tl.float32)[None]
        top = higher
    slot = (row * heads + head) * HEADS + group
    if SPLITS == 1:
        tl.store(out + slot[:, None] * DIM + dims[None], (mixed / total[:, None]).to(q.dtype), mask=real[:, None])
    else:
        at_split = slot * SPLITS + split
        tl.store(out + at_split[:, None] * DIM + dims[None], mixed, mask=real[:, None])
        tl.store(partial_max + at_split, top, mask=real)
        tl.store(partial_sum + at_split, total, mask=real)


@triton.jit
def _join(partial, partial_max, partial_sum, out, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Program: one query head of one row; its splits weighed by how much of the softmax each holds."""
    slot = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    top = tl.load(partial_max + slot * SPLITS + splits)
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(partial_sum + slot * SPLITS + splits) * weights, 0)
    mixed = tl.load(partial + (slot * SPLITS + splits)[:, None] * DIM + dims[None])
    result = tl.sum(mixed * weights[:, None], 0) / total
    tl.store(out + slot * DIM + dims, result.to(out.dtype.element_ty))


def decode_attention(
    query: Tensor,  # [B, H, D], rows may be strided
    new_key: Tensor,  # [B, Hkv, D], rows may be strided, as those of new_value
    new_value: Tensor,
    keys: Tensor,  # [slots, Hkv, length, D], written at `positions`
    values: Tensor,
    positions: Tensor,  # [B] int64, where the new token stands
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
) -> Tensor:  # [B, H, D]
    batch, heads, dim = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=query.device)
    wide = splits > 1
    partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=query.device) if wide else out
    tops = torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device) if wide else out
    sums = torch.empty_like(tops) if wide else out
    exact = query.dtype == torch.float32
    _attend[(batch, kv_heads, splits)](
        query, new_key, new_value, keys, values, positions, partial, tops, sums,
        scale, window or 0, softcap or 0.0,
        keys.stride(0), keys.stride(1), query.stride(0), new_key.stride(0),
        LENGTH=length, DIM=dim, HEADS=group, PADDED=max(MIN_HEADS, triton.next_power_of_2(group)),
        BLOCK=16 if exact else BLOCK_KEYS, SPLITS=splits, WINDOWED=window is not None, CAPPED=softcap is not None,
        EXACT=exact, num_warps=4,
    )  # fmt: skip
    if wide:
        _join[(batch * heads,)](partial, tops, sums, out, DIM=dim, SPLITS=splits, num_warps=1)
    return out


def supports(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> bool:
    power_of_two = key_dim >= 16 and key_dim & (key_dim - 1) == 0
    return power_of_two and key_dim == value_dim and heads % kv_heads == 0
