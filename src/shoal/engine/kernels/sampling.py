"""The end of a decode step: sample a token from each row of logits, compute its log-prob, and prepare the row for the
next step.

It samples like engine/sampler.py: first a block of the vocabulary, then a token of the block, each by an exponential
race, so that only one block needs random numbers. The hash is the same, so the tokens are equal except for rounding.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.engine.sampler import BLOCK, BLOCK_SALT


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log_exponential(columns, low, high):
    """log of a unit exponential for each column, a pure function of (low, high, column)."""
    bits = _mix32(_mix32(columns.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 6e-8)
    # log1p(-u) for small u is -u - u*u/2 - …: the plain logarithm would round unlikely tokens to zero.
    series = uniform + uniform * uniform * 0.5 + uniform * uniform * uniform * (1.0 / 3.0)
    return tl.log(tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform)))


@triton.jit
def _scan(logits, temperatures, tops, sums, WIDTH, stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block): the block's largest logit and its sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    temperature = tl.load(temperatures + row)
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    highest = tl.max(x, 0)
    tl.store(tops + row * BLOCKS + block, highest / temperature)
    # As a power of two, whose factor includes the temperature: only the maximum is divided.
    weights = tl.exp2((x - tl.where(highest == float("-inf"), 0.0, highest)) * (1.4426950408889634 / temperature))
    tl.store(sums + row * BLOCKS + block, tl.sum(weights, 0))


@triton.jit
def _draw(
    logits, temperatures, seeds, counts, tops, sums, token_ids, logprobs, WIDTH, stride, SALT,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: one row. Races blocks by their mass, then the tokens of the winning block. Greedy rows take the
    maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    key = _mix64((tl.load(seeds + row) + tl.load(counts + row) * 0x9E3779B97F4A7C1).to(tl.uint64, bitcast=True))
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    blocks = tl.arange(0, PADDED)
    there = blocks < BLOCKS
    top = tl.load(tops + row * BLOCKS + blocks, mask=there, other=float("-inf"))
    mass = tl.load(sums + row * BLOCKS + blocks, mask=there, other=0.0)
    highest = tl.max(top, 0)
    total = highest + tl.log(tl.sum(tl.where(there, mass * tl.exp(top - highest), 0.0), 0))
    race = top + tl.log(mass) - _log_exponential(blocks + SALT, low, high)
    race = tl.where(there, tl.where(greedy, top, race), float("-inf"))
    block = tl.argmax(race, 0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    x = x / tl.where(greedy, 1.0, temperature)
    race = tl.where(greedy, x, x - _log_exponential(columns, low, high))
    token = block * BLOCK + tl.argmax(tl.where(inside, race, float("-inf")), 0)
    chosen = tl.sum(tl.where(columns == token, x, 0.0), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - total)


@triton.jit
def _advance(
    drawn, drawn_logprobs, tokens, positions, counts, limits, done, cursors, ends, ids, logprobs, slots,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Program: one row. Records the sampled token and advances. A finished row stays at position 0."""
    row = tl.program_id(0)
    token = tl.load(drawn + row)
    cursor = tl.load(cursors + row)
    tl.store(ids + cursor * slots + row, token)
    tl.store(logprobs + cursor * slots + row, tl.load(drawn_logprobs + row))
    tl.store(cursors + row, cursor + 1)
    count = tl.load(counts + row) + 1
    ended = tl.sum((tl.load(ends + tl.arange(0, ENDS)) == token).to(tl.int32), 0) > 0
    finished = (tl.load(done + row) != 0) | ended | (count >= tl.load(limits + row))
    tl.store(tokens + row, token)
    tl.store(counts + row, count)
    tl.store(done + row, finished.to(tl.int32))
    tl.store(positions + row, tl.where(finished, 0, tl.load(positions + row) + 1))


@dataclass
class Rows:
    """The state of every slot between decode steps. Graphs read and write it in place. [slots] unless noted."""

    tokens: Tensor  # int64, the newest token
    positions: Tensor  # int64, its position
    counts: Tensor  # int64, tokens sampled so far
    limits: Tensor  # int64, most tokens to sample
    done: Tensor  # int32
    cursors: Tensor  # int64, the row of `ids` to write next
    ids: Tensor  # [window, slots] int64
    logprobs: Tensor  # [window, slots] fp32
    ends: Tensor  # [a power of two] int64, ids that end a sequence, -1 as padding

    @staticmethod
    def allocate(slots: int, window: int, end_ids: list[int], device: torch.device) -> Rows:
        def longs(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        ends = torch.full((triton.next_power_of_2(max(1, len(end_ids))),), -1, dtype=torch.int64, device=device)
        ends[: len(end_ids)] = torch.tensor(end_ids, dtype=torch.int64)
        done = torch.ones(slots, dtype=torch.int32, device=device)
        logprobs = torch.zeros(window, slots, device=device)
        state = (longs(slots) for _ in range(4))
        return Rows(*state, done, longs(slots), longs(window, slots), logprobs, ends)


def draw_tokens(logits: Tensor, seeds: Tensor, counts: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] of any float type; seeds and counts [B] int64 → token ids [B] int64 and log-probs [B] fp32."""
    batch, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    tops, sums = (torch.empty(batch, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=logits.device)
    _scan[(batch, blocks)](
        logits, temperatures, tops, sums, width, logits.stride(0), BLOCKS=blocks, BLOCK=BLOCK, num_warps=4
    )
    _draw[(batch,)](
        logits, temperatures, seeds, counts, tops, sums, token_ids, logprobs, width, logits.stride(0), BLOCK_SALT,
        BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return token_ids, logprobs


def advance(rows: Rows, count: int, drawn: Tensor, logprobs: Tensor) -> None:
    """Rows 0..count-1 take the sampled tokens."""
    _advance[(count,)](
        drawn, logprobs, rows.tokens, rows.positions, rows.counts, rows.limits, rows.done, rows.cursors, rows.ends,
        rows.ids, rows.logprobs, rows.ids.shape[1], ENDS=len(rows.ends), num_warps=1,
    )  # fmt: skip
