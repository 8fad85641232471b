"""Sample one token per row, with its log-prob under exactly the distribution it was drawn from.

Exponential race: token i wins if E_i / p_i is smallest, with E_i exponential. Blocks of the vocabulary race first, by
their mass, then the tokens of the winning block: the same distribution, with random numbers for one block only. Random
numbers are a hash of (request seed, position, i), so a draw does not depend on the batch or on arrival order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Training replays truncated distributions from their stored ids; at most this many are kept.
MAX_KEPT = 256
MAX_ENDS = 128  # stop ids of one request
BLOCK = 4096  # ids of the vocabulary that race together
BLOCK_SALT = 1 << 30  # block numbers as hash columns, above any token id


@dataclass
class SamplingState:
    """Per-slot sampling parameters as tensors, [slots] each."""

    seeds: Tensor  # int64
    temperatures: Tensor  # float32; 0 = greedy
    top_p: Tensor
    top_k: Tensor  # int64; <= 0 = off
    min_p: Tensor
    min_tokens: Tensor  # int64
    ends: Tensor  # [slots, MAX_ENDS] int64, ids banned before min_tokens, padded with -1

    @staticmethod
    def allocate(slots: int, device: torch.device) -> SamplingState:
        return SamplingState(
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.ones(slots, device=device),
            torch.ones(slots, device=device),
            torch.full((slots,), -1, dtype=torch.int64, device=device),
            torch.zeros(slots, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.full((slots, MAX_ENDS), -1, dtype=torch.int64, device=device),
        )

    def banned(self, counts: Tensor, width: int) -> Tensor:
        """[B, width]: stop ids of rows that have drawn fewer than min_tokens."""
        mask = torch.zeros(len(counts), width + 1, dtype=torch.bool, device=counts.device)
        early = (counts < self.min_tokens)[:, None].expand_as(self.ends)
        return mask.scatter(1, torch.where(self.ends < 0, width, self.ends), early)[:, :width]

    def __getitem__(self, rows: Tensor | slice) -> SamplingState:
        return SamplingState(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        for name in self.__dataclass_fields__:
            tensor = getattr(self, name)
            tensor[targets] = tensor[sources]

    def put(self, slots: Tensor, integers: Tensor, numbers: Tensor, ends: Tensor | None) -> None:
        """Parameters of new sequences: seeds, top_k and min_tokens [3, n]; temperature, top_p and min_p [3, n]."""
        self.seeds[slots], self.top_k[slots], self.min_tokens[slots] = integers
        self.temperatures[slots], self.top_p[slots], self.min_p[slots] = numbers
        if ends is not None:
            self.ends[slots] = ends


@dataclass(frozen=True)
class SampledTokens:
    token_ids: Tensor  # [B]
    logprobs: Tensor  # [B] fp32
    kept: Tensor | None  # [B, MAX_KEPT] int64 ids, padded with -1; None if nothing was truncated


def draw(
    logits: Tensor, state: SamplingState, positions: Tensor, banned: Tensor | None, truncated: bool
) -> SampledTokens:
    """logits [B, V]; `positions` [B] count the tokens drawn so far; `banned` [B, V] marks ids that may not be drawn.

    A greedy row (temperature 0) takes the argmax and reports its log-prob at temperature 1.
    """
    greedy = state.temperatures == 0
    logits = logits.float() / torch.where(greedy, 1.0, state.temperatures)[:, None]
    if banned is not None:
        logits = logits.masked_fill(banned, float("-inf"))
    logprobs = torch.log_softmax(logits, -1)
    kept = None
    if truncated:
        logprobs, kept = _truncate(logprobs, state)
    token_ids = torch.where(greedy, logprobs.argmax(-1), _sample_by_race(logprobs, state.seeds, positions))
    return SampledTokens(token_ids, logprobs.gather(-1, token_ids[:, None]).squeeze(-1), kept)


def _truncate(logprobs: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Keep the most likely ids allowed by top-k, top-p and min-p (at least one, at most MAX_KEPT) and renormalise."""
    width = min(MAX_KEPT, logprobs.shape[1])
    top, ids = logprobs.topk(width, dim=-1)
    probs = top.exp()
    # An id is kept while the mass before it is below top_p, so the id that crosses the threshold is included.
    keep = probs.cumsum(-1) - probs < state.top_p[:, None]
    limit = torch.where(state.top_k > 0, state.top_k, width)
    keep &= torch.arange(width, device=top.device)[None] < limit[:, None]
    keep &= probs >= state.min_p[:, None] * probs[:, :1]
    keep &= ~torch.isneginf(top)  # banned ids rank last, and a wide top-k reaches them
    keep[:, 0] = True
    # Rows without truncation may share the batch with truncated rows; they keep the whole vocabulary.
    whole = (state.top_p >= 1) & (state.top_k <= 0) & (state.min_p <= 0)
    kept = torch.where(keep & ~whole[:, None], ids, -1)
    top = top.masked_fill(~keep, float("-inf"))
    top = top - torch.logsumexp(top, -1, keepdim=True)
    narrowed = torch.full_like(logprobs, float("-inf")).scatter(-1, ids, top)
    return torch.where(whole[:, None], logprobs, narrowed), kept


def _sample_by_race(logprobs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[B, V] → the winning token of each row."""
    batch, width = logprobs.shape
    columns = torch.arange(min(width, BLOCK), device=logprobs.device).expand(batch, -1)
    if width > BLOCK:
        blocks = -(-width // BLOCK)
        padded = torch.nn.functional.pad(logprobs, (0, blocks * BLOCK - width), value=float("-inf"))
        padded = padded.view(batch, blocks, BLOCK)
        numbers = torch.arange(BLOCK_SALT, BLOCK_SALT + blocks, device=logprobs.device).expand(batch, -1)
        masses = torch.logsumexp(padded, -1) - exponential(seeds, positions, numbers).log()
        block = masses.argmax(-1)
        logprobs = padded[torch.arange(batch, device=block.device), block]
        columns = columns + block[:, None] * BLOCK
    race = logprobs - exponential(seeds, positions, columns).log()
    return columns.gather(1, race.argmax(-1, keepdim=True)).squeeze(1)


def exponential(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Unit exponentials for the columns [B, n] of each row, a pure function of (seed, position, column)."""
    low, high = hash_keys(seeds, positions)
    if seeds.device.type == "cpu":
        keys = (low.numpy().view(np.uint32), high.numpy().view(np.uint32))
        bits = torch.from_numpy(_bits(*keys, columns.numpy().astype(np.uint32)).view(np.int32))
    else:
        bits = _mix32(_mix32(columns.to(torch.int32) * -1640531535 + low[:, None]) ^ high[:, None])
    # A uniform in (0, 1), fine-grained near 0, so that unlikely tokens keep their exact probability.
    uniform = ((bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float32) + 0.5) * (1 / 4294967296)
    return -torch.log1p(-uniform.clamp(max=1 - 6e-8))


def _bits(low: np.ndarray, high: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The same hash with NumPy's unsigned integers, in a third of the operations."""
    x = columns * np.uint32(0x9E3779B1) + low[:, None]
    for last in (False, True):
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x *= np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
        if not last:
            x ^= high[:, None]
    return x


def hash_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys per row, which determine all random numbers of a draw."""
    key = _mix64(seeds + positions * 0x9E3779B97F4A7C1)
    return _low32(key), _low32(key >> 32)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits as int32, wrapping."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, with logical shifts."""
    x = x ^ ((x >> 30) & ((1 << 34) - 1))
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & ((1 << 37) - 1))
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit avalanche on int32, with logical shifts."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)
