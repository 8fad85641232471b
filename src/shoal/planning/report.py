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
    yield ""
    for name, seconds in found.parts_s.items():
        yield _row(PARTS[name], _seconds(seconds), _share(found, name))
    yield _row("step time", _seconds(found.step_s), f"{workload.rollouts / found.step_s:.3g} rollouts/s")
    for kind, memory in found.memory.items():
        yield ""
        yield from _memory_lines(kind, memory)
    yield ""
    hours = workload.steps * found.step_s / 3600
    yield _row(f"time of {workload.steps} steps", _duration(hours), f"{hours * workload.gpus:.3g} GPU hours")
    cost = f"{hours * workload.gpus * price_per_hour:.2f}" if price_per_hour is not None else "-"
    yield _row("cost", cost, "in the currency of --price-per-hour, which is the price of one GPU")
    for title, lines in (("assumptions", found.assumptions), ("fits" if found.fits else "does not fit", found.advice)):
        if lines:
            yield ""
            yield f"{title}:" if found.fits or title == "assumptions" else f"{title}; each of these changes makes it fit:"
            if title == "fits":
                yield "  faster with:"
            yield from (f"  - {line}" for line in lines)


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
    yield _row(title, f"{memory.used / GIB:.2f} GiB", f"{state}: {usable / GIB:.1f} of {memory.total / GIB:.1f} GiB usable")


def _row(name: str, value: str, note: str) -> str:
    return f"{name:<52} {value:>12}  {note}".rstrip()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _duration(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def plan_data(found: Estimate, price_per_hour: float | None) -> dict[str, Any]:
    hours = found.workload.steps * found.step_s / 3600
    gpu_hours = hours * found.workload.gpus
    workload = {key: value for key, value in asdict(found.workload).items() if key != "teacher"}
    return {
        "note": MARK,
        "model": found.shape.name,
        "parameters": found.shape.parameters,
        "device": {"name": found.device.name, "measured": found.device.measured},
        "workload": {**workload, "teacher": found.workload.teacher.name if found.workload.teacher else None},
        "seconds": {**found.parts_s, "step": found.step_s, "communication": found.communication_s},
        "micro_batches": found.micro_batches,
        "memory": {kind: _memory_data(memory) for kind, memory in found.memory.items()},
        "fits": found.fits,
        "run": {
            "hours": hours,
            "gpu_hours": gpu_hours,
            "cost": gpu_hours * price_per_hour if price_per_hour is not None else None,
        },
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
