"""RMSNorm, alone or with the residual sum before it, forward and backward; rounds where Hugging Face's modules do."""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BACKWARD_PROGRAMS = 528  # four a multiprocessor: each sums the weight's gradient over its own rows


@triton.jit
def _add_norm(
    x, residual, weight, total, out, scales, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Program: one row. `total` gets the sum, `out` its norm, `scales` the factor the backward needs."""
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
    """Program: `share` rows. d_x is the gradient of the sum; d_weight[program] this program's part of the gain's."""
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
    """The norm of residual + x, which replaces residual in place; of x alone without one. For decoding."""
    return _launch(x, residual, weight, eps, x if residual is None else residual)[0]
