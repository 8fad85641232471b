"""What the commands call: train, sft, evaluate, export, make_model, demo. Each is one readable sequence of steps."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shoal import build
from shoal.build import ends
from shoal.config.orch import EvalConfig, EvalSamplingConfig
from shoal.config.resolve import as_yaml
from shoal.config.schema import RunConfig, SftConfig
from shoal.envs.datasets import DatasetSpec, fingerprint, heard_problems
from shoal.envs.supervised import supervised_tasks
from shoal.errors import (
    ConfigError,
    DeadlineError,
    NonFiniteError,
    StoppedByPolicy,
    StorageError,
)
from shoal.models.tokenizer import check_found
from shoal.observability.checkpoints import write_folder
from shoal.observability.console import BaseConsole, make_console
from shoal.observability.events import EventLog, told_from_below
from shoal.observability.logs import setup_logging, stop_logging
from shoal.observability.run_dir import RunDir, is_used
from shoal.observability.sinks import check_sinks
from shoal.observability.text import count
from shoal.observability.watchdog import Watchdog
from shoal.observability.weights import find_weights
from shoal.orchestrator.signals import on_signals, terminated_at_once


async def _colocated(config: RunConfig, prepared: build.Prepared, watching: build.Watching) -> build.Assembled:
    return build.assemble(config, prepared, watching)


@dataclass(frozen=True)
class Layout:
    """How the loop is put together, and what its process is called in logs/."""

    component: str = "grpo"
    assemble: Callable[[RunConfig, build.Prepared, build.Watching], Awaitable[build.Assembled]] = _colocated
    trains: bool = True  # in this process, which may then be one of several


@terminated_at_once()
def train(
    config: RunConfig,
    *,
    resume: bool = False,
    notices: Sequence[str] = (),
    given: build.Given | None = None,
    next_command: str | None = None,
    layout: Layout = Layout(),  # noqa: B008  (frozen)
    wording: Callable[[str], str] = str,
) -> Path:
    """Run GRPO to the end, from the start or from the newest good checkpoint. Returns the run directory.

    `given` holds Python objects that stand in for what the configuration names; `next_command` says how to go on then;
    `wording` puts what is told on the way into the words of the surface the run was started from.
    """
    path = Path(config.train.output_dir)
    if resume and ends.already_done(path, config):
        return path
    start = build.Start(resume, tuple(notices), next_command or ends.resume_command(config))
    if layout.trains and (ranks := build.ranks_to_start(config.train, given)):
        build.launch(config, ranks, start)
        return path
    prepared = build.prepare(config, build.as_rank(given) if layout.trains else given, colocated=layout.trains)
    try:
        _train_here(config, prepared, start, layout, wording)
    finally:
        asyncio.run(prepared.pool.close())
        build.leave_ranks(prepared)
    return path


def _train_here(
    config: RunConfig, prepared: build.Prepared, start: build.Start, layout: Layout, wording: Callable[[str], str]
) -> None:
    """The run in this process, which may be one of several: the main one keeps the run directory and speaks."""
    main = not layout.trains or build.join_ranks(config, prepared).rank == 0
    component = layout.component if main else f"grpo-rank{prepared.ranks.rank}"
    with (
        build.open_run_dir(config, prepared, start.resume, start.next_command) as run_dir,
        _console(config.train.logging_steps, None if main else io.StringIO()) as console,
        _recorded(run_dir, console, component, EventLog(run_dir, console, wording), main=main) as events,
    ):
        for notice in start.notices:
            console.note(f"note: {notice}")
        watchdog = Watchdog(run_dir.logs, events, stall_s=config.orch.deadline_s)
        watching = build.Watching(run_dir, events, console, watchdog, start.next_command)
        ends.record_end(run_dir, start.next_command, lambda: asyncio.run(_train(config, prepared, watching, layout)))


@contextlib.contextmanager
def _recorded(
    run_dir: Any, console: BaseConsole, component: str, events: EventLog, *, main: bool = True
) -> Iterator[EventLog]:
    """With a log file of its own; a report however it ends, and a last line where it ends well."""
    handler = setup_logging(run_dir.logs, component)
    try:
        with told_from_below(events):
            yield events
    finally:
        if main:
            console.waiting("writing the report")
            _write_report(run_dir.path, events)
        stop_logging(handler)
    if main:
        console.closing([ends.last_line(run_dir.path)])


async def _train(
    config: RunConfig, prepared: build.Prepared, watching: build.Watching, layout: Layout
) -> tuple[str, int]:
    run_dir, events, console, watchdog = watching.run_dir, watching.events, watching.console, watching.watchdog
    # Looking for a checkpoint cuts the events too, so nothing may be told before.
    with console.progress("looking for a checkpoint", quiet=True):
        found = await prepared.ranks.on_main(lambda: _find_checkpoint(run_dir, events))
    for notice in prepared.notices:
        events.warn("data", notice)
    assembled = await layout.assemble(config, prepared, watching)
    watchdog.start()
    loop = assembled.loop
    try:
        await assembled.start(watching)
        if found is not None:
            with watching.stage("checkpoint", f"reading {Path(found['path']).name}", quiet=True):
                await loop.restore(Path(found["path"]))
            events.step = found["step"]
            events.emit("resume", f"continuing after step {found['step']}")
        on_signals(loop.interrupt, lambda: ends.give_up(run_dir, watching.next_command), console.note)
        steps = loop.settings.max_steps
        onward = f", continuing after step {found['step']}" if found is not None else ""
        said = f"training {config.train.model} for {count(steps, 'step')} in {run_dir.path}{onward}"
        events.emit("ready", "everything is loaded", data={"seconds": watching.stages})
        console.waiting(f"handing version {loop.progress.step} to the sampler")
        console.begin(said, steps, loop.progress.step)
        outcome = await loop.run()
        await prepared.ranks.on_main(assembled.export)
        return outcome, loop.progress.step
    except (DeadlineError, NonFiniteError):
        raise  # the device may hang, or the weights are spoilt; the newest checkpoint stands
    except StoppedByPolicy:
        # What stopped one rank alone the others do not know: there is nobody to save with, and they end too.
        if prepared.ranks.world == 1 or loop.stopped_by_rule:
            await loop.save()
        raise
    finally:
        console.waiting("ending the run")
        watchdog.close()
        await loop.parts.collector.cancel()
        await assembled.close()


async def _find_checkpoint(run_dir: Any, events: EventLog) -> dict[str, Any] | None:
    checkpoint = ends.newest_checkpoint(run_dir, events)
    return {"path": str(checkpoint.path), "step": checkpoint.step} if checkpoint is not None else None


@contextlib.contextmanager
def _console(every: int, stream: TextIO | None = None) -> Iterator[BaseConsole]:
    console = make_console(stream, every=every)
    try:
        yield console
    finally:
        console.close()


def _write_report(path: Path, events: EventLog) -> None:
    """The page at the end, however the run ended. Watching never fails a run."""
    if not is_used(path):
        return  # refused before its first step: there was no run
    try:
        from shoal.report import write_report

        write_report(path)
    except Exception as error:
        with contextlib.suppress(StorageError):  # how the run ended stands, also where a full disk takes no event
            events.warn("report", f"report.html could not be written: {error}")


@terminated_at_once()
def sft(config: SftConfig, *, resume: bool = False) -> Path:
    """Supervised training; the result is in `final/` of the run directory."""
    path = Path(config.train.output_dir)
    if resume and ends.already_done(path, config):
        return path
    check_sinks(config.train.report_to)
    if config.train.model is not None:
        check_found("train.model", config.train.model)
    data = config.dataset
    with heard_problems() as bad_rows:
        tasks = supervised_tasks(DatasetSpec(**dict(data)))
    binding = build.binding(config, fingerprint(tasks))
    command = ends.resume_command(config)
    if resume and (path / "status.json").exists():
        run_dir = RunDir.resume(path)
        run_dir.reopen(as_yaml(config), binding, command)
    else:
        run_dir = RunDir.create(path, as_yaml(config), binding, command)
    with (
        run_dir,
        _console(config.train.logging_steps) as console,
        _recorded(run_dir, console, "sft", EventLog(run_dir, console)),
    ):
        ends.record_end(run_dir, command, lambda: build.train_on_completions(config, tasks, bad_rows, run_dir, console))
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
    task = build.EvalTask(env, settings, dict(env_args or {}), device)
    (scores,) = build.score([find_weights(model, adapter=adapter)], task)
    return scores.metrics


def evaluate_config(config: RunConfig, given: build.Given | None = None) -> dict[str, float]:
    """One evaluation as orch.eval describes it: eval/<env>/… by name."""
    prepared = build.prepare(config, given)
    try:
        return asyncio.run(build.evaluate_once(config, prepared))[0]
    finally:
        asyncio.run(prepared.pool.close())


@terminated_at_once()
def export(source: str, folder: Path, *, adapter: str | None = None, checkpoint: str | None = None) -> None:
    """A folder ready to publish: adapters merged, weights and tokenizer for transformers, a model card."""
    from shoal.models.export import export_folder
    from shoal.report.card import model_card

    weights = find_weights(source, adapter=adapter, checkpoint=checkpoint)
    with _new_folder(folder) as partial:
        export_folder(weights.model, weights.adapter, partial, model_card(weights))


@terminated_at_once()
def make_model(kind: str, folder: Path, seed: int = 0) -> None:
    from shoal.models.shapes import make_model as write_model

    with _new_folder(folder) as partial:
        write_model(kind, partial, seed)


def _new_folder(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """Whole or not there: what is cut while it is written leaves nothing that looks like a model."""
    target = Path(os.path.realpath(folder))  # what a link leads to is written, not the link
    if target == Path.cwd() or os.path.ismount(target):
        raise ConfigError(f"command line: {folder}: cannot be replaced where it is; name a folder in it")
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}; name another folder") from error
    if taken:
        raise ConfigError(f"command line: {folder}: exists already; name another folder")
    return write_folder(target)


def demo(folder: Path, seed: int = 1) -> None:
    from shoal.demo import run_demo

    run_demo(folder, seed, sft, train)
