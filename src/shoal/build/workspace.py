"""The second phase of a run: everything that exists before a model is loaded.

`open_workspace` imports no torch for a run in one process, so that reward workers fork from a small process. The other
functions are for the end of a run and for its continuation: status, newest checkpoint, last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.build.load import PythonObjects, Run
from shoal.build.ranks import is_main
from shoal.build.remote_engines import check_engine
from shoal.config.load import load_run, load_supervised
from shoal.config.orch import DatasetConfig, EnvConfig, OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_yaml, binding_data
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.core.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    Interrupted,
    RunLockedError,
    ShoalError,
    StoppedByPolicy,
    StorageError,
    Terminated,
)
from shoal.core.protocols import Environment, Ranks
from shoal.core.ranks import SingleProcess
from shoal.envs.base import lacks_reward, wrong_reward_signature
from shoal.envs.datasets import DataNotice, DatasetSpec, collect_row_problems, fingerprint
from shoal.envs.registry import load_environment, takes_data
from shoal.envs.stateful import StatefulEnvironment
from shoal.envs.user_code import checked_tasks, load_object
from shoal.models.tokenizer import check_found
from shoal.rewards.functions import FunctionReward, RewardFunctions
from shoal.rewards.isolation import isolation_of
from shoal.rewards.pool import RewardPool
from shoal.runs.checkpoints import Checkpoint, checkpoint_folders, resume_hint
from shoal.runs.events import EventLog, forward_log_warnings, setup_logging, stop_logging
from shoal.runs.journal import damaged_lines, read_lines
from shoal.runs.run_dir import FollowerRunDir, RunDir, is_used, read_status
from shoal.watch.console import BaseConsole, make_console
from shoal.watch.machine import describe_machine
from shoal.watch.observer import check_sinks
from shoal.watch.text import count
from shoal.watch.watchdog import Watchdog

LOADING = "is still loading"  # in a wait that every start has, and that is no warning


@dataclass
class Stages:
    """The parts of the start: shown on the console and timed."""

    console: BaseConsole
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str, doing: str, quiet: bool = False) -> Iterator[None]:
        began = time.monotonic()
        with self.console.progress(doing, quiet=quiet):
            yield
        self.seconds[name] = time.monotonic() - began

    def report(self, events: EventLog, device: str) -> None:
        """Call it when everything is loaded. `device` is train.device."""
        machine = describe_machine(device)
        events.emit("ready", "everything is loaded", data={"seconds": self.seconds, "machine": machine})


@dataclass
class Workspace:
    """Everything that a run has before a model is loaded."""

    environments: dict[str, Environment]  # by label
    rewards: RewardPool
    ranks: Ranks
    run_dir: RunDir | FollowerRunDir
    console: BaseConsole
    events: EventLog
    watchdog: Watchdog
    data_notices: list[DataNotice]  # rows of data sets that were held out or left out
    stage: Stages

    def report_wait(self, text: str) -> None:
        """Report on the console, in the events and in the status that the run waits, or no longer does."""
        waits = text.startswith("waiting") and not text.endswith(LOADING)
        self.events.emit("waiting", text, level="warning" if waits else "notice")
        if not waits:
            self.console.note(text)
        status = self.run_dir.status
        self.run_dir.write_status(
            "running",
            step=status.get("step", 0),
            reason=text,
            resumable=bool(status.get("resumable")),
            next_command=status.get("next_command"),
        )


@contextlib.contextmanager
def open_workspace(run: Run) -> Iterator[Workspace]:
    """Reward workers fork first, then the ranks join, then rank 0 opens the run directory. The order is fixed: workers
    must fork before torch is imported, and the other ranks must learn whether the directory could be opened."""
    config = run.config
    with contextlib.ExitStack() as stack:
        environments, data_notices = prepare_environments(run)
        rewards = stack.enter_context(reward_workers(config.orch, environments))
        ranks = stack.enter_context(contextlib.closing(join_ranks(run)))
        main = ranks.rank == 0
        run_dir = stack.enter_context(open_run_dir(run, ranks, environments))
        console = stack.enter_context(open_console(config.train.logging_steps, silent=not main))
        events = EventLog(run_dir, console, run.wording)
        component = run.component if main else f"grpo-rank{ranks.rank}"
        stack.enter_context(log_run(run_dir, console, component, events, main=main))
        for notice in [*run.notices, *rewards.notices]:
            console.note(f"note: {notice}")
        watchdog = Watchdog(run_dir.logs, events, stall_s=config.orch.deadline_s)
        yield Workspace(environments, rewards, ranks, run_dir, console, events, watchdog, data_notices, Stages(console))


def prepare_environments(run: Run) -> tuple[dict[str, Environment], list[DataNotice]]:
    """Environments by label, with the tasks to train on read, and notices about rows that were left out.

    First whatever can be refused before anything loads. Tasks are read here so that the reward workers share them.
    """
    config, objects = run.config, run.objects
    check_engine(config, objects.processes, starts=run.trains)
    check_sinks(config.train.report_to)
    if objects.model is None and config.train.model is not None:
        check_found("train.model", config.train.model)
    with collect_row_problems() as notices:
        environments = _make_environments(config, objects)
        for label, environment in environments.items():
            _remember_tasks(label, environment)
        for env in config.orch.env:
            environments[env.label].tasks("train")
    return environments, notices


@contextlib.contextmanager
def reward_workers(orch: OrchConfig, environments: Mapping[str, Environment]) -> Iterator[RewardPool]:
    """The processes that compute rewards, forked from this one."""
    reward = orch.reward
    isolated, notices = isolation_of(reward.isolated)
    pool = RewardPool(
        environments,
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        weights=dict.fromkeys(environments, reward.parts) if reward.parts else None,
        isolated=isolated,
        processes=orch.stateful.processes,
        call_timeout_s=orch.stateful.timeout_s,
    )
    for label, environment in environments.items():
        if isinstance(environment, StatefulEnvironment):
            environment.pool = pool
            if environment.needs_isolation and not isolated:
                raise ConfigError(
                    f"orch.env: {label}: {environment.kind} runs code written by the model; set orch.reward.isolated"
                )
    pool.notices += notices
    pool.start()
    try:
        yield pool
    finally:
        asyncio.run(pool.close())


def _make_environments(config: RunConfig, objects: PythonObjects) -> dict[str, Environment]:
    """By label, each with a reward, unless the run trains without rewards."""
    orch, teacher = config.orch, config.train.teacher
    without_reward = teacher is not None and teacher.reward_weight == 0
    environments: dict[str, Environment] = {}
    for key, env in ((key, env) for key, envs in orch.env_lists for env in envs):
        if env.label not in environments:  # used for training and evaluation: config/ checked that the arguments agree
            with about(key):
                environments[env.label] = _environment(env, orch.dataset, objects)
    if orch.reward.function is not None:
        with about("orch.reward.function"):
            functions = RewardFunctions([load_object(orch.reward.function)], label="reward function")
            for environment in environments.values() if functions.columns() else ():
                tasks = environment.tasks("train")
                if len(tasks):
                    functions.check(list(tasks[0].data))
        scorer = FunctionReward(functions)
        for environment in environments.values():
            environment.max_reward = None  # type: ignore[attr-defined]  # of its own reward
            environment.reward = scorer.reward  # type: ignore[method-assign]
            environment.reward_group = scorer.reward_group  # type: ignore[attr-defined]
            environment.keep_env = [*getattr(environment, "keep_env", ()), *scorer.keep_env]  # type: ignore[attr-defined]
    for label, environment in environments.items():
        if orch.reward.max is not None or orch.reward.parts:
            with contextlib.suppress(AttributeError):
                environment.max_reward = orch.reward.max  # type: ignore[attr-defined]
        if lacks_reward(environment) and without_reward:
            environment.without_reward = True  # type: ignore[attr-defined]
        elif lacks_reward(environment):
            raise ConfigError(
                f"orch.env: {label}: {type(environment).__name__} has no method reward(self, task, messages); "
                "write one, or name a function with orch.reward.function"
            )
        elif (wrong := wrong_reward_signature(environment)) is not None:
            raise ConfigError(
                f"orch.env: {label}: {type(environment).__name__}.reward has the parameters {wrong}; "
                "write reward(self, task, messages)"
            )
    return environments


def _remember_tasks(label: str, environment: Environment) -> None:
    """Every rollout and every reward reads the tasks, and some environments build the list on each call."""
    if hasattr(environment.tasks, "cache_clear"):
        environment.tasks.cache_clear()  # type: ignore[attr-defined]  # an object of a script, used a second time
        return
    with contextlib.suppress(AttributeError):  # an object without assignable attributes: not cached
        environment.tasks = functools.cache(checked_tasks(label, environment.tasks))  # type: ignore[method-assign]


def join_ranks(run: Run) -> Ranks:
    """Join the other processes of the run, if there are any. Call it after the reward workers were forked."""
    config, processes = run.config, run.objects.processes
    if not run.trains or (processes == 1 and config.train.sharding != "fsdp"):
        return SingleProcess()
    if config.orch.weight_sync_interval != 1 or config.orch.max_async_level != 0:
        raise ConfigError(
            "several processes, and sharded weights, train in step: set orch.weight_sync_interval=1, "
            "orch.max_async_level=0"
        )
    by_clock = config.orch.eval is not None and config.orch.eval.interval_seconds is not None
    if processes > 1 and (config.train.save_seconds is not None or by_clock):
        raise ConfigError(
            "several processes have several clocks: give train.save_steps and orch.eval.interval in steps, "
            "not train.save_seconds or orch.eval.interval_seconds"
        )
    from shoal.trainer.process_ranks import ProcessRanks

    return ProcessRanks(config.orch.deadline_s, processes, config.train.device)


def _environment(env: EnvConfig, dataset: DatasetConfig | None, objects: PythonObjects) -> Environment:
    if env.label in objects.environments:
        return objects.environments[env.label]
    # Environments that generate their tasks may be used beside one that reads the data set.
    spec = DatasetSpec(**dict(dataset)) if dataset is not None and takes_data(env.id) else None
    return load_environment(env.id, env.args, env.label, spec)


def _data_fingerprint(run: Run, environments: Mapping[str, Environment]) -> str:
    """Identifies the training data. Data sets are read in full; of generated tasks the first 1000 are enough, because
    the arguments that determine them are compared as well."""
    tasks = [environments[env.label].tasks("train") for env in run.config.orch.env]
    read = (some[i] for some in tasks for i in range(len(some) if isinstance(some, list) else min(1000, len(some))))
    return f"{fingerprint(read)} {'+'.join(str(len(some)) for some in tasks)}"


def binding(config: RunConfig | SupervisedConfig, data: str) -> dict[str, Any]:
    """What a resumed run compares: keys, the data, and the files of a local model or adapter.

    A checkpoint holds only trained weights. The base of an adapter and the reference are read from those files again.
    """
    from shoal.models.tokenizer import files_fingerprint

    names = {"model": config.train.model, "adapter": config.train.adapter_path}
    found = {f"{kind} files": files_fingerprint(name) for kind, name in names.items() if name is not None}
    files = {kind: value for kind, value in found.items() if value is not None}
    return {**binding_data(config), "data": data, **files}


def open_run_dir(run: Run, ranks: Ranks, environments: Mapping[str, Environment]) -> RunDir | FollowerRunDir:
    """Rank 0 opens it, and all ranks fail if that fails. The others write nothing."""
    opened: list[RunDir] = []

    async def open_it() -> None:
        data = binding(run.config, _data_fingerprint(run, environments))
        opened.append(open_or_create(run.path, run.config, data, run.command, run.resume))

    asyncio.run(ranks.on_main(open_it))
    return opened[0] if opened else FollowerRunDir(run.path)


def open_or_create(
    path: Path, config: RunConfig | SupervisedConfig, data: dict[str, Any], command: str, resume: bool
) -> RunDir:
    if resume and is_used(path):
        run_dir = RunDir.resume(path)
        run_dir.reopen(as_yaml(config), data, command)
        return run_dir
    return RunDir.create(path, as_yaml(config), data, command)


@contextlib.contextmanager
def open_console(every: int, *, silent: bool = False) -> Iterator[BaseConsole]:
    console = make_console(io.StringIO() if silent else None, every=every)
    try:
        yield console
    finally:
        console.close()


@contextlib.contextmanager
def log_run(
    run_dir: RunDir | FollowerRunDir, console: BaseConsole, component: str, events: EventLog, *, main: bool = True
) -> Iterator[None]:
    """A log file while the block runs, then report.html however the run ended, then a last line if it ended well."""
    handler = setup_logging(run_dir.logs, component)
    console.publish = run_dir.write_progress
    try:
        with forward_log_warnings(events):
            yield
    finally:
        if main:
            console.waiting("writing the report")
            _write_report(run_dir.path, events)
        console.publish = None
        stop_logging(handler)
    if main:
        console.closing([last_line(run_dir.path)])


def _write_report(path: Path, events: EventLog) -> None:
    """report.html, and the model card of final/. Writing them never fails a run."""
    if not is_used(path):
        return  # refused before the first step: there is nothing to report
    try:
        from shoal.watch.report.model_card import write_card
        from shoal.watch.report.page import write_report

        write_card(path)
        write_report(path)
    except Exception as error:
        with contextlib.suppress(StorageError):  # a full disk must not hide how the run ended
            events.warn("report", f"report.html or the model card could not be written: {error}")


def newest_checkpoint(run_dir: RunDir, events: EventLog) -> Checkpoint | None:
    """The checkpoint to continue from. Records of later steps are removed, and earlier ones are verified."""
    checkpoint = run_dir.newest_good_checkpoint()
    for reason in checkpoint.skipped if checkpoint is not None else []:
        events.warn("checkpoint", f"a checkpoint was passed over: {reason}")
    damaged = {file.path.name: damaged_lines(file.path) for file in (run_dir.metrics, run_dir.journal, run_dir.events)}
    run_dir.cut_to(checkpoint.step if checkpoint is not None else -1)
    for name, lines in damaged.items():
        if lines:
            events.warn("damaged", f"{name}: {count(len(lines), 'line')} could not be read and left out: {lines[:9]}")
    for problem in run_dir.damage + (run_dir.restore_history(checkpoint) if checkpoint is not None else []):
        events.warn("damaged", problem)
    return checkpoint


def record_end(run_dir: RunDir | FollowerRunDir, command: str, work: Callable[[], tuple[str, int]]) -> None:
    """Do the work and write into status.json how it ended. `command` continues the run."""

    def write(state: Any, reason: str, resumable: bool, step: int | None = None) -> None:
        at = run_dir.status.get("step", 0) if step is None else step
        run_dir.write_status(
            state, step=at, reason=reason, resumable=resumable, next_command=command if resumable else None
        )

    try:
        outcome, step = work()
    except Interrupted as error:
        write("interrupted", str(error), True)
        raise Interrupted(f"{error}; to continue: {command}", error.exit_code) from error
    except StoppedByPolicy as error:
        write("stopped", str(error), True)
        raise
    except KeyboardInterrupt as error:
        reason = f"{str(error) or 'interrupted'} while it was loading; nothing is lost"
        write("interrupted", reason, True)
        raise Terminated(f"{reason}; to continue: {command}", getattr(error, "exit_code", EXIT_INTERRUPTED)) from error
    except ConfigError as error:
        if not run_dir.free_if_untouched():
            write("failed", str(error), True)
        raise
    except BaseException as error:
        with contextlib.suppress(ShoalError):  # the disk may be what failed
            write("failed", f"{type(error).__name__}: {error}", True)
        raise
    write("solved" if outcome == "solved" else "finished", f"{outcome} after step {step}", False, step)


def end_at_once(run_dir: RunDir | FollowerRunDir, command: str | None) -> str | None:
    """Write the status before a second signal ends the process. Returns the last line to print."""
    if run_dir.status.get("state") in ("finished", "solved"):
        return None
    reason = f"ended at once by a second signal; {resume_hint(run_dir.path / 'checkpoints')}"
    at = run_dir.status.get("step", 0)
    run_dir.write_status("interrupted", step=at, reason=reason, resumable=True, next_command=command)
    return f"{reason}; to continue: {command}" if command else reason


def already_done(path: Path, config: RunConfig | SupervisedConfig) -> bool:
    """Whether the run has finished, which is printed. A run with more steps or epochs than before continues, and so
    does one without final/, which is written again from the newest checkpoint."""
    try:
        status = read_status(path)
    except StorageError:  # there is none, or a resume recovers it
        return False
    if status.get("state") not in ("finished", "solved"):
        return False
    if not (path / "final").is_dir():
        if checkpoint_folders(path / "checkpoints"):
            return False
        raise StorageError(
            f"{path}: this run is {status['state']}, but it has neither final/ nor a checkpoint: its weights are lost. "
            "Choose another train.output_dir to train again"
        )
    file = str(path / "config.yaml")
    recorded = load_run(file) if isinstance(config, RunConfig) else load_supervised(type(config), file)
    earlier, now = recorded.config.train, config.train
    longer = (now.max_steps or 0) > (earlier.max_steps or 0) or (now.epochs or 0) > (earlier.epochs or 0)
    if not longer and is_main():
        _write_missing_report(path)
        done = f"{path}: this run is {status['state']} at step {status['step']}"
        print(f"{done}; nothing is left to do. Set more steps or epochs to continue it")
    return not longer


def _write_missing_report(path: Path) -> None:
    """The report and the model card of a run that was killed after its last step, before they were written."""
    if all((path / name).exists() for name in ("report.html", "final/README.md")):
        return
    with contextlib.suppress(RunLockedError, StorageError), RunDir.resume(path) as run_dir:
        _write_report(path, EventLog(run_dir))


def last_line(path: Path) -> str:
    """The outcome of a finished run, and where its results are."""
    lines = [str(read_status(path)["reason"])]
    if (path / "report.html").exists():
        lines.append(f"the report is {path / 'report.html'}")
    if (path / "final").exists():
        trained = [bool(record.get("rollout_ids", True)) for record in read_lines(path / "journal.jsonl")]
        unchanged = bool(trained) and not any(trained)
        kind = "unchanged weights, because no step trained anything," if unchanged else "trained weights"
        lines.append(f"the {kind} are in {path / 'final'}")
    return "; ".join(lines)
