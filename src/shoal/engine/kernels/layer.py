"""The small operations of a decoder layer, one kernel each, rounding where the Hugging Face modules round."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Program: one row. The sum is kept as the new residual; its norm goes out."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0)
    if ADD:
        value = value + tl.load(residual + row * WIDTH + columns, mask=inside, other=0.0)
    tl.store(residual + row * WIDTH + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, gain * (wide * scale).to(value.dtype), mask=inside)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, first: bool = False) -> Tensor:
    """residual += x (or = x, if `first`), in place; returns RMSNorm(residual) * weight. All [B, width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    _add_norm[(rows,)](
        x, residual, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), ADD=not first, num_warps=4
    )
    return out


@triton.jit
def _rotate(
    qkv, cos, sin, q_weight, k_weight, eps, stride,
    QUERY_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Program (row, head) over query and key heads: its own norm if it has one, then the rotation, in place."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, HALF)
    at = qkv + row * stride + head * DIM
    low, high = tl.load(at + half), tl.load(at + HALF + half)
    if NORMED:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt((tl.sum(wide_low * wide_low, 0) + tl.sum(wide_high * wide_high, 0)) / DIM + eps)
        query = head < QUERY_HEADS
        gain_low = tl.where(query, tl.load(q_weight + half), tl.load(k_weight + half))
        gain_high = tl.where(query, tl.load(q_weight + HALF + half), tl.load(k_weight + HALF + half))
        low = gain_low * (wide_low * scale).to(low.dtype)
        high = gain_high * (wide_high * scale).to(high.dtype)
    cos_low = tl.load(cos + row * DIM + half)
    cos_high = tl.load(cos + row * DIM + HALF + half)
    sin_low = tl.load(sin + row * DIM + half)
    sin_high = tl.load(sin + row * DIM + HALF + half)
    tl.store(at + half, (low * cos_low - high * sin_low).to(low.dtype))
    tl.store(at + HALF + half, (high * cos_high + low * sin_high).to(low.dtype))


def rotate(
    qkv: Tensor,  # [B, (query heads + 2 key heads) * D], contiguous
    cos: Tensor,  # [B, D]
    sin: Tensor,
    heads: tuple[int, int, int],  # query heads, key heads, D
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q_norm and k_norm, and their eps
) -> None:
    query_heads, key_heads, dim = heads
    q_weight, k_weight, eps = norms if norms is not None else (cos, cos, 0.0)
    _rotate[(qkv.shape[0], query_heads + key_heads)](
        qkv, cos, sin, q_weight, k_weight, eps, qkv.stride(0),
        QUERY_HEADS=query_heads, DIM=dim, NORMED=norms is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _swiglu(gate_up, out, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * WIDTH + columns, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """[B, 2 * width] of gate and up → silu(gate) * up, [B, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out
