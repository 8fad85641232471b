"""`shoal plan`: predict step time, memory and cost of a run from the shape of its model, without a GPU and torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.core.errors import ConfigError
from shoal.planning.estimate import Estimate, Workload, estimate
from shoal.planning.memory import RESERVE, MemoryEstimate
from shoal.planning.shapes import read_shape
from shoal.planning.time_model import GIB, find_device

FILE_SUFFIXES = (".yaml", ".yml")
LORA_RANK = 16
SEQUENCE_LEN, PROMPT_TOKENS = 2048, 256
POSITIVE = ("gpus", "rollouts", "group", "prompt_tokens", "new_tokens", "longest", "sequence_len", "slots", "lora_rank",
            "steps", "tensor_parallel")  # fmt: skip
FLAGS = {"tensor_parallel": "--tp", "slots": "--max-num-seqs"}  # others are called like their field
MOST = 10**12

Flag = Annotated[bool, Parameter(negative=())]


@dataclass(frozen=True)
class RunFile:
    """What a run.yaml says about the workload."""

    model: str
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def plan(
    model: str,
    *,
    gpu: str = "h200",
    gpus: int | None = None,
    rollouts: int | None = None,
    group: int | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    longest: int | None = None,
    sequence_len: int | None = None,
    slots: Annotated[int | None, Parameter(name="--max-num-seqs")] = None,
    lora: Flag = False,
    lora_rank: int | None = None,
    recompute: Flag = False,
    reference: Flag = False,
    teacher: str | None = None,
    sharding: Literal["none", "fsdp"] | None = None,
    sampler_gpus: int = 0,
    tensor_parallel: Annotated[int, Parameter(name="--tp")] = 1,
    steps: int | None = None,
    price_per_hour: float | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Predict step time, memory and cost of a GRPO run. Everything is estimated, not measured.

    Parameters
    ----------
    model
        A shape such as qwen2.5-7b or llama-3-70b, a folder or config.json, a hub id in the local cache, or a run.yaml,
        whose settings the options replace.
    gpu
        h200, h100, a100, 4090 or t4. Only the rates of the H200 are measured.
    gpus
        Number of GPUs, 8 per machine. Default: 1.
    rollouts
        Rollouts per step (orch.batch_size). Default: 128.
    group
        Rollouts per prompt (orch.rollouts_per_example). Default: 8.
    prompt_tokens
        Mean length of a prompt. Default: 256.
    new_tokens
        Mean length of a completion. Default: 512; with a run.yaml: orch.sampling.max_tokens.
    longest
        Longest completion of a step. Default: as new-tokens.
    sequence_len
        Tokens of a row (train.sequence_len). Default: 2048, or the prompt and the longest completion.
    slots
        Sequences that one engine samples at the same time (infer.max_num_seqs). Default: as many as fit.
    lora
        Train adapters instead of all weights.
    lora_rank
        Rank of the adapters; includes --lora. Default: 16.
    recompute
        Use activation checkpointing. Default: only if a row needs it.
    reference
        A reference model scores every token: a frozen copy, or the model without adapters.
    teacher
        A teacher model that scores every token: shape, folder or hub id.
    sharding
        none or fsdp (train.sharding). Default: fsdp only if the run does not fit otherwise.
    sampler_gpus
        GPUs that only sample, with vLLM in the split layout.
    tensor_parallel
        GPUs that share one copy of the model while sampling.
    steps
        Steps of the whole run. Default: 100.
    price_per_hour
        Price of one GPU for an hour.
    as_json
        Print JSON.
    """
    device = find_device(gpu)
    given = {
        "gpus": gpus, "rollouts": rollouts, "group": group, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
        "longest": longest, "sequence_len": sequence_len, "slots": slots, "sharding": sharding, "steps": steps,
        "lora_rank": LORA_RANK if lora and lora_rank is None else lora_rank,
        "recompute": recompute or None, "reference": reference or None, "sampler_gpus": sampler_gpus or None,
        "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    _check_numbers(given, price_per_hour)
    file = _read_run(model) if model.endswith(FILE_SUFFIXES) else RunFile(model, {})
    settings = {**file.settings, **{name: value for name, value in given.items() if value is not None}}
    shape = read_shape(file.model, "MODEL" if file.model == model else f"{model}: train.model")
    named = teacher or settings.get("teacher")
    settings["teacher"] = read_shape(named, "--teacher") if named else None
    found = estimate(shape, device, _workload(settings))
    found = replace(found, assumptions=(*found.assumptions, *file.notes))
    if as_json:
        print(json.dumps(plan_data(found, price_per_hour), indent=1))
        return
    for line in plan_lines(found, price_per_hour):
        say(line)


def _check_numbers(given: Mapping[str, Any], price: float | None) -> None:
    for name in POSITIVE:
        value = given[name]
        if value is not None and not 1 <= value <= MOST:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"command line: {flag}: must be from 1 to {MOST}, not {value}")
    if (given["sampler_gpus"] or 0) < 0:
        raise ConfigError(f"command line: --sampler-gpus: must be at least 0, not {given['sampler_gpus']}")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ConfigError(f"command line: --price-per-hour: must be at least 0 and finite, not {price}")


def _workload(settings: Mapping[str, Any]) -> Workload:
    """With the defaults that depend on other settings."""
    found = dict(settings)
    found.setdefault("new_tokens", Workload.new_tokens)
    found.setdefault("longest", found["new_tokens"])
    room = found["sequence_len"] - found["longest"] if "sequence_len" in found else PROMPT_TOKENS
    found.setdefault("prompt_tokens", max(1, min(PROMPT_TOKENS, room)))
    found.setdefault("sequence_len", max(SEQUENCE_LEN, found["prompt_tokens"] + found["longest"]))
    return Workload(**found)


def _read_run(path: str) -> RunFile:
    from shoal.config.load import load_run
    from shoal.config.resolve import resolve_run

    config = resolve_run(load_run(path).config)
    train, orch, infer = config.train, config.orch, config.infer
    if train.model is None:
        raise ConfigError(f"{path}: train.model is missing; `shoal plan` needs a model")
    settings: dict[str, Any] = {
        "rollouts": orch.batch_size, "group": orch.rollouts_per_example, "new_tokens": orch.sampling.max_tokens,
        "longest": orch.sampling.max_tokens, "sequence_len": train.sequence_len, "slots": infer.max_num_seqs,
        "lora_rank": train.lora_rank if train.lora else 0,
        "gpus": max(train.gpus, 1), "sharding": train.sharding if "sharding" in train.model_fields_set else None,
        "recompute": train.recompute if isinstance(train.recompute, bool) else None,
        "reference": train.reference in ("frozen", "adapter-off"),
        "teacher": train.teacher.model if train.teacher else None,
    }  # fmt: skip
    if train.max_steps is not None:
        settings["steps"] = train.max_steps
    return RunFile(train.model, settings, tuple(_ignored(train)))


def _ignored(train: Any) -> list[str]:
    """Settings of a run.yaml that the models of time and memory do not know."""
    notes = ["completions are as long as orch.sampling.max_tokens unless --new-tokens is given"]
    if train.recipe != "bf16" or train.quantised:
        notes.append(f"train.recipe={train.recipe} and quantised weights are not modelled: bf16 is assumed")
    if train.gpus == 0:
        notes.append("train.gpus=0 means all GPUs: one is assumed unless --gpus is given")
    if train.optimizer != "adamw":
        notes.append(f"train.optimizer={train.optimizer} is not modelled: adamw is assumed")
    if train.teacher is not None and train.teacher.model is None:
        notes.append("the time of train.teacher is not counted")
    return notes


MARK = "estimated, not measured"
PARTS = {"sampling": "sampling", "training": "training", "sync": "weight sync", "other": "rewards and host"}


def plan_lines(found: Estimate, price_per_hour: float | None) -> Iterator[str]:
    workload = found.workload
    yield f"plan: {found.shape.name}, {found.shape.parameters / 1e9:.3g} B parameters, {_how(found)} ({MARK})"
    yield (
        f"step: {workload.rollouts} rollouts in groups of {workload.group}, {workload.prompt_tokens:g} prompt and "
        f"{workload.new_tokens:g} new tokens, rows of {workload.sequence_len} tokens"
    )
    if found.fits:
        yield ""
        yield from _time_lines(found, price_per_hour)
    for kind, memory in found.memory.items():
        yield ""
        yield from _memory_lines(kind, memory)
    yield ""
    if not found.fits:
        yield "the run does not fit, so no times are estimated; each of these changes makes it fit:"
    elif found.advice:
        yield "faster:"
    yield from (f"  - {line}" for line in found.advice)
    if found.advice:
        yield ""
    yield "assumptions:"
    yield from (f"  - {line}" for line in found.assumptions)


def _time_lines(found: Estimate, price_per_hour: float | None) -> Iterator[str]:
    workload, hours = found.workload, found.hours
    for name, seconds in found.parts_s.items():
        yield _row(PARTS[name], _seconds(seconds), _share(found, name))
    yield _row("step time", _seconds(found.step_s), f"{workload.rollouts / found.step_s:.3g} rollouts/s")
    gpu_hours = hours * workload.gpus
    yield _row(f"time of {workload.steps} steps", _duration(hours), f"{gpu_hours:.3g} GPU hours")
    if price_per_hour is not None:
        yield _row("cost", f"{gpu_hours * price_per_hour:.2f}", f"at {price_per_hour:g} per GPU hour")


def _how(found: Estimate) -> str:
    workload = found.workload
    kind = f"LoRA of rank {workload.lora_rank}" if workload.lora_rank else "all weights trained"
    several = f", sharding {workload.sharding}" if workload.trainers > 1 else ""
    return f"{kind}, {workload.gpus} x {found.device.title}{several}"


def _share(found: Estimate, name: str) -> str:
    text = f"{found.parts_s[name] / found.step_s:.0%}"
    if name != "training":
        return text
    text += f", {found.micro_batches} micro-batch{'es' if found.micro_batches > 1 else ''} per device"
    return text + (f", {_seconds(found.communication_s)} of it communication" if found.communication_s else "")


def _memory_lines(kind: str, memory: MemoryEstimate) -> Iterator[str]:
    title = "memory of one device" if kind == "device" else f"memory of one {kind}"
    for name, size in memory.parts:
        yield _row(name, f"{size / GIB:.2f} GiB", "")
    usable = memory.total * (1 - RESERVE)
    state = "fits" if memory.fits else "does not fit"
    yield _row(
        title, f"{memory.used / GIB:.2f} GiB", f"{state}: {usable / GIB:.1f} of {memory.total / GIB:.1f} GiB usable"
    )


def _row(name: str, value: str, note: str) -> str:
    return f"{name:<52} {value:>12}  {note}".rstrip()


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _duration(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def plan_data(found: Estimate, price_per_hour: float | None) -> dict[str, Any]:
    gpu_hours = found.hours * found.workload.gpus
    run = {"hours": found.hours, "gpu_hours": gpu_hours, "cost": None}
    if price_per_hour is not None:
        run["cost"] = gpu_hours * price_per_hour
    workload = {key: value for key, value in asdict(found.workload).items() if key != "teacher"}
    return {
        "note": MARK,
        "model": found.shape.name,
        "parameters": found.shape.parameters,
        "device": {"name": found.device.name, "measured": found.device.measured},
        "workload": {**workload, "teacher": found.workload.teacher.name if found.workload.teacher else None},
        "seconds": {**found.parts_s, "step": found.step_s, "communication": found.communication_s}
        if found.fits
        else None,
        "micro_batches": found.micro_batches,
        "memory": {kind: _memory_data(memory) for kind, memory in found.memory.items()},
        "fits": found.fits,
        "run": run if found.fits else None,
        "assumptions": list(found.assumptions),
        "advice": list(found.advice),
    }


def _memory_data(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "bytes": dict(memory.parts),
        "used": memory.used,
        "total": memory.total,
        "slots": memory.slots,
        "micro_batch_tokens": memory.micro_batch_tokens,
        "recompute": memory.recompute,
        "fits": memory.fits,
    }
