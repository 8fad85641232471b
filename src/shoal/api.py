"""What the commands call: train, sft, evaluate, make_model, demo. Each is one readable sequence of steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal import build
from shoal.config.load import load_run, load_sft
from shoal.config.orch import EvalConfig, EvalSamplingConfig
from shoal.config.resolve import as_yaml, binding_data
from shoal.config.schema import RunConfig, SftConfig
from shoal.envs.datasets import DatasetSpec, read_splits, to_messages
from shoal.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ConfigError,
    DataError,
    Interrupted,
    ShoalError,
    StoppedByPolicy,
)
from shoal.observability.console import BaseConsole, make_console
from shoal.observability.events import EventLog
from shoal.observability.logs import setup_logging, stop_logging
from shoal.observability.run_dir import RunDir, read_status
from shoal.observability.spans import Phases, throughput
from shoal.observability.watchdog import Watchdog
from shoal.types import Task


def train(config: RunConfig, *, resume: bool = False, notices: Sequence[str] = ()) -> Path:
    """Run GRPO to the end, from the start or from the newest good checkpoint. Returns the run directory."""
    path = Path(config.train.output_dir)
    if resume and _already_done(path, config):
        return path
    prepared = build.prepare(config)
    command = _resume_command(config)
    try:
        with (
            build.open_run_dir(config, prepared, resume, command) as run_dir,
            _console(config.train.logging_steps) as console,
        ):
            handler = setup_logging(run_dir.logs, "grpo")
            try:
                events = EventLog(run_dir, console)
                for notice in notices:
                    console.note(f"note: {notice}")
                _record_end(run_dir, command, lambda: asyncio.run(_train(config, prepared, run_dir, events, console)))
                _write_report(run_dir.path, events)
            finally:
                stop_logging(handler)
    finally:
        asyncio.run(prepared.pool.close())
    return path


async def _train(
    config: RunConfig, prepared: build.Prepared, run_dir: RunDir, events: EventLog, console: BaseConsole
) -> tuple[str, int]:
    watchdog = Watchdog(run_dir.logs, events, stall_s=config.orch.deadline_s).start()
    watching = build.Watching(run_dir, events, console, watchdog)
    assembled = build.assemble(config, prepared, watching, _resume_command(config))
    loop = assembled.loop
    try:
        checkpoint = run_dir.newest_good_checkpoint()
        for reason in checkpoint.skipped if checkpoint is not None else []:
            events.warn("checkpoint", f"a checkpoint was passed over: {reason}")
        run_dir.cut_to(checkpoint.step if checkpoint is not None else -1)
        if checkpoint is not None:
            await loop.restore(checkpoint.path)
            events.step = checkpoint.step
            events.emit("resume", f"continuing after step {checkpoint.step}")
        _on_signals(loop.interrupt)
        steps = loop.settings.max_steps
        console.begin(f"training {config.train.model} for {steps} steps in {run_dir.path}", steps, loop.progress.step)
        outcome = await loop.run()
        with run_dir.export() as folder:
            await loop.parts.on_device(assembled.files.export, folder)
        return outcome, loop.progress.step
    except StoppedByPolicy:
        await loop.save()
        raise
    finally:
        watchdog.close()
        await loop.parts.collector.cancel()
        await assembled.close()


def _record_end(run_dir: RunDir, command: str, work: Callable[[], tuple[str, int]]) -> None:
    """status.json says how it ended, whatever happened; `command` is how to go on."""

    def write(state: Any, reason: str, resumable: bool, step: int | None = None) -> None:
        at = run_dir.status.get("step", 0) if step is None else step
        run_dir.write_status(
            state, step=at, reason=reason, resumable=resumable, next_command=command if resumable else None
        )

    try:
        outcome, step = work()
    except Interrupted as error:
        write("interrupted", str(error), True)
        raise
    except StoppedByPolicy as error:
        write("stopped", str(error), True)
        raise
    except KeyboardInterrupt:
        write("interrupted", "interrupted while it was loading; nothing is lost", True)
        raise
    except ConfigError:
        run_dir.free_if_untouched()
        raise
    except BaseException as error:
        with contextlib.suppress(ShoalError):  # the disk may be what failed
            write("failed", f"{type(error).__name__}: {error}", True)
        raise
    write("solved" if outcome == "solved" else "finished", f"{outcome} after step {step}", False, step)


def _already_done(path: Path, config: RunConfig | SftConfig) -> bool:
    """A finished run says so; one that was given more steps or epochs since goes on."""
    status = read_status(path) if (path / "status.json").exists() else {}
    if status.get("state") not in ("finished", "solved"):
        return False
    load = load_run if isinstance(config, RunConfig) else load_sft
    earlier, now = load(str(path / "config.yaml")).config.train, config.train
    longer = (now.max_steps or 0) > (earlier.max_steps or 0) or (now.epochs or 0) > (earlier.epochs or 0)
    if not longer:
        print(f"{path}: this run is {status['state']} at step {status['step']}; nothing is left to do")
    return not longer


def _resume_command(config: RunConfig | SftConfig) -> str:
    verb = "grpo" if isinstance(config, RunConfig) else "sft"
    return f"shoal {verb} {shlex.quote(str(Path(config.train.output_dir) / 'config.yaml'))} --resume"


def _on_signals(interrupt: Callable[[int], None]) -> None:
    """The first signal asks the loop to stop at a safe point, the second ends the process where it is."""
    loop = asyncio.get_running_loop()

    def handle(code: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(code))
        interrupt(code)

    loop.add_signal_handler(signal.SIGINT, handle, EXIT_INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, handle, EXIT_TERMINATED)
    loop.add_signal_handler(signal.SIGHUP, handle, EXIT_TERMINATED)


@contextlib.contextmanager
def _console(every: int):
    console = make_console(every=every)
    try:
        yield console
    finally:
        console.close()


def _write_report(path: Path, events: EventLog) -> None:
    """The page at the end. Watching never fails a run."""
    try:
        from shoal.report import write_report

        write_report(path)
    except Exception as error:
        events.warn("report", f"report.html could not be written: {error}")


def sft(config: SftConfig, *, resume: bool = False) -> Path:
    """Supervised training; the result is in `final/` of the run directory."""
    path = Path(config.train.output_dir)
    if resume and _already_done(path, config):
        return path
    tasks = _supervised_tasks(config)
    command = _resume_command(config)
    if resume and (path / "status.json").exists():
        run_dir = RunDir.resume(path)
        run_dir.reopen(as_yaml(config), binding_data(config), command)
    else:
        run_dir = RunDir.create(path, as_yaml(config), binding_data(config))
    with run_dir, _console(config.train.logging_steps) as console:
        handler = setup_logging(run_dir.logs, "sft")
        try:
            _record_end(run_dir, command, lambda: _sft(config, tasks, run_dir, console))
        finally:
            stop_logging(handler)
    return path


def _sft(config: SftConfig, tasks: Sequence[Task], run_dir: RunDir, console: BaseConsole) -> tuple[str, int]:
    from shoal.trainer.sft import SupervisedSteps, supervised_samples, train_supervised

    train = config.train
    model = build.load(train)
    samples, too_long = supervised_samples(tasks, model.chat, model.eos_token_ids[-1], train.sequence_len)
    if too_long:
        console.warn(f"{too_long} of {len(tasks)} rows do not fit into train.sequence_len and are set aside")
    per_epoch = max(1, len(samples) // config.batch_size)
    total = train.max_steps or per_epoch * (train.epochs or 1)
    policy = build.make_policy(train, model, total)
    files = build.PolicyFiles(policy, model.chat)
    steps = SupervisedSteps(
        policy, samples, config.batch_size, train.sequence_len, train.per_device_train_batch_size, train.seed
    )
    checkpoint = run_dir.newest_good_checkpoint()
    run_dir.cut_to(checkpoint.step if checkpoint is not None else -1)
    first = 1
    if checkpoint is not None:
        files.load(checkpoint.path)
        first = checkpoint.step + 1
    stop: list[int] = []
    for number, code in ((signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_TERMINATED)):
        signal.signal(number, lambda *_, code=code: stop.append(code))
    console.begin(f"supervised training of {train.model} for {total} steps in {run_dir.path}", total, first - 1)
    phases = Phases()

    def after_step(step: int, metrics: dict[str, float]) -> bool:
        times = phases.take()
        metrics = {**metrics, "time/step": times["time/step"]}
        metrics |= throughput({**metrics, "time/train": times["time/step"]}, metrics["tokens/completion"])
        run_dir.append_metrics(step, metrics)
        run_dir.append_journal(step, {"version": step})
        console.step(step, metrics)
        if stop or step % (train.save_steps or total) == 0 or step == total:
            with run_dir.checkpoint(step) as folder:
                files.save(folder)
            run_dir.prune_checkpoints(train.save_total_limit)
            run_dir.write_status("running", step=step, reason="checkpoint", resumable=True)
        return bool(stop)

    done = train_supervised(steps, first, total, after_step)
    if stop:
        raise Interrupted(f"interrupted after step {done}; the state is saved", stop[0])
    with run_dir.export() as folder:
        files.export(folder)
    return "finished", done


def _supervised_tasks(config: SftConfig) -> list[Task]:
    data = config.dataset
    spec = DatasetSpec(data.path, data.name, data.split, data.columns, data.max_rows)

    def make(row: Mapping[str, Any]) -> Task:
        messages = to_messages(row["messages"]) if row.get("messages") is not None else to_messages(row.get("prompt"))
        if row.get("messages") is None:
            completion = row.get("completion")
        else:
            completion = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
        if not isinstance(completion, str) or not messages:
            raise DataError("a row needs messages that end with an assistant's, or a prompt and a completion")
        return Task(messages, {"completion": completion})

    splits = read_splits(spec, (), make)
    return [*splits["train"], *splits["eval"]]


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
    """Mean reward of a model on the held-out prompts of an environment."""
    settings = EvalConfig(
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        sampling=EvalSamplingConfig(temperature=temperature, max_tokens=max_tokens, seed=seed),
    )
    config = build.evaluation_config(model, env, dict(env_args or {}), adapter, settings, device)
    prepared = build.prepare(config)
    try:
        return asyncio.run(build.evaluate_once(config, prepared))
    finally:
        asyncio.run(prepared.pool.close())


def make_model(kind: str, folder: Path, seed: int = 0) -> None:
    from shoal.models.shapes import make_model as write_model

    write_model(kind, folder, seed)


def demo(folder: Path, seed: int = 1) -> None:
    from shoal.demo import run_demo

    run_demo(folder, seed)
