"""Log-prob of the target and entropy of each row of logits in one read; the gradient overwrites the logits.

`sum_copies` sums gradients of gathered tokens in fp32, in a fixed order, so the result is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportCallIssue=false, reportOperatorIssue=false


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
    """values [n, ...], and `copies` [n], the rows of each token, which start at `starts` [T+1] → [T, ...]."""
    out = torch.empty(len(starts) - 1, *values.shape[1:], dtype=values.dtype, device=values.device)
    width = values[0].numel()
    _sum_copies[(len(out),)](
        values.contiguous(), copies, starts, out, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1
    )
    return out


# pyright: reportCallIssue=false, reportOperatorIssue=false


BLOCK = 4096


@triton.jit
def _score(logits, targets, temperatures, logprobs, entropies, totals, WIDTH, BLOCK: tl.constexpr):
    """Program: one row. Keeps a running maximum, the sum of exponentials, and the sum of exponentials times logits."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    base = logits + row * WIDTH
    top = tl.full([BLOCK], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(base + columns, mask=columns < WIDTH, other=-1.0e30).to(tl.float32) / temperature
        higher = tl.maximum(top, z)
        rescale = tl.exp(top - higher)
        weight = tl.exp(z - higher)
        mass = mass * rescale + weight
        # Ids that could not be sampled have a logit of -inf and no share.
        moment = moment * rescale + tl.where((columns < WIDTH) & (weight > 0), weight * z, 0.0)
        top = higher
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    total_mass = tl.sum(mass * share, 0)
    total = highest + tl.log(total_mass)
    chosen = tl.load(base + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(totals + row, total)
    tl.store(logprobs + row, chosen - total)
    tl.store(entropies + row, total - tl.sum(moment * share, 0) / total_mass)


@triton.jit
def _differentiate(logits, targets, temperatures, totals, upstream, WIDTH, BLOCK: tl.constexpr):
    """Program (row, block): logits become upstream * d logprob / d logit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    temperature = tl.load(temperatures + row)
    at = logits + row * WIDTH + columns
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32) / temperature
    probability = tl.exp(z - tl.load(totals + row))
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    gradient = tl.load(upstream + row) * (hit - probability) / temperature
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def score(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, V] → log-probs, entropies and log-sum-exps, [T] fp32 each, at the temperature of each row."""
    rows, width = logits.shape
    logprobs, entropies, totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    _score[(rows,)](logits, targets, temperatures, logprobs, entropies, totals, width, BLOCK=BLOCK, num_warps=8)
    return logprobs, entropies, totals


def differentiate_(logits: Tensor, targets: Tensor, temperatures: Tensor, totals: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of sum(upstream * logprobs) with respect to the logits, which replaces the logits."""
    rows, width = logits.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _differentiate[grid](logits, targets, temperatures, totals, upstream, width, BLOCK=BLOCK, num_warps=8)
    return logits
