"""Bytes of device memory of a run, by part, and the micro-batch that fits: an estimate of what build/memory_plan.py
measures on the device before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.planning.shapes import ModelShape

RESERVE = 0.06  # share of the device kept free for fragmentation and unplanned use
GOOD_MICRO_BATCH = 32_768  # tokens; enough to keep a large GPU busy
MIN_MICRO_BATCH = 0.75  # captured passes may shrink a micro-batch at most to this share
SURE_SLOTS = 256  # more slots than this only beside a full micro-batch
GPU_PREFILL_TOKENS = 32_768  # prompt tokens of one prefill: enough to fill the device, and little delay for decoding
ROW_MULTIPLE = 8  # slots come in blocks, as in models/attention.py
TILE_BYTES = 1 << 30  # one tile of logits in 16 bits

# Compared with the recorded runs by benchmarks/plan_errors.py.
SAVED = 0.67  # measured over counted bytes that the forward pass of a layer keeps for the backward
SAVED_FOR_ADAPTERS = 0.9  # copies of the inputs of adapted layers that adapters keep
LAYER_PEAK = 10.0  # bytes alive while one layer's backward runs, relative to what its forward keeps
TILES = 2.0  # tiles of logits and their gradients that exist at once
LIBRARIES = 0.6 * 2**30  # CUDA context and libraries
STATE_BYTES = 16  # per trained weight: fp32 master, two moments, summed gradient


@dataclass(frozen=True)
class TrainingMemory:
    """Memory of the passes of one device."""

    shape: ModelShape
    adapters: bool

    def layer_bytes(self) -> float:
        """What the forward pass of one layer keeps per token."""
        shape = self.shape
        kept = 2.0 * SAVED * (4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 3 * shape.inner)
        return kept + (2.0 * SAVED_FOR_ADAPTERS * shape.layer_inputs if self.adapters else 0.0)

    def token_bytes(self, recompute: bool) -> float:
        """Per token of a micro-batch; with activation checkpointing only the input of each layer is kept."""
        kept = 2.0 * self.shape.hidden if recompute else self.layer_bytes()
        return self.shape.layers * kept + LAYER_PEAK * self.layer_bytes()

    def fixed_bytes(self, tokens: float) -> float:
        return TILES * min(TILE_BYTES, 2.0 * self.shape.vocab * tokens)

    def at(self, tokens: float, recompute: bool) -> float:
        return tokens * self.token_bytes(recompute) + self.fixed_bytes(tokens)

    def tokens_in(self, room: float, recompute: bool) -> float:
        return max(0.0, (room - TILES * TILE_BYTES) / self.token_bytes(recompute))


def prefill_bytes(shape: ModelShape, tokens: float) -> float:
    """Peak of one prefill, besides the cache."""
    kept = 4 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 3 * shape.inner
    return 2.0 * kept * tokens


def decode_bytes(shape: ModelShape, slots: int) -> float:
    """Logits of a decode step, in 16 bits and fp32."""
    return 6.0 * shape.vocab * slots


@dataclass(frozen=True)
class MemoryNeeds:
    """Of one device, before slots and micro-batch are chosen."""

    total: float
    held: tuple[tuple[str, float], ...]  # weights, optimizer state, copies
    slot: float  # KV cache of one sequence; 0 = this device does not sample
    slots: int  # wanted
    row_tokens: int  # 0 = this device does not train
    step_tokens: float
    recompute: bool | None  # None = only if a row needs it
    captures: bool  # whether training passes may be captured as CUDA graphs
    prefill_tokens: float = 0.0


@dataclass(frozen=True)
class MemoryEstimate:
    parts: tuple[tuple[str, float], ...]  # (name, bytes)
    total: float
    slots: int
    micro_batch_tokens: float
    recompute: bool
    captured: bool
    fits: bool

    @property
    def used(self) -> float:
        return sum(size for _, size in self.parts)

    @property
    def peak(self) -> float:
        """What PyTorch reports as allocated at most: sampling and training do not use their memory at the same time."""
        turns = [size for name, size in self.parts if name.startswith(("prefill", "micro-batch"))]
        others = sum(size for name, size in self.parts if not name.startswith(("prefill", "micro-batch", "CUDA")))
        return others + max(turns, default=0.0)


def estimate_memory(shape: ModelShape, needs: MemoryNeeds, adapters: bool) -> MemoryEstimate:
    """All wanted slots if possible, then the largest useful micro-batch: the rule of build/memory_plan.py."""
    training = TrainingMemory(shape, adapters)
    found = None
    for slots in _halves(needs.slots) if needs.slots else (0,):
        for recompute in (False, True) if needs.recompute is None else (needs.recompute,):
            found = _at(training, needs, slots, recompute)
            whole = found.micro_batch_tokens >= min(GOOD_MICRO_BATCH, needs.step_tokens) * MIN_MICRO_BATCH
            if found.fits and (whole or slots <= SURE_SLOTS):
                return found
    assert found is not None
    return found


def _at(training: TrainingMemory, needs: MemoryNeeds, slots: int, recompute: bool) -> MemoryEstimate:
    shape = training.shape
    parts = [("CUDA context and libraries", LIBRARIES), *needs.held]
    if slots:
        sampling = prefill_bytes(shape, needs.prefill_tokens) + decode_bytes(shape, slots)
        parts += [(f"KV cache of {slots} sequences", slots * needs.slot), ("prefills and decode steps", sampling)]
    budget = needs.total * (1 - RESERVE)
    room = budget - sum(size for _, size in parts)
    captured, tokens = False, 0.0
    if needs.row_tokens:
        affordable = training.tokens_in(room, recompute)
        useful = max(float(needs.row_tokens), min(GOOD_MICRO_BATCH, needs.step_tokens))
        captured = needs.captures and not recompute and affordable >= needs.row_tokens
        tokens = min(affordable, useful) * (MIN_MICRO_BATCH if captured else 1)
        tokens = max(1, tokens // needs.row_tokens) * needs.row_tokens  # whole rows
        name = f"micro-batch of {tokens:,.0f} tokens{', activation checkpointing' if recompute else ''}"
        parts.append((name, training.at(min(tokens, needs.step_tokens), recompute)))
    fits = sum(size for _, size in parts) <= budget
    return MemoryEstimate(tuple(parts), needs.total, slots, tokens, recompute, captured and fits, fits)


def _halves(slots: int) -> Iterator[int]:
    while slots > ROW_MULTIPLE:
        yield slots
        slots //= 2
    yield ROW_MULTIPLE


def round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
