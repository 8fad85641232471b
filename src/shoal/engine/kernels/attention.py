"""Decode attention on the slot cache (one new token per row), and the scatter of packed prompts into the cache.

The decode kernel norms and rotates heads, writes the new key and value into the cache, and attends, in one read of the
cache. The new token is used from registers, so there is no read-after-write hazard. Long rows are split over programs
and combined by a second kernel; a short row is always one split, whatever else is in the batch. `scatter` writes
the keys and values of packed prompts into their slots, one kernel per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.models.attention import Shape
from shoal.models.kernels.elementwise import turn

# pyright: reportCallIssue=false, reportOperatorIssue=false


TOKENS = 32  # of a program


@triton.jit
def _copy(source, target, tokens, there, stride_token, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Copy `tokens` of one head, [T], where the mask `there` is true."""
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
    """Program (sequence, block of its tokens, head)."""
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
    """Copy `lengths[i]` tokens, starting at `starts[i]`, to the slot `slots[i]`; none is longer than `longest`."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in heads)
    keys, values = cache
    _scatter[(len(where[0]), triton.cdiv(longest, TOKENS), len(key))](
        key, value, keys, values, *where,
        key.stride(1), key.stride(0), value.stride(1), value.stride(0), *keys.stride()[:2], *values.stride()[:2],
        KEY_DIM=key.shape[2], KEY_PADDED=triton.next_power_of_2(key.shape[2]),
        VALUE_DIM=value.shape[2], VALUE_PADDED=triton.next_power_of_2(value.shape[2]),
        TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip


# pyright: reportCallIssue=false, reportOperatorIssue=false


WIDEST = 256  # numbers of a head
MIN_HEADS = 16  # a tensor-core tile has at least 16 rows; heads are padded to this number


@dataclass(frozen=True)
class HeadForm:
    """The operations on heads before attention: rotation tables by position, [length, D], and the weights of their
    norms.
    """

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


@triton.jit
def _ready(at, weight, cos, sin, real, dims, eps, DIM: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr):
    """Heads [N, DIM] at `at` (pointers to their first number, [N, 1]): after norm and rotation, in their own dtype."""
    HALF: tl.constexpr = DIM // 2
    own = tl.load(at + dims, mask=real, other=0.0)
    if NORMED:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        own = tl.load(weight + dims) * (wide * scale).to(own.dtype)
    if ROTATED:
        partner = (dims + HALF) % DIM
        other = tl.load(at + partner, mask=real, other=0.0)
        if NORMED:
            other = tl.load(weight + partner) * (other.to(tl.float32) * scale).to(own.dtype)
        c, s = tl.load(cos + dims).to(tl.float32), tl.load(sin + dims).to(tl.float32)
        own = turn(own.to(tl.float32), other.to(tl.float32), c, s, dims, HALF).to(own.dtype)
    return own


@triton.jit
def _real(mask, dims, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Mask of real numbers: heads whose size is not a power of two are padded."""
    if WIDTH > DIM:
        mask = mask & (dims < DIM)
    return mask


@triton.jit
def _share(position, window, split, splits, SPAN: tl.constexpr, WINDOWED: tl.constexpr):
    """The keys [first, last) before the new one that belong to this split, and the number of splits of the row."""
    start = position * 0
    if WINDOWED:
        start = tl.maximum(position - window + 1, 0)
    # The unit is a span: a row of one span is one split; in a longer row each split takes several spans.
    spans = tl.cdiv(position - start, SPAN)
    share = tl.maximum(tl.cdiv(spans, splits), 1)
    first = start + split * share * SPAN
    return first, tl.minimum(position, first + share * SPAN), tl.maximum(tl.cdiv(spans, share), 1)


@triton.jit
def _attend(
    query, new_key, new_value, keys, values, positions, out, partial, partial_max, partial_sum,
    cos, sin, query_norm, key_norm,
    scale, window, softcap, eps,
    stride_slot, stride_head, stride_query, stride_new,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, CUT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """Program (row, key head, split): HEADS query heads against this split's keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    position = tl.load(positions + row)
    first, last, live = _share(position, window, split, tl.num_programs(2), SPAN, WINDOWED)
    if split >= live:
        return
    dims = tl.arange(0, WIDTH)
    group = tl.arange(0, PADDED)
    real = group < HEADS
    base = row * stride_slot + head * stride_head
    q_at = query + row * stride_query + (head * HEADS + group)[:, None] * DIM
    k_at = new_key + row * stride_new + head * DIM + tl.zeros([1], tl.int32)[:, None]
    yes = tl.full([1, 1], 1, tl.int1)
    turn_cos, turn_sin = cos + position * DIM, sin + position * DIM
    q_real, one_real = _real(real[:, None], dims[None], DIM, WIDTH), _real(yes, dims[None], DIM, WIDTH)
    q = _ready(q_at, query_norm, turn_cos, turn_sin, q_real, dims[None], eps, DIM, NORMED, ROTATED)
    k_new = _ready(k_at, key_norm, turn_cos, turn_sin, one_real, dims[None], eps, DIM, NORMED, ROTATED)
    v_new = tl.load(new_value + row * stride_new + head * DIM + dims[None], mask=one_real, other=0.0)
    # The new token comes first, while there are no other keys: every query attends to it, and its key is stored.
    own = split == 0
    stored = dims < tl.where(own, DIM, 0)
    tl.store(keys + base + position * DIM + dims[None], k_new, mask=stored[None])
    tl.store(values + base + position * DIM + dims[None], v_new, mask=stored[None])
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    if CAPPED:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    top = tl.where(own, score, -1.0e30)
    total = tl.where(own, tl.full([PADDED], 1.0, tl.float32), 0.0)
    mixed = tl.where(own, tl.zeros([PADDED, WIDTH], tl.float32) + v_new.to(tl.float32), 0.0)
    for at in range(first, last, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        inside = columns < last
        there = _real(inside[:, None], dims[None], DIM, WIDTH)
        k = tl.load(keys + base + columns[:, None] * DIM + dims[None], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(inside[None], scores, -1.0e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(top - higher)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(values + base + columns[:, None] * DIM + dims[None], mask=there, other=0.0)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    slot = (row * heads + head) * HEADS + group
    whole = real
    if CUT:
        heads_cut = tl.where(live > 1, HEADS, 0)
        cut = group < heads_cut
        whole = real & (group >= heads_cut)
        at_split = slot * tl.num_programs(2) + split
        cut_real = _real(cut[:, None], dims[None], DIM, WIDTH)
        tl.store(partial + at_split[:, None] * DIM + dims[None], mixed, mask=cut_real)
        tl.store(partial_max + at_split, top, mask=cut)
        tl.store(partial_sum + at_split, total, mask=cut)
    whole_real = _real(whole[:, None], dims[None], DIM, WIDTH)
    tl.store(out + slot[:, None] * DIM + dims[None], (mixed / total[:, None]).to(q.dtype), mask=whole_real)


@triton.jit
def _join(
    partial, partial_max, partial_sum, out, positions, window, splits,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): the mean of its splits, weighted by softmax mass. Rows with one split are done."""
    row = tl.program_id(0).to(tl.int64)
    _, _, live = _share(tl.load(positions + row), window, 0, splits, SPAN, WINDOWED)
    if live == 1:
        return
    slot = row * tl.num_programs(1) + tl.program_id(1)
    parts = tl.arange(0, PADDED)
    there = parts < live
    dims = tl.arange(0, WIDTH)
    top = tl.load(partial_max + slot * splits + parts, mask=there, other=float("-inf"))
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(partial_sum + slot * splits + parts, mask=there, other=0.0) * weights, 0)
    there_real = _real(there[:, None], dims[None], DIM, WIDTH)
    mixed = tl.load(partial + (slot * splits + parts)[:, None] * DIM + dims[None], mask=there_real, other=0.0)
    result = tl.sum(mixed * weights[:, None], 0) / total
    tl.store(out + slot * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


@dataclass(frozen=True)
class Launch:
    """How the kernel is divided: most splits of a row, fewest keys of a split, keys per block, warps, load stages."""

    splits: int = 1
    span: int = 512
    block: int = 64
    warps: int = 4
    stages: int = 3


SHORT = 512  # keys; shorter rows have one split
MANY, FEW = 1000, 128  # enough programs to fill the device many times, and too few to fill it
MAX_SPLITS = 64


def launch_for(programs: int, dim: int, longest: int) -> Launch:
    """For `programs` rows times key heads of size `dim` with at most `longest` keys, as measured on an H200.

    Other GPUs use the same values, which may not be the fastest there.

    Wider heads use as much shared memory as heads of 128, so they have fewer keys per block.

    With many programs and short rows, each has one warp and small blocks. With few programs, each uses more of the
    memory bandwidth. A long row among many is one program with more warps; among few it is split.
    """
    launch = _launch(programs, dim, longest)
    return replace(launch, block=max(16, launch.block * 128 // width_of(dim))) if dim > 128 else launch


def _launch(programs: int, dim: int, longest: int) -> Launch:
    if longest <= SHORT:
        if programs >= MANY:
            return Launch(1, SHORT, 16, 1, 3)
        return Launch(1, SHORT, 64, 4, 3) if programs >= FEW else Launch(1, SHORT, 128, 4, 2)
    if programs >= MANY:
        return _cut(longest, 4096, (128 if dim <= 64 else 64, 4, 3))
    return _cut(longest, 256, (64, 4, 2)) if programs >= FEW else _cut(longest, 128, (128, 4, 2))


def _cut(longest: int, span: int, form: tuple[int, int, int]) -> Launch:
    return Launch(min(triton.cdiv(longest, span), MAX_SPLITS), span, *form)


def decode_attention(
    heads: tuple[Tensor, Tensor, Tensor],  # query [B, H, D], new key and value [B, Hkv, D]; rows may be strided
    cache: tuple[Tensor, Tensor],  # keys and values [slots, Hkv, length, D], written at `positions`
    positions: Tensor,  # [B] int64, the position of the new token
    shape: Shape,
    launch: Launch | None = None,
    form: HeadForm
    | None = None,  # None: heads are already normed and rotated, as required if their size is not a power of two
) -> Tensor:  # [B, H, D]
    query, new_key, new_value = heads
    keys, values = cache
    launch = launch or Launch()
    batch, query_heads, dim = query.shape
    group = query_heads // keys.shape[1]
    out = torch.empty(batch, query_heads, dim, dtype=query.dtype, device=query.device)
    wide = launch.splits > 1
    partial, tops, sums = _partials(batch * query_heads * launch.splits, dim, query) if wide else (out, out, out)
    cut = {"SPAN": launch.span, "WINDOWED": shape.window is not None}
    exact = query.dtype == torch.float32
    normed = form is not None and form.query_norm is not None
    _attend[(batch, keys.shape[1], launch.splits)](
        query, new_key, new_value, keys, values, positions, out, partial, tops, sums,
        form.cos if form else query, form.sin if form else query,
        form.query_norm if form and normed else query, form.key_norm if form and normed else query,
        shape.scale, shape.window or 0, shape.softcap or 0.0, form.eps if form else 0.0,
        keys.stride(0), keys.stride(1), query.stride(0), new_key.stride(0),
        DIM=dim, WIDTH=width_of(dim), HEADS=group, PADDED=max(MIN_HEADS, triton.next_power_of_2(group)),
        BLOCK=32 if exact else launch.block, CAPPED=shape.softcap is not None, NORMED=normed,
        ROTATED=form is not None, CUT=wide, **cut, num_warps=launch.warps, num_stages=1 if exact else launch.stages,
    )  # fmt: skip
    if wide:
        _join[(batch, query_heads)](
            partial, tops, sums, out, positions, shape.window or 0, launch.splits,
            DIM=dim, WIDTH=width_of(dim), PADDED=triton.next_power_of_2(launch.splits), **cut, num_warps=1,
        )  # fmt: skip
    return out


def _partials(rows: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((rows, dim), (rows,), (rows,))
    return tuple(torch.empty(size, dtype=torch.float32, device=like.device) for size in sizes)  # type: ignore[return-value]


def width_of(dim: int) -> int:
    """Numbers that a head occupies in a tile."""
    return max(16, triton.next_power_of_2(dim))


def supports(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> bool:
    return key_dim == value_dim and key_dim <= WIDEST and heads % kv_heads == 0
