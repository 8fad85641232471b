"""What the commands call: train, sft, dpo, evaluate, export, make_model. Each is one readable sequence of steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.build.evaluate import EvalTask, evaluate_run, score
from shoal.build.load import Run, resume_command
from shoal.build.parts import Build, build_colocated
from shoal.build.ranks import as_rank, launch, ranks_to_start
from shoal.build.sft import train_on_completions
from shoal.build.signals import exit_on_first_signal, on_signals
from shoal.build.workspace import (
    Workspace,
    already_done,
    binding,
    end_at_once,
    log_run,
    newest_checkpoint,
    open_console,
    open_or_create,
    open_workspace,
    record_end,
)
from shoal.config.orch import EvalConfig, EvalSamplingConfig
from shoal.config.schema import DpoConfig, SftConfig, SupervisedConfig
from shoal.core.errors import ConfigError, DeadlineError, NonFiniteError, StoppedByPolicy, StorageError
from shoal.core.loop import Loop
from shoal.core.types import Task
from shoal.envs.datasets import DatasetSpec, collect_row_problems, fingerprint, preference_tasks, supervised_tasks
from shoal.models.tokenizer import check_found
from shoal.runs.checkpoints import write_folder
from shoal.runs.events import EventLog
from shoal.runs.weight_files import find_weights
from shoal.watch.observer import check_sinks
from shoal.watch.text import count

__all__ = ["dpo", "evaluate", "evaluate_run", "export", "make_model", "sft", "train"]


@exit_on_first_signal()
def train(run: Run, build: Build = build_colocated) -> Path:
    """Train to the end, from the start or from the newest good checkpoint. Returns the run directory."""
    if run.resume and already_done(run.path, run.config):
        return run.path
    if run.trains:
        if ranks := ranks_to_start(run.config.train, run.objects):
            launch(run, ranks)  # this process only supervises
            return run.path
        run = replace(run, objects=as_rank(run.objects))
    with open_workspace(run) as workspace:
        record_end(workspace.run_dir, run.command, lambda: asyncio.run(_train(run, workspace, build)))
    return run.path


async def _train(run: Run, workspace: Workspace, build: Build) -> tuple[str, int]:
    run_dir, events, console = workspace.run_dir, workspace.events, workspace.console
    checkpoint = await _find_checkpoint(workspace)  # before the first event: later events are removed
    for notice in workspace.data_notices:
        notice.record(events, console.note)
    async with build(run, workspace) as loop:
        onward = ""
        if checkpoint is not None:
            with workspace.stage("checkpoint", f"reading {checkpoint.name}", quiet=True):
                await loop.restore(checkpoint)
            events.step = loop.progress.step
            events.emit("resume", f"continuing after step {events.step}")
            onward = f", continuing after step {events.step}"
        on_signals(loop.interrupt, lambda: end_at_once(run_dir, run.command), console.note)
        steps = loop.settings.max_steps
        workspace.stage.report(events, run.config.train.device)
        console.waiting(f"sending version {loop.progress.step} to the sampler")
        title = f"training {run.config.train.model} for {count(steps, 'step')} in {run.path}{onward}"
        console.begin(title, steps, loop.progress.step)
        try:
            outcome = await loop.run()
            await workspace.ranks.on_main(lambda: _export(loop))
            return outcome, loop.progress.step
        except (DeadlineError, NonFiniteError):
            raise  # the device may hang, or the weights are not finite: keep the newest checkpoint
        except StoppedByPolicy:
            # Ranks that did not stop too cannot take part in saving.
            if workspace.ranks.world == 1 or loop.stopped_by_rule:
                await loop.save()
            raise


async def _find_checkpoint(workspace: Workspace) -> Path | None:
    """Rank 0 searches; all ranks get the result."""

    async def find() -> str | None:
        checkpoint = newest_checkpoint(workspace.run_dir, workspace.events)  # type: ignore[arg-type]
        return str(checkpoint.path) if checkpoint is not None else None

    with workspace.console.progress("looking for a checkpoint", quiet=True):
        path = await workspace.ranks.on_main(find)
    return Path(path) if path is not None else None


async def _export(loop: Loop) -> None:
    """Write the trained weights into final/."""
    parts = loop.parts
    parts.observer.doing("writing the final weights")
    with parts.store.export() as folder:
        await parts.on_device(parts.files.export, folder)


@exit_on_first_signal()
def sft(config: SftConfig, *, resume: bool = False) -> Path:
    """Supervised training. The trained weights are in final/ of the run directory."""
    return _train_on_rows(config, supervised_tasks, resume)


@exit_on_first_signal()
def dpo(config: DpoConfig, *, resume: bool = False) -> Path:
    """Preference training. The trained weights are in final/ of the run directory."""
    return _train_on_rows(config, preference_tasks, resume)


def _train_on_rows(config: SupervisedConfig, read_tasks: Callable[[DatasetSpec], list[Task]], resume: bool) -> Path:
    path, command = Path(config.train.output_dir), resume_command(config)
    if resume and already_done(path, config):
        return path
    check_sinks(config.train.report_to)
    if config.train.model is not None:
        check_found("train.model", config.train.model)
    with collect_row_problems() as bad_rows:
        tasks = read_tasks(DatasetSpec(**dict(config.dataset)))
    with (
        open_or_create(path, config, binding(config, fingerprint(tasks)), command, resume) as run_dir,
        open_console(config.train.logging_steps) as console,
        log_run(run_dir, console, config.verb, EventLog(run_dir, console)),
    ):
        record_end(run_dir, command, lambda: train_on_completions(config, tasks, bad_rows, run_dir, console))
    return path


def evaluate(
    *,
    model: str,
    env: str,
    env_args: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    num_examples: int = 64,
    rollouts_per_example: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, float]:
    """Mean reward of a model, checkpoint, adapter or run on the held-out prompts of an environment."""
    settings = EvalConfig(
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        sampling=EvalSamplingConfig(temperature=temperature, max_tokens=max_tokens, seed=seed),
    )
    task = EvalTask(env, settings, dict(env_args or {}), device)
    (scores,) = score([find_weights(model, adapter=adapter)], task)
    return scores.metrics


@exit_on_first_signal()
def export(source: str, folder: Path, *, adapter: str | None = None, checkpoint: str | None = None) -> None:
    """Write a folder to publish: merged weights and tokenizer in the transformers format, and a model card."""
    from shoal.models.lora import export_folder
    from shoal.watch.report.model_card import model_card

    weights = find_weights(source, adapter=adapter, checkpoint=checkpoint)
    with _new_folder(folder) as partial:
        export_folder(weights.model, weights.adapter, partial, model_card(weights))


@exit_on_first_signal()
def make_model(kind: str, folder: Path, seed: int = 0) -> None:
    """Write a model with random weights."""
    from shoal.models.random_models import make_model as write_model

    with _new_folder(folder) as partial:
        write_model(kind, partial, seed)


def _new_folder(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """A folder that appears only when it is complete."""
    target = Path(os.path.realpath(folder))  # write to the target of a link
    if target == Path.cwd() or os.path.ismount(target):
        raise ConfigError(f"command line: {folder}: cannot be replaced; name a folder in it")
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}; name another folder") from error
    if taken:
        raise ConfigError(f"command line: {folder}: exists already; name another folder")
    return write_folder(target)
