"""A GRPO run whose embedded engine is in a separate process. Everything else is built as by `shoal grpo`.

For benchmarks/asynchronous.py: on two cores with one thread each, sampling and training overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, FileWeights

from shoal.build.load import Run
from shoal.build.parts import build_colocated
from shoal.build.workspace import Workspace, open_workspace
from shoal.config.load import load_data
from shoal.config.resolve import as_yaml, resolve_run
from shoal.core.loop import Loop
from shoal.runs.run_dir import read_metrics


def run_overlapped(raw: dict[str, Any], folder: Path, layout: str) -> dict[str, Any]:
    config = resolve_run(load_data(raw).config)
    file = folder / "engine.yaml"
    file.write_text(as_yaml(config))
    run = Run(config)
    with contextlib.redirect_stdout(io.StringIO()), open_workspace(run) as workspace:
        return asyncio.run(_run(run, workspace, file))


async def _run(run: Run, workspace: Workspace, file: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    engine = EngineProcess(file)
    try:
        await engine.start()
        async with build_colocated(run, workspace) as loop:
            _replace_engine(loop, run, engine)
            await loop.run()
            busy_s = engine.busy_s
            assert busy_s > 0, "the engine of the other process sampled nothing"
    finally:
        await engine.close()
    return _figures(read_metrics(run.path), busy_s)


def _replace_engine(loop: Loop, run: Run, engine: EngineProcess) -> None:
    """Use the engine of the other process through the same protocols."""
    parts = loop.parts
    sampler: Any = parts.on_device.__self__  # type: ignore[attr-defined]  # on_device is a method of the Sampler
    sampler.runner._engine = parts.engine = engine
    weights = run.path / "weights.safetensors"
    parts.weights = FileWeights(sampler.model.decoder.model, weights, parts.on_device)


def _figures(steps: list[dict[str, Any]], busy_s: float) -> dict[str, Any]:
    """`generate_s` and `train_s` are per step, and are meaningful at level 0, where they do not overlap."""
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
