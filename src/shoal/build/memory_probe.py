"""Measures the device memory of a training pass, a prefill and a decode step, for the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from shoal.build.memory_plan import (
    UNAFFORDABLE,
    Cost,
    MemoryMeasurement,
    MemoryPlan,
    MemoryRequest,
    Sampling,
    cache_only,
    decide,
    gathered_bytes,
    slot_bytes,
)
from shoal.engine.sampler import SamplingState, draw
from shoal.models import kernels
from shoal.models.decoder import Decoder, LayerShape

DECODED_ROWS = 64


class Costs(dict[bool, Cost]):
    """With and without activation checkpointing. Measured on first use, since most plans need only one."""

    def __init__(self, measure: Callable[[bool], Cost]) -> None:
        self._measure = measure

    def __missing__(self, recompute: bool) -> Cost:
        self[recompute] = found = self._measure(recompute)
        return found


def measure(
    decoder: Decoder,
    layers: dict[int, LayerShape],
    demand: MemoryRequest,
    optimizer_bytes: int,
    dry_run: Callable[[int], None],
) -> MemoryMeasurement:
    """`dry_run(rows)` computes and discards a gradient over full rows. It runs with one row and with two."""
    device = decoder.device
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    held = torch.cuda.memory_allocated(device)

    def training(recompute: bool) -> Cost:
        decoder.recompute(recompute)
        peaks = _peaks(device, dry_run)
        return Cost.through(peaks, demand.row_tokens) if peaks else UNAFFORDABLE

    slot = slot_bytes(layers, decoder.dtype, demand.context_tokens)
    sampling = _sampling(decoder, demand) if demand.slots else Sampling()
    key_bytes = gathered_bytes(layers, decoder)
    return MemoryMeasurement(total, held, optimizer_bytes, slot, Costs(training), sampling, elsewhere, key_bytes)


def sampling_plan(decoder: Decoder, layers: dict[int, LayerShape], demand: MemoryRequest) -> MemoryPlan:
    """The plan of an engine without training."""
    if decoder.device.type != "cuda":
        return cache_only(decoder, layers, demand)
    alone = replace(demand, trains=False)
    return decide(measure(decoder, layers, alone, 0, lambda rows: None), alone)


def _sampling(decoder: Decoder, demand: MemoryRequest) -> Sampling:
    """Measure the largest possible prefill, and decode steps of two sizes."""
    device, half = decoder.device, max(1, min(demand.slots, DECODED_ROWS) // 2)
    context = min(demand.context_tokens, decoder.max_positions or demand.context_tokens)
    tokens = max(context, min(demand.prefill_tokens, demand.slots * context))
    prefill = _peak_or_all(device, lambda: dry_prefill(decoder, tokens, context))
    peaks = [
        _peak_or_all(device, lambda rows=rows: dry_decode(decoder, rows, demand.narrowed)) for rows in (half, 2 * half)
    ]
    return Sampling(prefill, Cost.through(peaks, half) if max(peaks) < float("inf") else UNAFFORDABLE)


@torch.no_grad()
def dry_prefill(decoder: Decoder, tokens: int, context: int) -> None:
    """Whole contexts, and what is left of the last."""
    ids = torch.arange(tokens, device=decoder.device)
    packed = decoder.pack(np.array([*range(0, tokens, context), tokens]))
    decoder.hidden((ids % decoder.vocab_size)[None], (ids % context)[None], packed)


@torch.no_grad()
def dry_decode(decoder: Decoder, rows: int, narrowed: bool) -> None:
    """From a token of each row to the next, but for the cache, which is planned by itself."""
    device = decoder.device
    ids, packed = torch.arange(rows, device=device) % decoder.vocab_size, decoder.pack(np.arange(rows + 1))
    logits = decoder.logits(decoder.hidden(ids[None], torch.zeros_like(ids)[None], packed)[0])
    state, counts = SamplingState.allocate(rows, device), torch.zeros(rows, dtype=torch.int64, device=device)
    if narrowed or not kernels.available(device.type == "cuda"):
        draw(logits, state, counts, state.banned(counts, logits.shape[1]), truncated=narrowed)
        return
    from shoal.engine.kernels.sampling import draw_tokens

    draw_tokens(logits, state.seeds, counts, state.temperatures)


def _peaks(device: torch.device, dry_run: Callable[[int], None]) -> list[int]:
    """Of one row and of two; of as many as there is memory for."""
    found: list[int] = []
    try:
        for rows in (1, 2):
            found.append(_peak(device, lambda rows=rows: dry_run(rows)))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return found


def _peak_or_all(device: torch.device, work: Callable[[], None]) -> float:
    """Of what does not fit, more than there is."""
    try:
        return _peak(device, work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return float("inf")


def _peak(device: torch.device, work: Callable[[], None]) -> int:
    """Bytes above what is held now, at the highest; the first run fills the libraries' caches and does not count."""
    before = 0
    for _ in range(2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
    return torch.cuda.max_memory_allocated(device) - before
