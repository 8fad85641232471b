"""Stored weights to the dtype of the product that follows, in one pass each: FP8 in blocks of 128 by 128, and NVFP4.

The bits are taken apart with integer operations, so a GPU without FP8 or FP4 units reads them as well. What is stored
is read in place and nothing waits for the host, so a CUDA graph can capture it.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _e4m3(code):
    """uint8 → the number it stands for, fp32: one sign, four exponent (bias 7) and three mantissa bits."""
    wide = code.to(tl.int32)
    exponent, mantissa = (wide >> 3) & 15, wide & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # 2 ** -9
    return tl.where(wide > 127, -value, value)


@triton.jit
def _e2m1(code):
    """Four bits → fp32: one sign, two exponent (bias 1) and one mantissa bit."""
    wide = code.to(tl.int32)
    exponent, mantissa = (wide >> 1) & 3, wide & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where(wide > 7, -value, value)


@triton.jit
def _fp8_blocks(codes, scales, out, rows, columns, scale_columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (rows / ROWS, columns / BLOCK): inside one block, so with one scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    scale = tl.load(scales + (tl.program_id(0) * ROWS // BLOCK) * scale_columns + tl.program_id(1))
    value = _e4m3(tl.load(codes + at, mask=inside, other=0)) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def fp8_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """[rows, columns] uint8 and [rows / block, columns / block] fp32 → [rows, columns] of `dtype`."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    tile = 16
    grid = (triton.cdiv(rows, tile), triton.cdiv(columns, block))
    _fp8_blocks[grid](codes, scales, out, rows, columns, scales.shape[1], ROWS=tile, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _nvfp4(codes, scales, whole, out, total, columns, padded, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK numbers in row-major order. A row is padded to whole groups, so its bytes are its own."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row, column = at // columns, at % columns
    stored = row * padded + column
    pair = tl.load(codes + stored // 2, mask=inside, other=0).to(tl.int32)
    code = (pair >> ((column % 2) * 4).to(tl.int32)) & 15
    scale = _e4m3(tl.load(scales + stored // GROUP, mask=inside, other=0)) * tl.load(whole)
    tl.store(out + at, (_e2m1(code) * scale).to(out.dtype.element_ty), mask=inside)


def nvfp4(stored: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], dtype: torch.dtype, group: int) -> Tensor:
    """Codes [rows, padded / 2] and scales [rows, padded / group], both uint8, and one fp32 → `shape` of `dtype`."""
    codes, scales, whole = stored
    rows, columns = shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    block = 1024
    _nvfp4[(triton.cdiv(rows * columns, block),)](
        codes, scales, whole, out, rows * columns, columns, 2 * codes.shape[1], GROUP=group, BLOCK=block, num_warps=4
    )
    return out
