"""The sum over all copies of a token, in fp32 and always in the same order: one kernel, nothing in between."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_copies(values, copies, starts, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program: one token."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(starts + token), tl.load(starts + token + 1)):
        row = tl.load(copies + index).to(tl.int64)
        total += tl.load(values + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_copies(values: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """values [n, ...], `copies` [n] the rows of each token, which begin at `starts` [T+1] → [T, ...]."""
    out = torch.empty(len(starts) - 1, *values.shape[1:], dtype=values.dtype, device=values.device)
    width = values[0].numel()
    _sum_copies[(len(out),)](
        values.contiguous(), copies, starts, out, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1
    )
    return out
