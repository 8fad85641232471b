"""The memory plan: what is decided from what the device holds, and from what training and sampling take.

On a GPU that is measured (measuring.py), not estimated; `decide` turns the figures into cache slots, tokens of a
micro-batch and whether layers are computed again in the backward. On a CPU only the cache is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.engine.cache import SlotCache
from shoal.errors import HardwareError
from shoal.models.attention import KEY_MULTIPLE, ROW_MULTIPLE, round_up
from shoal.models.decoder import Decoder, LayerShape
from shoal.trainer.graphs import sizes

CPU_SHARE = 0.25  # of what is free, for the cache, unless the user says otherwise
RESERVE = 0.06  # of the device: fragments, and what was not foreseen
GOOD_MICRO_BATCH = 32_768  # tokens that keep a large GPU busy; more only takes memory
KEYS_A_TOKEN = 4  # gathered for a token of a captured pass, where answers share their prompts
POOL = 1.25  # of what the largest captured pass takes alone, for all of them: sizes do not fit into each other
KEPT_OF_MICRO_BATCH = 0.75  # where captured passes want a share of its memory
GIB = 2**30


@dataclass(frozen=True)
class Demand:
    """What the configuration asks for; None = the plan decides."""

    row_tokens: int  # a training row is never longer
    step_tokens: int  # rows of one optimizer step together, at most
    rows_per_micro_batch: int | None
    recompute: bool | None
    slots: int
    context_tokens: int
    utilization: float | None
    captures: bool = False  # whether passes may become graphs
    prefill_tokens: int = 0  # of one prefill at most
    narrowed: bool = False  # whether tokens are drawn from less than the whole vocabulary
    trains: bool = True
    base: Literal["trained", "frozen", "stored"] = "trained"  # its weights: frozen under adapters, or quantised too


@dataclass(frozen=True)
class Cost:
    """Peak bytes of work on t tokens, a micro-batch or a decode step: fixed + per_token * t."""

    fixed: float
    per_token: float

    @staticmethod
    def through(peaks: Sequence[float], row_tokens: int) -> Cost:
        """Of one row and of two; if two did not fit, all of one row counts as its tokens', which is no less."""
        per_token = (max(0, peaks[1] - peaks[0]) if len(peaks) > 1 else peaks[0]) / row_tokens
        return Cost(peaks[0] - per_token * row_tokens, per_token)

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def tokens_in(self, budget: float) -> int:
        if self.fixed > budget:
            return 0
        return int((budget - self.fixed) // self.per_token) if self.per_token > 0 else 1 << 40


UNAFFORDABLE = Cost(float("inf"), 0.0)  # not even one row


@dataclass(frozen=True)
class Sampling:
    """Peak bytes beside the cache: of the largest prefill, and of a decode step, which has a token a row. Both are in
    graphs, and neither has the other's memory."""

    prefill: float = 0.0
    decode: Cost = Cost(0.0, 0.0)

    def at(self, rows: int) -> float:
        return self.prefill + self.decode.at(rows)

    def slots_in(self, share: float, slot: int) -> int:
        """Sequences whose cache, of `slot` bytes each, fits into a share of the device together with these."""
        left = share - self.prefill - self.decode.fixed
        return int(left / (slot + self.decode.per_token)) if left > 0 else 0


@dataclass(frozen=True)
class Measured:
    total: int
    held: int  # weights, masters, snapshot, reference: there before anything runs
    optimizer: int  # moments that the first step allocates
    slot: int  # bytes of cache a sequence
    costs: Mapping[bool, Cost]  # with and without recompute
    sampling: Sampling = Sampling()
    elsewhere: int = 0  # what other programs and this one's libraries take
    key_bytes: int = 0  # of a gathered key and value, with what a backward makes of them


@dataclass(frozen=True)
class GraphRoom:
    """Memory that captured passes keep, prompts' keys gathered for every answer included."""

    limit_bytes: float = 0.0
    cost: Cost = Cost(0.0, 0.0)
    key_bytes: int = 0

    @staticmethod
    def of(tokens: int, cost: Cost, key_bytes: int) -> GraphRoom:
        """For passes of up to so many tokens."""
        return GraphRoom(POOL * (cost.at(tokens) + key_bytes * KEYS_A_TOKEN * tokens), cost, key_bytes)

    def fits(self, tokens: int, keys: int, pool_bytes: int = 0) -> bool:
        """Beside what the pool has; how much of that it can use again shows only afterwards."""
        alone = self.cost.at(tokens) + self.key_bytes * keys
        return POOL * alone <= self.limit_bytes and pool_bytes < self.limit_bytes


@dataclass(frozen=True)
class MemoryPlan:
    slots: int
    micro_batch_tokens: int
    recompute: bool
    keys_for_token: int = 1  # gathered keys that take the memory of a token
    graphs: GraphRoom = GraphRoom()
    lines: tuple[tuple[str, float], ...] = ()  # what takes how many bytes
    total: int = 0

    def table(self) -> list[tuple[str, str]]:
        """Rows for people: the parts, and what is left."""
        rows = [(name, f"{size / GIB:.2f} GiB") for name, size in self.lines]
        left = self.total - sum(size for _, size in self.lines)
        return [*rows, ("left free", f"{left / GIB:.2f} of {self.total / GIB:.1f} GiB")]


def decide(measured: Measured, demand: Demand) -> MemoryPlan:
    """Cache as asked for, then the largest useful micro-batch; layers again only if a row does not fit otherwise.

    Where that does not fit either, the cache gives way, down to one block of rows; where nothing samples, there is
    none. What prefills and decode steps take is in graphs, which keep it while training goes on: it counts beside the
    rest, and within the share that a user gave the engine.
    """
    budget = measured.total * (1 - RESERVE) - measured.elsewhere - measured.held - measured.optimizer
    share = measured.total * demand.utilization if demand.utilization is not None else budget
    affordable = measured.sampling.slots_in(share, measured.slot) // ROW_MULTIPLE * ROW_MULTIPLE
    wanted = min(round_up(demand.slots, ROW_MULTIPLE), affordable)
    least = demand.row_tokens * (demand.rows_per_micro_batch or 1)
    ways = [demand.recompute] if demand.recompute is not None else [False, True]
    sampling = measured.sampling.at(ROW_MULTIPLE)
    if wanted < ROW_MULTIPLE and demand.utilization is not None and demand.slots and sampling < budget:
        raise HardwareError(_too_small(measured.slot, demand, sampling, sampling >= share))
    for slots in _ever_fewer(wanted) if demand.slots else (0,):
        room = budget - slots * measured.slot - measured.sampling.at(slots)
        for recompute in ways if room >= 0 else ():
            cost = measured.costs[recompute]
            if cost.tokens_in(room) >= least:
                most = least if demand.rows_per_micro_batch else max(least, min(GOOD_MICRO_BATCH, demand.step_tokens))
                key_bytes = measured.key_bytes if demand.captures and not recompute else None
                passes = _passes(cost, room, range(least, most + 1), key_bytes)
                return _plan(measured, slots, passes, recompute)
    raise HardwareError(_refusal(measured, demand, budget, least))


def _ever_fewer(slots: int) -> Iterator[int]:
    slots = max(slots, ROW_MULTIPLE)
    while slots >= ROW_MULTIPLE:
        yield slots
        slots = slots // 2 // ROW_MULTIPLE * ROW_MULTIPLE


def _passes(cost: Cost, room: float, useful: range, key_bytes: int | None) -> tuple[int, GraphRoom]:
    """Tokens of a micro-batch, and what captured passes may keep, which costs the other no more than a quarter.

    `key_bytes`: of a gathered key; None = nothing is captured.
    """
    tokens = min(cost.tokens_in(room), useful[-1])
    for size in reversed(sizes(tokens) if key_bytes is not None else []):
        graphs = GraphRoom.of(size, cost, key_bytes or 0)
        beside = min(tokens, cost.tokens_in(room - graphs.limit_bytes))
        if beside >= max(useful[0], tokens * KEPT_OF_MICRO_BATCH):
            return beside, graphs
    return tokens, GraphRoom()


def _plan(measured: Measured, slots: int, passes: tuple[int, GraphRoom], recompute: bool) -> MemoryPlan:
    tokens, graphs = passes
    lines: list[tuple[str, float]] = [
        ("other programs and libraries", measured.elsewhere),
        ("weights, masters and copies", measured.held),
        ("optimizer moments", measured.optimizer),
        (f"cache of {slots} sequences", slots * measured.slot),
        ("prefills and decode steps", measured.sampling.at(slots)),
        (
            f"a micro-batch of {tokens} tokens{', layers again' if recompute else ''}",
            measured.costs[recompute].at(tokens),
        ),
        ("graphs of training passes", graphs.limit_bytes),
    ]
    lines = [(name, size) for name, size in lines if size > 0]
    keys = max(1, int(measured.costs[recompute].per_token // measured.key_bytes)) if measured.key_bytes else 1
    return MemoryPlan(slots, tokens, recompute, keys, graphs, tuple(lines), measured.total)


def _refusal(measured: Measured, demand: Demand, budget: float, least: int) -> str:
    """What does not fit, and the settings that would make it fit."""
    cache, sampling = ROW_MULTIPLE * measured.slot, measured.sampling.at(ROW_MULTIPLE)
    parts = [_gib(measured.held + measured.optimizer, "of weights" + (" and optimizer" if measured.optimizer else ""))]
    ways = ["a lower infer.max_model_len (--max-tokens in an evaluation)"]
    if demand.trains:
        cheapest = measured.costs[True if demand.recompute is None else demand.recompute]
        parts.append(_gib(cheapest.at(least), f"for {'a micro-batch' if least > demand.row_tokens else 'one row'}"))
        room = budget - (cache + sampling if demand.slots else 0)
        ways = _ways_to_train(measured, demand, measured.costs[True].tokens_in(room))
    if demand.slots:
        parts += [
            _gib(cache, f"for a cache of {ROW_MULTIPLE} sequences"),
            _gib(sampling, "for prefills and decode steps"),
        ]
    elsewhere = f", beside {measured.elsewhere / GIB:.1f} GiB of other programs" if measured.elsewhere > GIB else ""
    return (
        f"this does not fit: {', '.join(parts)}, of {measured.total / GIB:.1f} GiB{elsewhere}; "
        f"try {', '.join([*ways, 'a smaller model'])}"
    )


def _gib(size: float, what: str) -> str:
    return f"{size / GIB:.1f} GiB {what}" if size < float("inf") else f"more than there is {what}"


def _ways_to_train(measured: Measured, demand: Demand, tokens: int) -> list[str]:
    ways = []
    if demand.recompute is False:
        ways.append("train.recompute=true")
    if (demand.rows_per_micro_batch or 1) > 1:
        ways.append("train.per_device_train_batch_size=1")
    with_it = " with an equal orch.seq_len" if demand.slots else ""
    if 256 <= tokens < demand.row_tokens:
        ways.append(f"train.sequence_len={tokens // 256 * 256}{with_it}")
    elif tokens < demand.row_tokens:
        ways.append(f"a lower train.sequence_len{with_it}")
    if demand.base == "trained":
        ways.append("train.lora=true (or a quantised base)")
    elif demand.base == "frozen":
        ways.append("a quantised base (train.qlora_bnb=true takes a quarter)")
    return ways


def slot_bytes(layers: dict[int, LayerShape], dtype: torch.dtype, context_tokens: int) -> int:
    return SlotCache.bytes_per_token(layers, dtype) * round_up(context_tokens, KEY_MULTIPLE)


def gathered_bytes(layers: dict[int, LayerShape], decoder: Decoder) -> int:
    """Of one key and value of all layers; and their gradients, which in the backward of one are those of every head."""
    heads = int(decoder.config.get_text_config().num_attention_heads)
    widest = max(heads * (layer.key_dim + layer.value_dim) for layer in layers.values())
    return SlotCache.bytes_per_token(layers, decoder.dtype) + widest * decoder.dtype.itemsize


def cache_only(decoder: Decoder, layers: dict[int, LayerShape], demand: Demand) -> MemoryPlan:
    """On a CPU: as many slots as asked for, if they fit."""
    per_slot = slot_bytes(layers, decoder.dtype, demand.context_tokens)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    affordable = int(free * (CPU_SHARE if demand.utilization is None else demand.utilization) // per_slot)
    slots = min(round_up(demand.slots, ROW_MULTIPLE), affordable // ROW_MULTIPLE * ROW_MULTIPLE)
    if slots < ROW_MULTIPLE:
        raise HardwareError(_too_small(per_slot, demand))
    tokens = demand.row_tokens * (demand.rows_per_micro_batch or 1)
    return MemoryPlan(slots, tokens, bool(demand.recompute))


def _too_small(per_slot: int, demand: Demand, sampling: float = 0, sampling_exceeds: bool = False) -> str:
    """Prefills take what they take for any length of a sequence, so where they alone exceed it only more helps."""
    given = "is free" if demand.utilization is None else f"infer.gpu_memory_utilization {demand.utilization:g} gives it"
    beside = f", prefills and decode steps {sampling / GIB:.1f} GiB" if sampling else ""
    shorter = "" if sampling_exceeds else "lower orch.seq_len (infer.max_model_len in a server), or "
    return (
        f"a cache for {ROW_MULTIPLE} sequences of {demand.context_tokens} tokens takes "
        f"{ROW_MULTIPLE * per_slot / GIB:.1f} GiB{beside}, more than {given}; "
        f"{shorter}raise infer.gpu_memory_utilization"
    )
