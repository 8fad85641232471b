"""Matrix products of decode steps, fused with adjacent operations: SwiGLU after gate and up, a split sum before a norm.

Decode batches have few rows, so a product is bound by reading its weights, and an extra small kernel adds a
considerable share of its time. Rounds where the separate kernels do.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of one program's tile; warps; stages of the loads."""

    rows: int = 64
    columns: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 4


@triton.jit
def _gated(
    x, weight, out, rows, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows): a tile of silu(x @ gate.T) * (x @ up.T), gate above up in `weight` [2·WIDTH, DEPTH]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    steps = tl.arange(0, STEP)
    here = (at < rows)[:, None]
    x_at = x + at[:, None].to(tl.int64) * DEPTH + steps[None]
    gate_at = weight + columns[None].to(tl.int64) * DEPTH + steps[:, None]
    up_at = gate_at + WIDTH * DEPTH
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, DEPTH, STEP):
        a = tl.load(x_at, mask=here, other=0.0)
        gate = tl.dot(a, tl.load(gate_at), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(up_at), up, input_precision="ieee")
        x_at += STEP
        gate_at += STEP
        up_at += STEP
    kind = out.dtype.element_ty
    wide = gate.to(kind).to(tl.float32)
    result = (wide * tl.sigmoid(wide)).to(kind) * up.to(kind)
    tl.store(out + at[:, None].to(tl.int64) * WIDTH + columns[None], result, mask=here)


@triton.jit
def _sum_norm(
    partial, residual, weight, out, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):
    """Program: one row. The rounded sum of the parts is added to the residual; `out` is the norm of the result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * rows + row) * WIDTH + columns, mask=inside, other=0.0)
    here = residual + row * WIDTH + columns
    value = tl.load(here, mask=inside, other=0.0)
    value = total.to(value.dtype) + value
    tl.store(here, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, gain * (wide * scale).to(value.dtype), mask=inside)


GATED_ROWS = 64  # with more rows the library's product is as fast, or faster
EXACT_ROWS = 16  # in fp32 only for the check at the start: such products are slow
PROGRAMS = 132  # tiles that fill the device
SPLITS = (4, 2)
SPLIT_TILE, SPLIT_DEPTH = 128, 256  # rows and columns of one program of the library; the least depth of a part
FEWEST_TILES, MOST_TILES = 40, 100  # depth of all parts together; between them one more tile for every 86 of the depth


def gated_tile(rows: int, weight: Tensor) -> Tile | None:
    """How `gated` is divided, as measured on an H200. None if a product and a separate SwiGLU are faster."""
    width, depth = len(weight) // 2, weight.shape[1]
    exact = weight.dtype == torch.float32
    if rows > (EXACT_ROWS if exact else GATED_ROWS) or width % 64 or depth % 64:
        return None
    return Tile(_rows(rows), 64, 64, stages=2 if exact else 5 if width // 64 <= PROGRAMS else 3)


def splits_of(rows: int, weight: Tensor) -> int:
    """The best number of parts along the depth of a product, as measured on an H200. Tiles alone do not fill the
    device, but every part is written and read again, which pays only for a deep product.
    """
    width, depth = weight.shape
    tiles = triton.cdiv(rows, SPLIT_TILE) * triton.cdiv(width, SPLIT_TILE)
    most = min(MOST_TILES, max(FEWEST_TILES, depth // 86))
    cuts = [cut for cut in SPLITS if depth % (cut * 8) == 0 and depth >= cut * SPLIT_DEPTH and tiles * cut <= most]
    return max(cuts, default=1)


def _rows(rows: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rows)))


def gated(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of x [B, in], gate and up stacked in `weight` [2·width, in] → [B, width]."""
    rows, depth = x.shape
    width = len(weight) // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _gated[(width // tile.columns, triton.cdiv(rows, tile.rows))](
        x, weight, out, rows, WIDTH=width, DEPTH=depth, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def split_product(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """x [B, in] @ weight [out, in].T in parts [splits, B, out] fp32. The product is their sum."""
    parts = x.view(len(x), splits, -1).transpose(0, 1)
    weights = weight.view(len(weight), splits, -1).permute(1, 2, 0)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(parts, weights, out_dtype=torch.float32)
    return torch.bmm(parts.float(), weights.float())


def sum_norm_(partial: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of residual + the sum of the parts, which replaces residual in place."""
    splits, rows, width = partial.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(width)
    _sum_norm[(rows,)](
        partial, residual, weight, out, rows, eps, WIDTH=width, BLOCK=block, SPLITS=splits,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out
