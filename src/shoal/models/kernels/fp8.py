"""Numbers rounded to FP8 with one scale a tensor, a power of two, in two kernels: as torchao rounds them, in a tenth of
the launches. A product needs its operands along its inner dimension, so a tensor can come turned as well.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST = 1e-12  # the largest number of an empty tensor is taken for this
CHUNK, TILE = 8192, 64
INNER = 16  # what the inner dimension of a product in FP8 is a multiple of


@triton.jit
def _largest(x, out, count, CHUNK: tl.constexpr):
    """Program: one chunk; `out` begins at 0."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(out, tl.max(tl.abs(numbers), 0))


@triton.jit
def _round(
    x, largest, plain, turned, inverse, rows, columns, padded, MAX: tl.constexpr, LEAST: tl.constexpr,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program: one tile of x [rows, columns]; `turned` is [columns, padded], with zeros where there are no rows."""
    # The highest power of two that keeps the largest number within MAX: its exponent is all that is left of it.
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
class Rounded:
    """A matrix in FP8: as it is and turned, [columns, rows padded to 16], where asked for; times `inverse` it is x."""

    plain: Tensor | None
    turned: Tensor | None
    inverse: Tensor  # [1] fp32


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of a contiguous tensor, [1] fp32."""
    found = torch.zeros(1, dtype=torch.float32, device=x.device)
    _largest[(triton.cdiv(x.numel(), CHUNK),)](x, found, x.numel(), CHUNK=CHUNK, num_warps=8)
    return found


def rounded(x: Tensor, kind: torch.dtype, top: Tensor, *, plain: bool = True, turned: bool = False) -> Rounded:
    """x [rows, columns], contiguous, in `kind`, with the scale that its largest magnitude `top` asks for."""
    rows, columns = x.shape
    padded = -(-rows // INNER) * INNER
    inverse = torch.empty(1, dtype=torch.float32, device=x.device)
    as_it_is = torch.empty(rows if plain else 0, columns, dtype=kind, device=x.device)
    other_way = torch.empty(columns, padded if turned else 0, dtype=kind, device=x.device)
    _round[(triton.cdiv(padded, TILE), triton.cdiv(columns, TILE))](
        x, top, as_it_is, other_way, inverse, rows, columns, padded, MAX=torch.finfo(kind).max, LEAST=LEAST,
        PLAIN=plain, TURNED=turned, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Rounded(as_it_is if plain else None, other_way if turned else None, inverse)
