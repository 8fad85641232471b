"""Quantisation kernels: rounding to FP8 for fp8-hybrid, and dequantising stored weights (FP8 blocks, NVFP4).

Rounding uses one power-of-two scale per tensor and gives torchao's results in a tenth of the launches; it can also
write the transpose, since FP8 products read both operands along the inner dimension. Dequantising decodes bits with
integer operations, so it also runs on GPUs without FP8 or FP4 units. No host sync, so CUDA graphs can capture both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportCallIssue=false, reportOperatorIssue=false


@triton.jit
def _e4m3(code):
    """uint8 → its value in fp32: one sign, four exponent (bias 7) and three mantissa bits."""
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
    """Program (rows / ROWS, columns / BLOCK): within one block, so with one scale."""
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
    """Program: BLOCK numbers in row-major order. Rows are padded to complete groups, so no byte belongs to two rows."""
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


# pyright: reportCallIssue=false, reportOperatorIssue=false


LEAST = 1e-12  # replaces the largest number of an empty tensor
CHUNK, TILE = 8192, 64
INNER = 16  # the inner dimension of an FP8 product must be a multiple of this


@triton.jit
def _largest(x, out, count, CHUNK: tl.constexpr):
    """Program: one chunk. `out` starts at 0."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(out, tl.max(tl.abs(numbers), 0))


@triton.jit
def _round(
    x, largest, plain, turned, inverse, rows, columns, padded, MAX: tl.constexpr, LEAST: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program: one tile of x [rows, columns]. `turned` is the transpose, [columns, padded], padded with zeros."""
    # The largest power of two that keeps the largest number within MAX. Only its exponent is used.
    scale = tl.div_rn(MAX, tl.maximum(tl.load(largest), LEAST))
    scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    at_row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at_column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, column = at_row[:, None].to(tl.int64), at_column[None]
    inside = (row < rows) & (column < columns)
    numbers = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32) * scale
    numbers = tl.minimum(tl.maximum(numbers, -MAX, tl.PropagateNan.ALL), MAX, tl.PropagateNan.ALL)
    if PLAIN:
        tl.store(plain + row * columns + column, numbers.to(plain.dtype.element_ty), mask=inside)
    if TURNED:
        column, row = at_column[:, None].to(tl.int64), at_row[None]
        there = (column < columns) & (row < padded)
        tl.store(turned + column * padded + row, tl.trans(numbers).to(turned.dtype.element_ty), mask=there)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.div_rn(1.0, scale))


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in FP8: `plain`, and its transpose `turned`, [columns, rows padded to 16], each if requested. Times
    `inverse` it is x.
    """

    plain: Tensor | None
    turned: Tensor | None
    inverse: Tensor  # [1] fp32


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of a contiguous tensor, [1] fp32."""
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    _largest[(triton.cdiv(x.numel(), CHUNK),)](x, found, x.numel(), CHUNK=CHUNK, num_warps=8)
    return found


def rounded(x: Tensor, kind: torch.dtype, top: Tensor, *, plain: bool = True, turned: bool = False) -> Fp8Matrix:
    """x [rows, columns], contiguous, in `kind`, with the scale for its largest magnitude `top`."""
    rows, columns = x.shape
    padded = -(-rows // INNER) * INNER
    inverse = torch.empty(1, dtype=torch.float32, device=x.device)
    as_it_is = torch.empty(rows if plain else 0, columns, dtype=kind, device=x.device)
    other_way = torch.empty(columns, padded if turned else 0, dtype=kind, device=x.device)
    _round[(triton.cdiv(padded, TILE), triton.cdiv(columns, TILE))](
        x, top, as_it_is, other_way, inverse, rows, columns, padded, MAX=torch.finfo(kind).max, LEAST=LEAST,
        PLAIN=plain, TURNED=turned, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Fp8Matrix(as_it_is if plain else None, other_way if turned else None, inverse)
