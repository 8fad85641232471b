"""Checks the environments a configuration names, without loading any: ids, argument names, data, findable user code.
A dry run loads what can be loaded without reading data.

Lives with the commands because the configuration may not import the environments.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shoal.config.orch import OrchConfig
from shoal.config.problems import Findings, about, show
from shoal.config.train import TrainConfig
from shoal.envs.catalogue import BUILT_IN, OWN_TASKS, REASONING_GYM, VERIFIERS, problem_with, takes_data


def check_environments(orch: OrchConfig, findings: Findings) -> None:
    for key, envs in orch.env_lists:
        for index, env in enumerate(envs):
            problem = environment_problem(env.id, env.args)
            if problem is not None:
                part = "id" if environment_problem(env.id) is not None else "args"
                findings.error(f"{key}.{index}.{part}", *problem)
            elif env.id == "gsm8k":
                _check_folder(f"{key}.{index}.args.path", env.args.get("path"), findings)
    _check_dataset_use(orch, findings)


def check_user_code(section: OrchConfig | TrainConfig, findings: Findings) -> None:
    """The other places where module:function may stand."""
    for key, name in _functions(section).items():
        problem = user_code_problem(name)
        if problem is not None:
            findings.error(key, *problem)


def _functions(section: OrchConfig | TrainConfig) -> dict[str, str]:
    if isinstance(section, TrainConfig):
        return {"train.loss.type": section.loss.type} if section.loss.custom else {}
    named = {
        "orch.advantage.function": section.advantage.function,
        "orch.reward.function": section.reward.function,
        "orch.groups.filter": section.groups.filter,
    }
    return {key: name for key, name in named.items() if name is not None}


def load_code(section: OrchConfig | TrainConfig) -> None:
    """Import what is named as module:attribute, and make the environments that come with Shoal; no task is asked for.

    The user's own are imported and not made: they may need what only the machine of the run has. What they print
    belongs to nobody who reads the configuration from the standard output.
    """
    from shoal.envs.user_code import load_object

    with contextlib.redirect_stdout(sys.stderr):
        if isinstance(section, OrchConfig):
            _load_environments(section)
        for key, name in _functions(section).items():
            with about(key):
                load_object(name)


def _load_environments(orch: OrchConfig) -> None:
    from shoal.envs.datasets import DatasetSpec
    from shoal.envs.registry import load_environment
    from shoal.envs.user_code import load_object

    for key, env in ((key, env) for key, envs in orch.env_lists for env in envs):
        with about(key):
            if env.id in BUILT_IN:
                data = DatasetSpec(**dict(orch.dataset)) if orch.dataset is not None and takes_data(env.id) else None
                load_environment(env.id, env.args, dataset=data)
            elif not env.id.startswith(OWN_TASKS):
                load_object(env.id)


def environment_problem(id: str, args: Mapping[str, Any] | None = None) -> tuple[str, str] | None:
    """(what, fix) if the environment cannot be had, None otherwise."""
    problem = problem_with(id, args)
    if problem is not None:
        what, _, fix = problem.partition("; ")
        return what, f"{fix}; `shoal envs` lists them" if fix else "`shoal envs` lists them"
    if id.startswith(REASONING_GYM):
        if importlib.util.find_spec("reasoning_gym") is None:
            return f"{show(id)} needs the package reasoning-gym", "pip install 'shoal[reasoning-gym]'"
        return None
    return None if id in BUILT_IN or id.startswith(VERIFIERS) else user_code_problem(id)


def user_code_problem(name: str) -> tuple[str, str] | None:
    """Whether the module of `module:function` or `file.py:function` can be found; it is not imported."""
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        if Path(module).expanduser().is_file():
            return None
        return f"there is no file {show(module)} for {show(name)}", "check the path, or run where it lies"
    if PathFinder.find_spec(module.split(".")[0], [*sys.path, str(Path.cwd())]) is not None:
        return None
    return f"there is no module {show(module)} for {show(name)}", "install it, or run where it lies"


def _check_folder(key: str, path: object, findings: Findings) -> None:
    if path is not None and (not isinstance(path, str) or not Path(path).expanduser().exists()):
        findings.error(key, f"{show(path)} does not exist", "name the folder with train.jsonl and test.jsonl")


def _check_dataset_use(orch: OrchConfig, findings: Findings) -> None:
    if orch.dataset is not None and not any(takes_data(env.id) for env in orch.env):
        what = f"is not used: {', '.join(env.id for env in orch.env)} makes its own tasks"
        able = ", ".join(info.id for info in BUILT_IN.values() if info.takes_dataset)
        findings.error("orch.dataset", what, f"remove it, or use one of {able}")
    for index, env in enumerate(orch.env):
        if env.id == "dataset" and orch.dataset is None:
            findings.error(f"orch.env.{index}.id", "'dataset' needs data", "set orch.dataset.path or orch.dataset.name")
