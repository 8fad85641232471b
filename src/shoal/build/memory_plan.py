"""The memory plan of a run, made before its first step: KV cache slots, micro-batch size, activation checkpointing.

On a GPU, memory use is measured (memory_probe.py), and `decide` derives the plan from it. On a CPU only the cache is
limited. `make_plan` and `training_plan` also apply the plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from shoal.build.model import LoadedModel
from shoal.config.infer import InferConfig
from shoal.config.orch import EvalSamplingConfig, SamplingConfig
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import HardwareError
from shoal.core.protocols import Ranks
from shoal.engine.kv_cache import SlotCache
from shoal.models.attention import KEY_MULTIPLE, ROW_MULTIPLE, round_up
from shoal.models.decoder import Decoder, LayerShape
from shoal.planning.memory import GOOD_MICRO_BATCH, GPU_PREFILL_TOKENS, MIN_MICRO_BATCH, RESERVE, SURE_SLOTS
from shoal.runs.events import EventLog
from shoal.trainer.pass_graphs import sizes
from shoal.watch.console import Console

if TYPE_CHECKING:
    from shoal.trainer.policy import TrainedPolicy


CPU_SHARE = 0.25  # default share of free memory for the KV cache
KEYS_PER_TOKEN = 4  # gathered keys per token of a captured pass with shared prompts
POOL = 1.25  # memory of all captured passes, relative to the largest one (fragmentation)
GIB = 2**30


@dataclass(frozen=True)
class MemoryRequest:
    """Memory-related settings of a run; None = decided by the plan."""

    row_tokens: int  # longest training row
    step_tokens: int  # most tokens of one optimizer step
    rows_per_micro_batch: int | None
    recompute: bool | None
    slots: int
    context_tokens: int
    utilization: float | None
    captures: bool = False  # whether training passes may be captured as CUDA graphs
    prefill_tokens: int = 0  # most tokens of one prefill
    narrowed: bool = False  # whether sampling is truncated (top-k, top-p, min-p)
    trains: bool = True
    base: Literal["trained", "frozen", "stored"] = "trained"  # base weights: trained, frozen (LoRA), or quantised
    host_copy: int = 0  # bytes of host memory for a checkpoint that is written while the run continues
    sure_slots: int | None = None  # more slots than this only beside a full micro-batch; None = all are wanted


@dataclass(frozen=True)
class Cost:
    """Peak bytes of work on t tokens, a micro-batch or a decode step: fixed + per_token * t."""

    fixed: float
    per_token: float

    @staticmethod
    def through(peaks: Sequence[float], row_tokens: int) -> Cost:
        """From the peaks of one and two rows. If two did not fit, all of one row's peak counts as per-token cost."""
        per_token = (max(0, peaks[1] - peaks[0]) if len(peaks) > 1 else peaks[0]) / row_tokens
        return Cost(peaks[0] - per_token * row_tokens, per_token)

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def tokens_in(self, budget: float) -> int:
        if self.fixed > budget:
            return 0
        return int((budget - self.fixed) // self.per_token) if self.per_token > 0 else 1 << 40


UNAFFORDABLE = Cost(float("inf"), 0.0)  # not even one row fits


@dataclass(frozen=True)
class Sampling:
    """Peak bytes besides the cache: of the largest prefill, and of a decode step (one token per row). Both are CUDA
    graphs that do not share memory."""

    prefill: float = 0.0
    decode: Cost = Cost(0.0, 0.0)

    def at(self, rows: int) -> float:
        return self.prefill + self.decode.at(rows)

    def slots_in(self, share: float, slot: int) -> int:
        """Sequences whose cache (`slot` bytes each) fits into `share` bytes, besides prefills and decode steps."""
        left = share - self.prefill - self.decode.fixed
        return int(left / (slot + self.decode.per_token)) if left > 0 else 0


@dataclass(frozen=True)
class MemoryMeasurement:
    total: int
    held: int  # weights, masters, snapshot, reference: allocated before the first step
    optimizer: int  # moments, allocated in the first step
    slot: int  # cache bytes per sequence
    costs: Mapping[bool, Cost]  # with and without recompute
    sampling: Sampling = Sampling()
    elsewhere: int = 0  # bytes used by other programs and by libraries
    key_bytes: int = 0  # bytes per gathered key and value, gradients included


@dataclass(frozen=True)
class GraphRoom:
    """Memory limit of captured training passes, including gathered prompt keys."""

    limit_bytes: float = 0.0
    cost: Cost = Cost(0.0, 0.0)
    key_bytes: int = 0

    @staticmethod
    def of(tokens: int, cost: Cost, key_bytes: int) -> GraphRoom:
        """The limit for passes of up to `tokens` tokens."""
        return GraphRoom(POOL * (cost.at(tokens) + key_bytes * KEYS_PER_TOKEN * tokens), cost, key_bytes)

    def fits(self, tokens: int, keys: int, pool_bytes: int = 0) -> bool:
        """Beside what the pool has; how much of that it can use again shows only afterwards."""
        alone = self.cost.at(tokens) + self.key_bytes * keys
        return POOL * alone <= self.limit_bytes and pool_bytes < self.limit_bytes


@dataclass(frozen=True)
class MemoryPlan:
    slots: int
    micro_batch_tokens: int
    recompute: bool
    keys_for_token: int = 1  # gathered keys that use the memory of one token
    graphs: GraphRoom = GraphRoom()
    lines: tuple[tuple[str, float], ...] = ()  # (item, bytes)
    total: int = 0
    host_copy: int = 0  # bytes for the copy of a checkpoint; 0 = the run stops while a checkpoint is written

    def table(self) -> list[tuple[str, str]]:
        """Table rows: each item, and the free memory."""
        rows = [(name, f"{size / GIB:.2f} GiB") for name, size in self.lines]
        left = self.total - sum(size for _, size in self.lines)
        return [*rows, ("free", f"{left / GIB:.2f} of {self.total / GIB:.1f} GiB")]


def decide(measured: MemoryMeasurement, demand: MemoryRequest) -> MemoryPlan:
    """The requested cache, then the largest useful micro-batch; activation checkpointing only if a row needs it.

    If a row still does not fit, the cache is halved, down to one block of rows (no cache if nothing samples). CUDA
    graphs of prefills and decode steps keep their memory during training, so it is counted separately, and within the
    user's share for the engine.
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
    for slots in _decreasing_slots(wanted, demand.sure_slots) if demand.slots else (0,):
        room = budget - slots * measured.slot - measured.sampling.at(slots)
        full = max(least, 0 if demand.rows_per_micro_batch else min(GOOD_MICRO_BATCH, demand.step_tokens))
        optional = demand.sure_slots is not None and slots > demand.sure_slots
        if optional and measured.costs[ways[0]].tokens_in(max(room, 0)) < full:
            continue
        for recompute in ways if room >= 0 else ():
            cost = measured.costs[recompute]
            if cost.tokens_in(room) >= least:
                key_bytes = measured.key_bytes if demand.captures and not recompute else None
                passes = _passes(cost, room, range(least, full + 1), key_bytes)
                return _plan(measured, slots, passes, recompute)
    raise HardwareError(_refusal(measured, demand, budget, least))


def _decreasing_slots(slots: int, sure: int | None = None) -> Iterator[int]:
    """Halves, and `sure` in between."""
    slots = max(slots, ROW_MULTIPLE)
    while sure is not None and slots > sure:
        yield slots
        slots = max(slots // 2 // ROW_MULTIPLE * ROW_MULTIPLE, sure)
    while slots >= ROW_MULTIPLE:
        yield slots
        slots = slots // 2 // ROW_MULTIPLE * ROW_MULTIPLE


def _passes(cost: Cost, room: float, useful: range, key_bytes: int | None) -> tuple[int, GraphRoom]:
    """Tokens of a micro-batch and the memory of captured passes, which may take up to a quarter of the micro-batch.

    `key_bytes`: bytes per gathered key; None = nothing is captured.
    """
    tokens = min(cost.tokens_in(room), useful[-1])
    for size in reversed(sizes(tokens) if key_bytes is not None else []):
        graphs = GraphRoom.of(size, cost, key_bytes or 0)
        beside = min(tokens, cost.tokens_in(room - graphs.limit_bytes))
        if beside >= max(useful[0], tokens * MIN_MICRO_BATCH):
            return beside, graphs
    return tokens, GraphRoom()


def _plan(measured: MemoryMeasurement, slots: int, passes: tuple[int, GraphRoom], recompute: bool) -> MemoryPlan:
    tokens, graphs = passes
    lines: list[tuple[str, float]] = [
        ("other programs and libraries", measured.elsewhere),
        ("weights, masters and copies", measured.held),
        ("optimizer moments", measured.optimizer),
        (f"KV cache of {slots} sequences", slots * measured.slot),
        ("prefills and decode steps", measured.sampling.at(slots)),
        (
            f"micro-batch of {tokens} tokens{', activation checkpointing' if recompute else ''}",
            measured.costs[recompute].at(tokens),
        ),
        ("CUDA graphs of training passes", graphs.limit_bytes),
    ]
    lines = [(name, size) for name, size in lines if size > 0]
    keys = max(1, int(measured.costs[recompute].per_token // measured.key_bytes)) if measured.key_bytes else 1
    return MemoryPlan(slots, tokens, recompute, keys, graphs, tuple(lines), measured.total)


def _refusal(measured: MemoryMeasurement, demand: MemoryRequest, budget: float, least: int) -> str:
    """The error message: what does not fit, and settings to change."""
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
            _gib(cache, f"for a KV cache of {ROW_MULTIPLE} sequences"),
            _gib(sampling, "for prefills and decode steps"),
        ]
    elsewhere = f", {measured.elsewhere / GIB:.1f} GiB of it used by other programs" if measured.elsewhere > GIB else ""
    return (
        f"the run does not fit into {measured.total / GIB:.1f} GiB{elsewhere}: {', '.join(parts)}; "
        f"try {', '.join([*ways, 'a smaller model'])}"
    )


def _gib(size: float, what: str) -> str:
    return f"{size / GIB:.1f} GiB {what}" if size < float("inf") else f"more than available {what}"


def _ways_to_train(measured: MemoryMeasurement, demand: MemoryRequest, tokens: int) -> list[str]:
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
        ways.append("a quantised base (train.qlora_bnb=true needs a quarter)")
    return ways


def slot_bytes(layers: dict[int, LayerShape], dtype: torch.dtype, context_tokens: int) -> int:
    states = sum(layer.state_bytes for layer in layers.values())
    return SlotCache.bytes_per_token(layers, dtype) * round_up(context_tokens, KEY_MULTIPLE) + states


def gathered_bytes(layers: dict[int, LayerShape], decoder: Decoder) -> int:
    """Bytes of one key and value over all layers, plus their gradients per query head in one layer's backward."""
    heads = int(decoder.config.get_text_config().num_attention_heads)
    widest = max(heads * (layer.key_dim + layer.value_dim) for layer in layers.values())
    return SlotCache.bytes_per_token(layers, decoder.dtype) + widest * decoder.dtype.itemsize


def cache_only(decoder: Decoder, layers: dict[int, LayerShape], demand: MemoryRequest) -> MemoryPlan:
    """The plan on a CPU: the requested slots, limited by memory."""
    per_slot = slot_bytes(layers, decoder.dtype, demand.context_tokens)
    free = max(0, free_host_bytes() - demand.host_copy)
    affordable = int(free * (CPU_SHARE if demand.utilization is None else demand.utilization) // per_slot)
    slots = min(round_up(demand.slots, ROW_MULTIPLE), affordable // ROW_MULTIPLE * ROW_MULTIPLE)
    if slots < ROW_MULTIPLE:
        raise HardwareError(_too_small(per_slot, demand))
    tokens = demand.row_tokens * (demand.rows_per_micro_batch or 1)
    return MemoryPlan(slots, tokens, bool(demand.recompute))


def free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_copy_bytes(policy: TrainedPolicy) -> int:
    """Host memory for the copy of a checkpoint: masters, two moments, and the exported weights."""
    masters = list(policy.optimizer.masters.values())
    exported = sum(tensor.numel() for tensor in masters) * policy.decoder.dtype.itemsize
    copied = 3 * sum(tensor.numel() * tensor.element_size() for tensor in masters) + exported
    return copied if copied <= free_host_bytes() * CPU_SHARE else 0


def _too_small(per_slot: int, demand: MemoryRequest, sampling: float = 0, sampling_exceeds: bool = False) -> str:
    """Prefill memory does not depend on the sequence length: if it exceeds the share, only a larger one helps."""
    share = "is free" if demand.utilization is None else f"infer.gpu_memory_utilization={demand.utilization:g} allows"
    beside = f", prefills and decode steps {sampling / GIB:.1f} GiB" if sampling else ""
    shorter = "" if sampling_exceeds else "lower orch.seq_len (infer.max_model_len in a server), or "
    return (
        f"a KV cache for {ROW_MULTIPLE} sequences of {demand.context_tokens} tokens takes "
        f"{ROW_MULTIPLE * per_slot / GIB:.1f} GiB{beside}, more than {share}; "
        f"{shorter}raise infer.gpu_memory_utilization"
    )


def make_plan(
    config: RunConfig, model: LoadedModel, policy: TrainedPolicy | None, ranks: Ranks | None = None
) -> MemoryPlan:
    """Make and apply the plan (device thread). Without a policy it covers sampling only, on a CPU the cache only."""
    from shoal.build.memory_probe import sampling_plan

    copied = host_copy_bytes(policy) if policy is not None and model.sharded is None else 0
    demand = replace(_demand(config), host_copy=copied)
    if policy is None or model.decoder.device.type != "cuda":
        plan = sampling_plan(model.decoder, model.layers, demand)
    else:
        captures = policy.captures and not _narrows(config.orch.sampling)
        plan = _measured_plan(replace(demand, captures=captures), model, policy)
    plan = replace(plan, host_copy=copied)
    if model.sharded is not None and ranks is not None:
        plan = agreed(plan, ranks)
    model.trained.recompute(plan.recompute)
    if policy is not None:
        policy.bound_graphs(plan.graphs.fits)
    return plan


def agreed(plan: MemoryPlan, ranks: Ranks) -> MemoryPlan:
    """The smallest plan of all ranks: ranks with sharded weights must use the same micro-batches."""
    tokens, keys, kept = ranks.minimum([plan.micro_batch_tokens, plan.keys_for_token, int(not plan.recompute)])
    return replace(plan, micro_batch_tokens=tokens, keys_for_token=keys, recompute=not kept)


def training_plan(train: TrainConfig, batch_size: int, model: LoadedModel, policy: TrainedPolicy) -> MemoryPlan | None:
    """Make and apply the plan of a run without sampling (SFT); None on a CPU, where batching rows has no benefit."""
    if model.decoder.device.type != "cuda":
        return None

    demand = MemoryRequest(
        row_tokens=train.sequence_len,
        step_tokens=batch_size * train.sequence_len,
        rows_per_micro_batch=train.per_device_train_batch_size,
        recompute=train.recompute if isinstance(train.recompute, bool) else None,
        slots=0,
        context_tokens=1,
        utilization=None,
        captures=policy.captures,
        base=_base(train),
    )
    plan = _measured_plan(demand, model, policy)
    model.trained.recompute(plan.recompute)
    policy.bound_graphs(plan.graphs.fits)
    return plan


def _measured_plan(demand: MemoryRequest, model: LoadedModel, policy: TrainedPolicy) -> MemoryPlan:
    from shoal.build.memory_probe import measure

    def dry_run(rows: int) -> None:
        with _trainable(model):
            policy.dry_run(demand.row_tokens, rows, model.decoder)

    return decide(measure(model.decoder, model.layers, demand, policy.optimizer.moment_bytes, dry_run), demand)


def _narrows(sampling: SamplingConfig | EvalSamplingConfig) -> bool:
    """Whether sampling is truncated: such passes are not captured and need more memory."""
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    return top_p < 1 or any((value or 0) > 0 for value in (sampling.top_k, sampling.min_p, sampling.min_tokens))


@contextmanager
def _trainable(model: LoadedModel) -> Iterator[None]:
    """Measure with the whole copy, not shards: it uses at least as much, and an OOM error stays on one rank."""
    if model.sharded is None:
        yield
        return
    trained = [p.requires_grad for p in model.sharded.model.parameters()]
    for parameter, is_trained in zip(model.decoder.model.parameters(), trained, strict=True):
        parameter.requires_grad_(is_trained)
    model.decoder.model.train()
    try:
        yield
    finally:
        model.decoder.model.eval().requires_grad_(False)


def _demand(config: RunConfig) -> MemoryRequest:
    train, infer, orch = config.train, config.infer, config.orch
    assert infer.max_model_len is not None and infer.max_num_seqs is not None and orch.seq_len is not None
    return MemoryRequest(
        row_tokens=train.sequence_len,
        step_tokens=max(train.sequence_len, orch.batch_size * orch.seq_len // train.minibatches),
        rows_per_micro_batch=train.per_device_train_batch_size,
        recompute=train.recompute if isinstance(train.recompute, bool) else None,
        slots=infer.max_num_seqs,
        context_tokens=infer.max_model_len,
        utilization=infer.gpu_memory_utilization,
        sure_slots=SURE_SLOTS if infer.max_num_seqs == orch.batch_size else None,  # the default, or the same number
        prefill_tokens=GPU_PREFILL_TOKENS,
        narrowed=any(map(_narrows, [orch.sampling, *([orch.eval.sampling] if orch.eval else [])])),
        base=_base(train),
    )


def _base(train: TrainConfig) -> Literal["trained", "frozen", "stored"]:
    return "stored" if train.quantised else "frozen" if train.lora else "trained"


def cpu_share(infer: InferConfig, model: LoadedModel) -> str | None:
    """A notice on the meaning of infer.gpu_memory_utilization on a CPU, if it is set."""
    share = infer.gpu_memory_utilization
    if share is None or infer.engine != "embedded" or model.decoder.device.type != "cpu":
        return None
    return f"infer.gpu_memory_utilization: on a CPU, the KV cache may take {share:g} of the free memory"


def path_lines(path: str) -> list[str]:
    """A log line on the decode path; none for plain eager decoding on a CPU."""
    return [] if path == "eager" else [f"rollouts: {path}"]


def teacher_line(model: LoadedModel) -> list[str]:
    """The teacher's share of the weights, if there is one on this device."""
    return [f"teacher: {model.teacher_bytes / GIB:.3g} GiB of weights on the device"] if model.teacher_bytes else []


def reference_line(policy: TrainedPolicy) -> list[str]:
    """What the reference adds to the weights, if there is one."""
    if policy.reference is None:
        return []
    if policy.reference.decoder is policy.decoder:
        return ["reference: the model before training, which shares the weights of the policy"]
    return [f"reference: a frozen copy, {policy.reference.decoder.weight_bytes / GIB:.3g} GiB of weights on the device"]


def lines_of(plan: MemoryPlan) -> list[str]:
    """The plan as a table; empty if nothing was measured."""
    return [f"memory  {name:<52} {size:>22}" for name, size in (plan.table() if plan.lines else [])]


def report_plan(plan: MemoryPlan, notice: str | None, console: Console, events: EventLog) -> None:
    """Print the plan and write it to the events of the run."""
    if notice is not None:
        console.note(notice)
    for line in lines_of(plan):
        console.note(line)
    names = ("slots", "micro_batch_tokens", "keys_for_token", "recompute")
    data: dict[str, Any] = {name: getattr(plan, name) for name in names}
    events.emit("memory-plan", "memory plan", data={**data, "bytes": dict(plan.lines)})
