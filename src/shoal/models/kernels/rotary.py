"""Query and key heads made ready for attention: their own RMSNorm if they have one, then the rotation; and backward.

A head d of dims is rotated in pairs (i, i + d/2). Products are taken in fp32 and rounded once.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.models.kernels.norm import BACKWARD_PROGRAMS


@triton.jit
def turn(own, other, cos, sin, dims, HALF: tl.constexpr):
    """`other` holds each number's partner: (x, y) → (x cos - y sin, y cos + x sin)."""
    return own * cos + tl.where(dims < HALF, -other, other) * sin


@triton.jit
def _rotate(
    x, out, cos, sin, weight, eps, stride,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Program: all heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    heads = tl.arange(0, PADDED)[:, None]
    dims = tl.arange(0, DIM)[None]
    partner = (dims + HALF) % DIM
    real = heads < HEADS
    own = tl.load(x + row * stride + heads * DIM + dims, mask=real, other=0.0)
    other = tl.load(x + row * stride + heads * DIM + partner, mask=real, other=0.0)
    if NORMED:
        wide = own.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        own = tl.load(weight + dims) * (wide * scale).to(own.dtype)
        other = tl.load(weight + partner) * (other.to(tl.float32) * scale).to(own.dtype)
    c = tl.load(cos + row * DIM + dims).to(tl.float32)
    s = tl.load(sin + row * DIM + dims).to(tl.float32)
    turned = turn(own.to(tl.float32), other.to(tl.float32), c, s, dims, HALF)
    tl.store(out + (row * HEADS + heads) * DIM + dims, turned.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate_backward(
    x, d_out, d_x, cos, sin, weight, d_weight, eps, stride, d_stride, rows, share,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Program: `share` tokens; the rotation turned back, then the norm's gradient."""
    program = tl.program_id(0)
    HALF: tl.constexpr = DIM // 2
    heads = tl.arange(0, PADDED)[:, None]
    dims = tl.arange(0, DIM)[None]
    partner = (dims + HALF) % DIM
    real = heads < HEADS
    summed = tl.zeros([PADDED, DIM], tl.float32)
    first = program * share
    for index in range(first, tl.minimum(first + share, rows)):
        row = tl.cast(index, tl.int64)
        own = tl.load(d_out + row * d_stride + heads * DIM + dims, mask=real, other=0.0).to(tl.float32)
        other = tl.load(d_out + row * d_stride + heads * DIM + partner, mask=real, other=0.0).to(tl.float32)
        c = tl.load(cos + row * DIM + dims).to(tl.float32)
        s = tl.load(sin + row * DIM + partner).to(tl.float32)
        gradient = own * c + tl.where(dims < HALF, other, -other) * s
        if NORMED:
            wide = tl.load(x + row * stride + heads * DIM + dims, mask=real, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
            unit = wide * scale
            summed += gradient * unit
            gradient = gradient * tl.load(weight + dims).to(tl.float32)
            gradient = scale * (gradient - unit * (tl.sum(gradient * unit, 1) / DIM)[:, None])
        tl.store(d_x + (row * HEADS + heads) * DIM + dims, gradient.to(d_x.dtype.element_ty), mask=real)
    if NORMED:
        tl.store(d_weight + program * DIM + tl.arange(0, DIM), tl.sum(summed, 0))


def _rows(x: Tensor) -> Tensor:
    """Heads of one token must lie side by side; tokens may be any distance apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x = _rows(x)
        tokens, heads, dim = x.shape
        out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
        padded = triton.next_power_of_2(heads)
        _rotate[(tokens,)](
            x, out, cos, sin, cos if weight is None else weight, eps, x.stride(0),
            HEADS=heads, PADDED=padded, DIM=dim, NORMED=weight is not None, num_warps=_warps(padded * dim),
        )  # fmt: skip
        ctx.save_for_backward(None if weight is None else x, cos, sin, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, cos, sin, weight = ctx.saved_tensors
        d_out = _rows(upstream[0])
        tokens, heads, dim = d_out.shape
        d_x = torch.empty(tokens, heads, dim, dtype=d_out.dtype, device=d_out.device)
        programs = min(tokens, BACKWARD_PROGRAMS)
        partial = torch.zeros(programs, dim, dtype=torch.float32, device=d_out.device) if weight is not None else d_x
        share = triton.cdiv(tokens, programs)
        padded = triton.next_power_of_2(heads)
        _rotate_backward[(triton.cdiv(tokens, share),)](
            d_out if x is None else x, d_out, d_x, cos, sin, cos if weight is None else weight, partial, ctx.eps,
            d_out.stride(0) if x is None else x.stride(0), d_out.stride(0), tokens, share,
            HEADS=heads, PADDED=padded, DIM=dim, NORMED=weight is not None, num_warps=_warps(padded * dim),
        )  # fmt: skip
        d_weight = partial.sum(0).to(weight.dtype) if weight is not None and ctx.needs_input_grad[3] else None
        return d_x, None, None, d_weight, None


def _warps(numbers: int) -> int:
    return 1 if numbers <= 512 else 4 if numbers <= 4096 else 8


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """[T, heads, D] with cos and sin [T, D] → the same, ready for attention; `weight` [D] is the heads' norm."""
    return _Rotate.apply(x, cos, sin, weight, eps)  # type: ignore[return-value]
