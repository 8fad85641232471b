"""silu(gate) * up, forward and backward, keeping nothing but its two inputs."""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """[T, width] each, rows any distance apart → silu(gate) * up, [T, width]."""
    return _SwiGLU.apply(gate, up)  # type: ignore[return-value]
