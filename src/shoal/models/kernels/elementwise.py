"""Element-wise kernels of a decoder layer, forward and backward: RMSNorm, rotary embeddings, SwiGLU.

RMSNorm runs alone or after a residual add, and rounds where the Hugging Face modules do. Query and key heads get their
own RMSNorm, if any, and then the rotation in pairs (i, i + d/2), in fp32, rounded once. SwiGLU saves only its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false


BACKWARD_PROGRAMS = 528  # four per multiprocessor: each sums the gradient of the weight over its rows


@triton.jit
def _add_norm(
    x, residual, weight, total, out, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Program: one row. `total` is the sum, `out` its norm, `scales` the factor for the backward."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0)
    if ADD:
        value = value + tl.load(residual + row * WIDTH + columns, mask=inside, other=0.0)
        tl.store(total + row * WIDTH + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, gain * (wide * scale).to(value.dtype), mask=inside)


@triton.jit
def _norm_backward(
    total, scales, weight, d_out, d_total, d_x, d_weight, rows, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Program: `share` rows. d_x is the gradient of the sum; d_weight[program] is this program's part of the gradient
    of the gain.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    first = program * share
    for index in range(first, tl.minimum(first + share, rows)):
        at = tl.cast(index, tl.int64) * WIDTH + columns
        scale = tl.load(scales + index)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
        d_unit = upstream * gain
        gradient = scale * (d_unit - unit * (tl.sum(d_unit * unit, 0) / WIDTH))
        if ADDED:
            gradient += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, gradient.to(d_x.dtype.element_ty), mask=inside)
        summed += upstream * unit
    if WEIGHED:
        tl.store(d_weight + program * WIDTH + columns, summed, mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out = torch.empty_like(x)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, x if residual is None else residual, weight, total, out, scales, eps,
        WIDTH=width, BLOCK=block, ADD=residual is not None, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out, scales


class _Norm(torch.autograd.Function):
    """(x, residual or None) → (their sum, its norm); without a residual the sum is x and is not returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        ctx.set_materialize_grads(False)
        total = x if residual is None else torch.empty_like(x)
        out, scales = _launch(x, residual, weight, eps, total)
        ctx.save_for_backward(total, scales, weight)
        ctx.added = residual is not None
        return (total, out) if ctx.added else out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        total, scales, weight = ctx.saved_tensors
        d_total, d_out = upstream if ctx.added else (None, upstream[0])
        if d_out is None:
            return d_total, d_total if ctx.added else None, None, None
        rows, width = total.shape
        d_x = torch.empty_like(total)
        programs = min(rows, BACKWARD_PROGRAMS)
        weighed = ctx.needs_input_grad[2]
        partial = torch.empty(programs if weighed else 1, width, dtype=torch.float32, device=total.device)
        share = triton.cdiv(rows, programs)
        if weighed and share * programs > rows:
            partial.zero_()
        block = triton.next_power_of_2(width)
        _norm_backward[(triton.cdiv(rows, share),)](
            total, scales, weight, d_out.contiguous(), d_out if d_total is None else d_total.contiguous(), d_x, partial,
            rows, share, WIDTH=width, BLOCK=block, ADDED=d_total is not None, WEIGHED=weighed,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        d_weight = partial.sum(0).to(weight.dtype) if weighed else None
        return d_x, d_x if ctx.added else None, d_weight, None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of [T, width], differentiable."""
    return _Norm.apply(x, None, weight, eps)  # type: ignore[return-value]


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual + x, its RMSNorm), differentiable. All [T, width]."""
    return _Norm.apply(x, residual, weight, eps)  # type: ignore[return-value]


def add_norm_(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The norm of residual + x, which replaces residual in place; without a residual, the norm of x. For decoding."""
    return _launch(x, residual, weight, eps, x if residual is None else residual)[0]


# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false


@triton.jit
def turn(own, other, cos, sin, dims, HALF: tl.constexpr):
    """`other` contains the partner of each number: (x, y) → (x cos - y sin, y cos + x sin)."""
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
    """Program: `share` tokens. The inverse rotation, then the gradient of the norm."""
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
    """Heads of one token must be contiguous. Tokens may have any stride."""
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


# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false


BLOCK = 1024


@triton.jit
def _swiglu(gate, up, out, gate_stride, up_stride, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0)
    wide = g.to(tl.float32)
    tl.store(out + row * WIDTH + columns, (wide * tl.sigmoid(wide)).to(g.dtype) * u, mask=inside)


@triton.jit
def _swiglu_backward(gate, up, d_out, d_gate, d_up, gate_stride, up_stride, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(d_out + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    tl.store(d_up + row * WIDTH + columns, (upstream * g * share).to(d_up.dtype.element_ty), mask=inside)
    slope = share * (1.0 + g * (1.0 - share))
    tl.store(d_gate + row * WIDTH + columns, (upstream * u * slope).to(d_gate.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows, width = gate.shape
        out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
        grid = (rows, triton.cdiv(width, BLOCK))
        _swiglu[grid](gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        rows, width = gate.shape
        d_gate, d_up = (torch.empty(rows, width, dtype=gate.dtype, device=gate.device) for _ in range(2))
        _swiglu_backward[(rows, triton.cdiv(width, BLOCK))](
            gate, up, upstream[0].contiguous(), d_gate, d_up, gate.stride(0), up.stride(0), width,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return d_gate, d_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """[T, width] each, with any row stride → silu(gate) * up, [T, width]."""
    return _SwiGLU.apply(gate, up)  # type: ignore[return-value]
