"""What needs no torch: environments, the reward workers (forked before anything heavy exists), the run directory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.build.given import Given
from shoal.build.remote import check_engine
from shoal.config.orch import DatasetConfig, EnvConfig, OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_yaml, binding_data
from shoal.config.schema import RunConfig, SftConfig
from shoal.envs.base import lacks_reward
from shoal.envs.catalogue import takes_data
from shoal.envs.datasets import DatasetSpec, fingerprint, heard_problems
from shoal.envs.registry import load_environment
from shoal.envs.user_code import checked_tasks, load_object
from shoal.errors import ConfigError
from shoal.models.tokenizer import check_found
from shoal.observability.follower import FollowerRunDir
from shoal.observability.run_dir import RunDir
from shoal.observability.sinks import check_sinks
from shoal.orchestrator.ranks import Alone
from shoal.protocols import Environment, Ranks
from shoal.rewards.isolate import check_isolation, needed_files
from shoal.rewards.pool import RewardPool


@dataclass
class Prepared:
    """Environments by label, and the pool that runs their rewards."""

    environments: dict[str, Environment]
    pool: RewardPool
    data_fingerprint: str
    notices: list[str]  # rows that were set aside, with file and line
    given: Given = field(default_factory=Given)
    ranks: Ranks = field(default_factory=Alone)


def prepare(config: RunConfig, given: Given | None = None, *, colocated: bool = True) -> Prepared:
    """`colocated`: an engine that is to be started is started by this process, on this machine."""
    check_engine(config, (given or Given()).processes, starts=colocated)
    with heard_problems() as notices:
        return _prepare(config, given or Given(), notices)


def _prepare(config: RunConfig, given: Given, notices: list[str]) -> Prepared:
    orch = config.orch
    check_sinks(config.train.report_to)
    if given.model is None and config.train.model is not None:
        check_found("train.model", config.train.model)
    environments = _make_environments(orch, given)
    for label, environment in environments.items():
        _remember_tasks(label, environment)
    if orch.reward.isolated:
        check_isolation(needed_files())
    pool = RewardPool(
        environments,
        workers=orch.reward.workers,
        timeout_s=orch.reward.timeout_s,
        weights=dict.fromkeys(environments, orch.reward.parts) if orch.reward.parts else None,
        isolated=orch.reward.isolated,
    )
    trained = [environments[env.label] for env in orch.env]
    sizes = "+".join(str(len(env.tasks("train"))) for env in trained)
    data = f"{fingerprint(task for env in trained for task in _fingerprinted(env))} {sizes}"
    pool.start()
    return Prepared(environments, pool, data, notices, given)


def _make_environments(orch: OrchConfig, given: Given) -> dict[str, Environment]:
    """By label, each with a reward."""
    environments: dict[str, Environment] = {}
    for key, env in ((key, env) for key, envs in orch.env_lists for env in envs):
        if env.label not in environments:  # one that training has too, with the same arguments: checked
            with about(key):
                environments[env.label] = _environment(env, orch.dataset, given)
    if orch.reward.function is not None:
        with about("orch.reward.function"):
            function = load_object(orch.reward.function)
        for environment in environments.values():
            environment.reward = function  # type: ignore[method-assign]
    for label, environment in environments.items():
        if lacks_reward(environment):
            raise ConfigError(
                f"orch.env: {label}: {type(environment).__name__} has no method reward(self, task, messages); "
                "write one, or name a function with orch.reward.function"
            )
    return environments


def _remember_tasks(label: str, environment: Environment) -> None:
    """Tasks are asked for by every rollout and every reward, and some environments build the list anew each time."""
    if hasattr(environment.tasks, "cache_clear"):
        environment.tasks.cache_clear()  # type: ignore[attr-defined]  # an object of the user's, given a second time
        return
    with contextlib.suppress(AttributeError):  # one that takes no attributes does without
        environment.tasks = functools.cache(checked_tasks(label, environment.tasks))  # type: ignore[method-assign]


def join_ranks(config: RunConfig, prepared: Prepared) -> Ranks:
    """Meet the other processes of this run, if there are any. The reward workers are forked by now."""
    several, sharded = prepared.given.processes > 1, config.train.sharding == "fsdp"
    if several or sharded:
        if config.orch.weight_sync_interval != 1 or config.orch.max_async_level != 0:
            raise ConfigError(
                "several processes, and sharded weights, train in step: set orch.weight_sync_interval=1, "
                "orch.max_async_level=0"
            )
        by_clock = config.orch.eval is not None and config.orch.eval.interval_seconds is not None
        if several and (config.train.save_seconds is not None or by_clock):
            raise ConfigError(
                "several processes have several clocks: give train.save_steps and orch.eval.interval in steps, "
                "not train.save_seconds or orch.eval.interval_seconds"
            )
        from shoal.trainer.ranks import ProcessRanks

        prepared.ranks = ProcessRanks(config.orch.deadline_s, prepared.given.processes, config.train.device)
    return prepared.ranks


def leave_ranks(prepared: Prepared) -> None:
    leave = getattr(prepared.ranks, "close", None)
    if leave is not None:
        leave()


def _environment(env: EnvConfig, dataset: DatasetConfig | None, given: Given) -> Environment:
    if env.label in given.environments:
        return given.environments[env.label]
    # Environments that make their own tasks stand beside one that reads the data set.
    spec = DatasetSpec(**dict(dataset)) if dataset is not None and takes_data(env.id) else None
    return load_environment(env.id, env.args, env.label, spec)


def _fingerprinted(environment: Environment) -> list[Any]:
    """Generated tasks follow from arguments that are bound too, so the first stand for all; data is read in full."""
    tasks = environment.tasks("train")
    return tasks if isinstance(tasks, list) else [tasks[i] for i in range(min(1000, len(tasks)))]


def binding(config: RunConfig | SftConfig, data: str) -> dict[str, Any]:
    """What a resumed run must find unchanged: keys, the data, and the files of a model or adapter that lie here.

    A checkpoint holds what was trained. The base of an adapter and the reference are read from those files again.
    """
    from shoal.models.tokenizer import mark_of_files

    names = {"model": config.train.model, "adapter": config.train.adapter_path}
    marks = {f"{kind} files": mark_of_files(name) for kind, name in names.items() if name is not None}
    return {**binding_data(config), "data": data, **{kind: mark for kind, mark in marks.items() if mark is not None}}


def open_run_dir(config: RunConfig, prepared: Prepared, resume: bool, next_command: str) -> RunDir | FollowerRunDir:
    """The main process opens it and tells the others whether it could; they write nothing."""
    opened: list[RunDir] = []

    async def open_it() -> None:
        opened.append(_open_run_dir(config, prepared, resume, next_command))

    asyncio.run(prepared.ranks.on_main(open_it))  # type: ignore[arg-type]
    return opened[0] if opened else FollowerRunDir(config.train.output_dir)


def _open_run_dir(config: RunConfig, prepared: Prepared, resume: bool, next_command: str) -> RunDir:
    path = Path(config.train.output_dir)
    if resume and (path / "status.json").exists():
        run_dir = RunDir.resume(path)
        run_dir.reopen(as_yaml(config), binding(config, prepared.data_fingerprint), next_command)
        return run_dir
    if resume and path.exists() and any(path.glob("checkpoints/*")):
        raise ConfigError(f"{path} holds checkpoints but no status.json; it is not a run directory of Shoal")
    return RunDir.create(path, as_yaml(config), binding(config, prepared.data_fingerprint), next_command)
