"""A GRPO run whose embedded engine lives in a process of its own; everything else is what `shoal grpo` builds.

For benchmarks/asynchronous.py: on two cores with one thread each, sampling and training really overlap.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, FileWeights

from shoal import build
from shoal.config.load import load_data
from shoal.config.resolve import as_yaml, resolve_run
from shoal.config.schema import RunConfig
from shoal.observability.console import make_console
from shoal.observability.events import EventLog
from shoal.observability.run_dir import read_metrics
from shoal.observability.watchdog import Watchdog


def run_overlapped(raw: dict[str, Any], folder: Path, layout: str) -> dict[str, Any]:
    config = resolve_run(load_data(raw).config)
    file = folder / "engine.yaml"
    file.write_text(as_yaml(config))
    prepared = build.prepare(config)
    try:
        return asyncio.run(_run(config, prepared, file))
    finally:
        asyncio.run(prepared.pool.close())


async def _run(config: RunConfig, prepared: build.Prepared, file: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    engine = EngineProcess(file)
    path = Path(config.train.output_dir)
    run_dir = await asyncio.to_thread(build.open_run_dir, config, prepared, False, "")
    console = make_console(io.StringIO())
    try:
        with run_dir:
            await engine.start()
            events = EventLog(run_dir)
            watching = build.Watching(run_dir, events, console, Watchdog(run_dir.logs, events))
            assembled = build.assemble(config, prepared, watching)
            _take_over(assembled, config, engine)
            await assembled.loop.run()
            await assembled.loop.parts.collector.cancel()
            busy_s = engine.busy_s
            assert busy_s > 0, "the engine of the other process drew nothing"
            await assembled.close()
    finally:
        console.close()
        await engine.close()
    return _figures(read_metrics(path), busy_s)


def _take_over(assembled: build.Assembled, config: RunConfig, engine: EngineProcess) -> None:
    """The engine of the other process behind the same seams."""
    sampler, parts = assembled.sampler, assembled.loop.parts
    sampler.runner._engine = parts.engine = engine
    weights = Path(config.train.output_dir) / "weights.safetensors"
    parts.weights = FileWeights(sampler.model.decoder.model, weights, parts.on_device)


def _figures(steps: list[dict[str, Any]], busy_s: float) -> dict[str, Any]:
    """`generate_s` and `train_s` are of a step, and mean something at level 0, where they do not overlap."""
    wall_s = sum(step["time/step"] for step in steps)
    train_s = sum(step["time/train"] for step in steps)
    return {
        "rollouts_per_s": sum(step["batch/used"] for step in steps) / wall_s,
        "wall_s": wall_s,
        "sampler_idle": 1 - busy_s / wall_s,
        "trainer_idle": 1 - train_s / wall_s,
        "generate_s": sum(step.get("time/rollout", 0.0) for step in steps) / len(steps),
        "train_s": train_s / len(steps),
        "other_s": (wall_s - train_s - sum(step.get("time/rollout", 0.0) for step in steps)) / len(steps),
    }
