"""How many sequences the engine may hold at once, from what memory is free after the model is loaded."""

from __future__ import annotations

import os

import torch

from shoal.engine.cache import SlotCache
from shoal.errors import HardwareError
from shoal.models.attention import KEY_MULTIPLE, ROW_MULTIPLE, round_up
from shoal.models.decoder import Decoder, LayerShape

# Shares of what is free that the cache may take unless the user says otherwise; the rest is for training.
CPU_SHARE = 0.25
GPU_SHARE = 0.4


def engine_slots(
    decoder: Decoder, layers: dict[int, LayerShape], wanted: int, context_tokens: int, utilization: float | None
) -> int:
    """Slots for `wanted` sequences of `context_tokens`, or as many as fit, always a multiple of the row padding."""
    per_slot = SlotCache.bytes_per_token(layers, decoder.dtype) * round_up(context_tokens, KEY_MULTIPLE)
    affordable = _budget_bytes(decoder.device, utilization) // per_slot
    slots = min(round_up(wanted, ROW_MULTIPLE), int(affordable) // ROW_MULTIPLE * ROW_MULTIPLE)
    if slots < ROW_MULTIPLE:
        raise HardwareError(
            f"a cache for {ROW_MULTIPLE} sequences of {context_tokens} tokens takes "
            f"{ROW_MULTIPLE * per_slot / 2**30:.1f} GiB, more than is free; lower orch.seq_len, "
            "or raise infer.gpu_memory_utilization"
        )
    return slots


def _budget_bytes(device: torch.device, utilization: float | None) -> float:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, utilization * total) if utilization is not None else free * GPU_SHARE
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free * (utilization if utilization is not None else CPU_SHARE)
