"""Sampling from logits in one read: the log-sum-exp and the winner of the exponential race, block by block.

The hash is that of engine/sampler.py, so a draw has the same randomness here and there; rounding apart, the same token.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _scan(
    logits, keys_low, keys_high, temperatures, best_score, best_id, best_logit, tops, sums,
    WIDTH, stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): this block's winner, its logit, and the block's share of the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.where(greedy, 1.0, temperature)
    low = tl.load(keys_low + row).to(tl.uint32, bitcast=True)
    high = tl.load(keys_high + row).to(tl.uint32, bitcast=True)
    bits = _mix32(_mix32(columns.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 6e-8)
    # log1p(-u) for small u is -u - u*u/2 - …: the plain logarithm would round unlikely tokens away.
    small = uniform < 1e-3
    series = uniform + uniform * uniform * 0.5 + uniform * uniform * uniform * (1.0 / 3.0)
    exponential = tl.where(small, series, -tl.log(1.0 - uniform))
    score = tl.where(greedy, x, x - tl.log(exponential))
    score = tl.where(inside, score, float("-inf"))
    top = tl.max(x, 0)
    at = row * BLOCKS + block
    winner = tl.argmax(score, 0)
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.where(inside, tl.exp(x - top), 0.0), 0))
    tl.store(best_score + at, tl.max(score, 0))
    tl.store(best_id + at, block * BLOCK + winner)
    tl.store(best_logit + at, tl.sum(tl.where(columns == block * BLOCK + winner, x, 0.0), 0))


@triton.jit
def _finish(
    best_score, best_id, best_logit, tops, sums, token_ids, logprobs, BLOCKS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED)
    inside = blocks < BLOCKS
    at = row * BLOCKS + blocks
    score = tl.load(best_score + at, mask=inside, other=float("-inf"))
    winner = tl.argmax(score, 0)
    chosen = blocks == winner
    top = tl.load(tops + at, mask=inside, other=float("-inf"))
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(inside, tl.load(sums + at, mask=inside, other=0.0) * tl.exp(top - highest), 0.0), 0)
    token = tl.sum(tl.where(chosen, tl.load(best_id + at, mask=inside, other=0), 0), 0)
    logit = tl.sum(tl.where(chosen, tl.load(best_logit + at, mask=inside, other=0.0), 0.0), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, logit - highest - tl.log(total))


def draw_tokens(logits: Tensor, key_low: Tensor, key_high: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] of any float type, hash keys [B] int32 → token ids [B] int64 and log-probs [B] fp32."""
    batch, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    device = logits.device
    scores, chosen, tops, sums = (torch.empty(batch, blocks, dtype=torch.float32, device=device) for _ in range(4))
    ids = torch.empty(batch, blocks, dtype=torch.int32, device=device)
    token_ids = torch.empty(batch, dtype=torch.int64, device=device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=device)
    _scan[(batch, blocks)](
        logits, key_low, key_high, temperatures, scores, ids, chosen, tops, sums,
        width, logits.stride(0), BLOCKS=blocks, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _finish[(batch,)](
        scores, ids, chosen, tops, sums, token_ids, logprobs,
        BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return token_ids, logprobs
