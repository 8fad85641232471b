"""The result of `shoal plan` as lines of text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shoal.planning.devices import GIB
from shoal.planning.estimate import Estimate
from shoal.planning.memory import RESERVE, MemoryEstimate

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
