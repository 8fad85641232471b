"""Step time and memory of a run on one or several devices, from the time and the memory model.

Several devices are an extrapolation: no run with more than one GPU is recorded. The result lists every assumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.config.resolve import MAX_NUM_SEQS, MAX_SLOTS
from shoal.core.errors import ConfigError
from shoal.planning.memory import (
    GPU_PREFILL_TOKENS,
    ROW_MULTIPLE,
    STATE_BYTES,
    MemoryEstimate,
    MemoryNeeds,
    estimate_memory,
    round_up,
)
from shoal.planning.shapes import ModelShape
from shoal.planning.time_model import (
    ALL_REDUCE_S,
    CONSTANTS,
    DEVICES_PER_MACHINE,
    GIB,
    LINK_SHARE,
    NETWORK_BYTES_PER_S,
    Constants,
    Device,
    Rollouts,
    TimeModel,
)

KEY_MULTIPLE = 16  # as in models/attention.py


@dataclass(frozen=True)
class Workload:
    """What a run asks for, with the meanings of the configuration keys."""

    rollouts: int = 128  # per step
    group: int = 8
    prompt_tokens: float = 256
    new_tokens: float = 512  # mean
    longest: float = 512
    sequence_len: int = 2048
    slots: int | None = None
    lora_rank: int = 0
    recompute: bool | None = None
    reference: bool = False  # a reference model scores every token: a frozen copy, or the model without its adapters
    teacher: ModelShape | None = None
    gpus: int = 1
    sharding: str | None = None  # none, fsdp, or None = fsdp only if it is needed
    sampler_gpus: int = 0  # of `gpus`; 0 = the devices that train also sample
    tensor_parallel: int = 1
    steps: int = 100

    @property
    def trainers(self) -> int:
        return self.gpus - self.sampler_gpus

    @property
    def replicas(self) -> int:
        """Copies of the model that sample."""
        return (self.sampler_gpus or self.gpus) // self.tensor_parallel

    @property
    def trained_tokens(self) -> float:
        """Tokens of a step's rows; rollouts of one group share their prompt within a row."""
        fitting = (self.sequence_len - self.prompt_tokens) / self.new_tokens
        together = max(1, min(self.group, math.floor(fitting + 0.01)))
        return self.rollouts * (self.new_tokens + self.prompt_tokens / together)

    def check(self) -> None:
        problems = [
            (self.rollouts % self.group != 0, "--rollouts", f"must be a multiple of --group ({self.group})"),
            (self.longest < self.new_tokens, "--longest", f"must be at least --new-tokens ({self.new_tokens:g})"),
            (
                self.prompt_tokens + self.longest > self.sequence_len,
                "--sequence-len",
                f"must be at least {self.prompt_tokens + self.longest:g}, the prompt and the longest completion",
            ),
            (self.sampler_gpus >= self.gpus, "--sampler-gpus", f"must be less than --gpus ({self.gpus})"),
            (
                bool(self.tensor_parallel > 1 and not self.sampler_gpus),
                "--tp",
                "needs --sampler-gpus: the embedded engine does not split a model",
            ),
            (
                bool(self.sampler_gpus % self.tensor_parallel),
                "--tp",
                f"must divide --sampler-gpus ({self.sampler_gpus})",
            ),
        ]
        for wrong, name, what in problems:
            if wrong:
                raise ConfigError(f"command line: {name}: {what}")


@dataclass(frozen=True)
class Estimate:
    """Seconds are those of one step; memory is that of one device of each kind."""

    shape: ModelShape
    device: Device
    workload: Workload
    parts_s: dict[str, float]  # sampling, training, sync, other; communication is part of training
    communication_s: float
    micro_batches: int
    memory: dict[str, MemoryEstimate]  # "device", or "trainer" and "sampler"
    assumptions: tuple[str, ...]
    advice: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def hours(self) -> float:
        """Of the whole run."""
        return self.workload.steps * self.step_s / 3600

    @property
    def fits(self) -> bool:
        return all(found.fits for found in self.memory.values())


def estimate(shape: ModelShape, device: Device, workload: Workload, constants: Constants = CONSTANTS) -> Estimate:
    """With sharding left open: fully sharded only if several devices do not fit otherwise."""
    workload.check()
    if workload.sharding is not None or workload.trainers == 1:
        chosen = replace(workload, sharding=workload.sharding or "none")
        return _with_advice(_estimate(shape, device, chosen, constants), constants)
    ways = [_estimate(shape, device, replace(workload, sharding=way), constants) for way in ("none", "fsdp")]
    return _with_advice(next((way for way in ways if way.fits), ways[-1]), constants)


def _estimate(shape: ModelShape, device: Device, workload: Workload, constants: Constants) -> Estimate:
    memory = _memory(shape, device, workload)
    trainer, sampler = memory.get("trainer") or memory["device"], memory.get("sampler") or memory["device"]
    model = TimeModel(shape, device, constants)
    training_s, communication_s, micro_batches = _training(model, workload, trainer)
    processes = 1 if workload.sampler_gpus else workload.gpus  # the split layout has one orchestrator
    host_s = constants.rollout_s * workload.rollouts / processes
    parts = {
        "sampling": _sampling_s(model, workload, sampler.slots) + host_s,
        "training": training_s + communication_s,
        "sync": _sync_s(model, workload),
        "other": constants.other_s * workload.rollouts / processes,
    }
    return Estimate(
        shape, device, workload, parts, communication_s, micro_batches, memory, tuple(_assumptions(device, workload))
    )


def _sampling_s(model: TimeModel, workload: Workload, slots: int) -> float:
    """Of the replica with the most prompts."""
    prompts = math.ceil(workload.rollouts / workload.group / workload.replicas)
    rollouts = Rollouts(
        prompts * workload.group, prompts, workload.prompt_tokens, workload.new_tokens, workload.longest, max(slots, 1)
    )
    parallel = workload.tensor_parallel
    split = replace(model, tensor_parallel=parallel)
    seconds = split.prefill_s(rollouts) + split.decode_s(rollouts, adapters=bool(workload.lora_rank))
    if parallel == 1:
        return seconds
    reduced = 2 * model.shape.layers * 2.0 * model.shape.hidden * 2 * (parallel - 1) / parallel
    tokens = rollouts.drawn + prompts * workload.prompt_tokens
    starts = 2 * model.shape.layers * ALL_REDUCE_S * (rollouts.steps + 1)
    return seconds + starts + tokens * reduced / _link(model.device, parallel)


def _training(model: TimeModel, workload: Workload, memory: MemoryEstimate) -> tuple[float, float, int]:
    """Seconds of computing and of communication, and the micro-batches of one device."""
    shape, adapters = model.shape, bool(workload.lora_rank)
    share = 1 / workload.trainers
    tokens, scored = workload.trained_tokens * share, workload.rollouts * workload.new_tokens * share
    sequence = workload.prompt_tokens + workload.new_tokens
    micro_batches = math.ceil(tokens / max(memory.micro_batch_tokens, 1))
    seconds = model.train_s(tokens, scored, sequence, workload.lora_rank, memory.recompute)
    if not memory.captured:
        seconds = max(seconds, micro_batches * model.eager_s(adapters, memory.recompute))
    for scorer in [shape] * workload.reference + [workload.teacher] * (workload.teacher is not None):
        seconds += replace(model, shape=scorer).forward_s(tokens, sequence)
    trained = _trained(shape, workload)
    seconds += model.constants.packing_s * workload.rollouts * share
    seconds += model.optimizer_s(trained * (share if workload.sharding == "fsdp" else 1))
    return seconds, _communication_s(model, workload, micro_batches, memory.recompute), micro_batches


def _communication_s(model: TimeModel, workload: Workload, micro_batches: int, recompute: bool) -> float:
    count, trained = workload.trainers, _trained(model.shape, workload)
    if count == 1:
        return 0.0
    others = (count - 1) / count
    if workload.sharding == "none":
        return 2 * others * 4 * trained / _link(model.device, count)
    gathered = (2 + recompute) * 2.0 * model.shape.parameters
    return micro_batches * others * (gathered + 4.0 * trained) / _link(model.device, count)


def _sync_s(model: TimeModel, workload: Workload) -> float:
    """New weights from the trainer to the sampler."""
    trained, device = _trained(model.shape, workload), model.device
    if workload.sampler_gpus:
        return 2 * 2.0 * trained / _link(device, workload.gpus)
    gathered = 2.0 * trained / _link(device, workload.gpus) if workload.sharding == "fsdp" else 0.0
    return model.publish_s(trained) + gathered


def _trained(shape: ModelShape, workload: Workload) -> float:
    return workload.lora_rank * shape.adapter_rank_numbers or shape.parameters


def _link(device: Device, count: int) -> float:
    return LINK_SHARE * (device.link_bytes_per_s if count <= DEVICES_PER_MACHINE else _network(device))


def _network(device: Device) -> float:
    return min(NETWORK_BYTES_PER_S, device.link_bytes_per_s)


def _memory(shape: ModelShape, device: Device, workload: Workload) -> dict[str, MemoryEstimate]:
    """Of a device that samples and trains; in the split layout, of a trainer and of a sampler."""
    total, adapters = device.memory_gib * GIB, bool(workload.lora_rank)
    prompts = math.ceil(workload.rollouts / workload.group / workload.replicas)
    wanted = workload.slots or (MAX_NUM_SEQS if workload.sampler_gpus else MAX_SLOTS)
    context = round_up(workload.sequence_len, KEY_MULTIPLE)
    sampling = {
        "slot": context * shape.key_value_bytes / workload.tensor_parallel,
        "slots": round_up(min(wanted, prompts * workload.group), ROW_MULTIPLE),
        "prefill_tokens": min(GPU_PREFILL_TOKENS, max(prompts * workload.prompt_tokens, context)),
    }
    training = {
        "row_tokens": workload.sequence_len,
        "step_tokens": max(workload.sequence_len, workload.trained_tokens / workload.trainers),
        "recompute": workload.recompute,
        "captures": workload.sharding == "none",
    }
    held = tuple(_held(shape, workload))
    if not workload.sampler_gpus:
        return {"device": estimate_memory(shape, MemoryNeeds(total, held, **sampling, **training), adapters)}
    alone = MemoryNeeds(total, held, slot=0, slots=0, **training)
    weights = (("weights", 2.0 * shape.parameters / workload.tensor_parallel),)
    served = MemoryNeeds(total, weights, **sampling, row_tokens=0, step_tokens=0, recompute=False, captures=False)
    return {"trainer": estimate_memory(shape, alone, adapters), "sampler": estimate_memory(shape, served, adapters)}


def _held(shape: ModelShape, workload: Workload) -> Iterator[tuple[str, float]]:
    """Weights, optimizer state and copies of a device that trains."""
    trained = _trained(shape, workload)
    sharded = workload.sharding == "fsdp"
    part = 1 / workload.trainers if sharded else 1.0
    if not (sharded and workload.sampler_gpus):
        yield ("weights" if not sharded else "weights for sampling, one full copy", 2.0 * shape.parameters)
    if sharded:
        if workload.lora_rank:
            yield "shard of the frozen weights", 2.0 * shape.parameters * part
        layers = 2 * 2.0 * shape.layer_weights + 2.0 * shape.head_weights
        yield "gathered layers and output head", layers + 4.0 * shape.layer_weights * (not workload.lora_rank)
    yield f"{'adapters, ' if workload.lora_rank else ''}masters, moments and gradients", trained * part * STATE_BYTES
    if workload.lora_rank:
        yield "adapter weights", 2.0 * trained
    if workload.reference and not workload.lora_rank:
        yield "reference model", 2.0 * shape.parameters * part
    if workload.teacher is not None:
        yield "teacher", 2.0 * workload.teacher.parameters


def _assumptions(device: Device, workload: Workload) -> Iterator[str]:
    if not device.measured:
        yield (
            f"{device.title}: {device.source}, times the shares that the H200 reaches of its own data sheet "
            f"({device.bytes_per_s / 1e12:.2f} TB/s, {device.operations_per_s / 1e12:.0f} TFLOP/s)"
        )
        yield "kernels, efficiencies and host times are those of the recorded H200 runs"
    if device.note:
        yield device.note
    if workload.longest == workload.new_tokens:
        yield "all completions have the same length; with --longest, a step waits for the longest completion"
    else:
        yield "lengths of completions are taken as geometric between the mean and the longest"
    yield "steady state in bf16: without start, the first steps, evaluation and checkpoints"
    yield "rewards cost what they cost in the recorded runs; slow graders and tools add their own time"
    if workload.gpus > 1:
        yield from _device_assumptions(device, workload)


def _device_assumptions(device: Device, workload: Workload) -> Iterator[str]:
    yield "no run on more than one GPU is recorded; the following numbers are assumed"
    yield (
        f"links inside a machine of {DEVICES_PER_MACHINE} devices: {device.link_bytes_per_s / 1e9:.0f} GB/s per device "
        f"and direction; between machines {_network(device) / 1e9:.0f} GB/s; collectives reach {LINK_SHARE:.0%}"
    )
    yield "communication is added to computing: no overlap; every device has the same number of tokens"
    if workload.sharding == "fsdp":
        yield "fsdp, per micro-batch: weights gathered in bf16 for each pass, gradients reduced in fp32"
    elif workload.trainers > 1:
        yield "gradients are reduced in fp32 once per step"
    if workload.sampler_gpus:
        yield (
            f"{workload.sampler_gpus} devices sample in {workload.replicas} replicas of {workload.tensor_parallel}: "
            f"times of the embedded engine divided by {workload.tensor_parallel}, plus two all-reduces per layer "
            f"of {ALL_REDUCE_S * 1e6:.0f} us each; sampling and training take turns"
        )
        yield "new weights pass the network twice: to the first trainer, and from it to the samplers"


def _with_advice(found: Estimate, constants: Constants) -> Estimate:
    """What to change if the run does not fit, or if activation checkpointing makes it faster."""
    workload = found.workload
    if found.fits:
        if workload.recompute is None and not next(iter(found.memory.values())).recompute:
            other = _estimate(found.shape, found.device, replace(workload, recompute=True), constants)
            if other.fits and other.step_s < 0.95 * found.step_s:
                line = (
                    f"train.recompute=true (--recompute): {other.step_s:.3g} s per step instead of {found.step_s:.3g} s"
                )
                return replace(found, advice=(line,))
        return found
    return replace(
        found, advice=tuple(_ways(found, constants)) or ("use a smaller model or a device with more memory",)
    )


def _ways(found: Estimate, constants: Constants) -> Iterator[str]:
    """Changes after which the run fits, each tried alone."""
    workload, gpus = found.workload, found.workload.gpus
    half = max(workload.sequence_len // 2, math.ceil(workload.prompt_tokens + workload.longest))
    changes = {
        "train.lora=true (--lora)": {"lora_rank": workload.lora_rank or 16},
        "train.sharding=fsdp (--sharding fsdp)": {"sharding": "fsdp"} if gpus > 1 else {},
        f"train.sequence_len={half} (--sequence-len {half})": {"sequence_len": half},
        "train.recompute=auto": {"recompute": None},
    }
    for count in (2, 4, 8):
        if count > gpus:
            changes[f"{count} GPUs with train.sharding=fsdp (--gpus {count})"] = {"gpus": count, "sharding": "fsdp"}
    for parallel in (1, 2, 4, 8):
        if gpus >= 2 * parallel:
            name = f"the split layout with vLLM (--sampler-gpus {gpus // 2} --tp {parallel} --sharding fsdp)"
            split = {"sampler_gpus": gpus // 2, "tensor_parallel": parallel, "sharding": "fsdp"}
            changes[name] = split if (gpus // 2) % parallel == 0 else {}
    seen_split = False
    for name, change in changes.items():
        changed = replace(workload, **change)
        if changed == workload or (seen_split and "sampler_gpus" in change):
            continue
        if _estimate(found.shape, found.device, changed, constants).fits:
            seen_split = seen_split or "sampler_gpus" in change
            yield name
