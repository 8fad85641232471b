"""From an environment's id to the environment. Called by build.py, once per entry of `orch.env`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any

from shoal.envs.base import OneAnswer
from shoal.envs.catalogue import BUILT_IN, REASONING_GYM, VERIFIERS, problem_with
from shoal.envs.datasets import DatasetSpec
from shoal.envs.items import ItemEnvironment
from shoal.envs.user_code import load_object
from shoal.errors import ConfigError, ShoalError
from shoal.protocols import Environment


def load_environment(
    id: str, args: Mapping[str, Any] | None = None, name: str | None = None, dataset: DatasetSpec | None = None
) -> Environment:
    """A built-in id, `reasoning-gym:<task>` or `module:attribute`, ready to hand out tasks."""
    args = dict(args or {})
    problem = problem_with(id, args)
    if problem is not None:
        raise ConfigError(problem)
    if id in BUILT_IN:
        environment = _load_built_in(id, args, dataset)
    elif id.startswith(REASONING_GYM):
        environment = _load_reasoning_gym(id.removeprefix(REASONING_GYM), args, dataset)
    elif id.startswith(VERIFIERS):
        environment = _load_verifiers(id.removeprefix(VERIFIERS), args, dataset)
    else:
        environment = _load_user(id, args, dataset)
    return _named(environment, name or id)


def as_environment(found: Any, what: str) -> Environment:
    """An environment as it is, or out of items with `get_reward`: one, a list, or {"train": [...], "eval": [...]}."""
    if callable(getattr(found, "tasks", None)) and callable(getattr(found, "reward", None)):
        if not callable(getattr(found, "start", None)):
            found.start = MethodType(lambda self, task: OneAnswer(task), found)
        return found
    if callable(getattr(found, "get_reward", None)):
        return ItemEnvironment([found], name=what)
    if isinstance(found, Mapping) and "train" in found:
        return ItemEnvironment(found["train"], found.get("eval", ()), name=what)
    if hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, str | bytes | Mapping):
        return ItemEnvironment(found, name=what)
    raise ConfigError(
        f"{what} is {_article(found)}, not an environment: it needs methods tasks(split) and reward(task, messages), "
        "or items with a prompt and get_reward(completion)"
    )


def _load_built_in(id: str, args: dict[str, Any], dataset: DatasetSpec | None) -> Environment:
    info = BUILT_IN[id]
    if dataset is not None:
        if not info.takes_dataset:
            raise ConfigError(f"environment {id!r} makes its own tasks and takes no dataset")
        args["dataset"] = dataset
    return _construct(load_object(info.target), args, id)


def _load_reasoning_gym(task: str, args: dict[str, Any], dataset: DatasetSpec | None) -> Environment:
    from shoal.envs.reasoning import ReasoningGym

    if dataset is not None:
        raise ConfigError(f"environment 'reasoning-gym:{task}' makes its own tasks and takes no dataset")
    return ReasoningGym(task, **args)


def _load_verifiers(id: str, args: dict[str, Any], dataset: DatasetSpec | None) -> Environment:
    from shoal.envs.verifiers_env import Verifiers

    if dataset is not None:
        raise ConfigError(f"environment 'verifiers:{id}' makes its own tasks and takes no dataset")
    return _construct(Verifiers, {"id": id, **args}, f"verifiers:{id}")


def _load_user(id: str, args: dict[str, Any], dataset: DatasetSpec | None) -> Environment:
    found = load_object(id)
    if inspect.isclass(found) or inspect.isroutine(found):
        if dataset is not None:
            if "dataset" not in inspect.signature(found).parameters:
                raise ConfigError(f"{id} takes no dataset: give it a parameter named dataset")
            args["dataset"] = dataset
        return as_environment(_construct(found, args, id), id)
    if args or dataset is not None:
        raise ConfigError(f"{id} is an object, so it takes neither args nor a dataset; name a class or a function")
    return as_environment(copy.copy(found), id)


def _construct(factory: Any, args: dict[str, Any], what: str) -> Any:
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; it is called as {inspect.signature(factory)}") from error
    try:
        return factory(**args)
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:  # user code, or a built-in given an argument of the wrong type
        raise ConfigError(f"{what}: {type(error).__name__}: {error} (args {args})") from error


def _named(environment: Environment, name: str) -> Environment:
    try:
        environment.name = name
    except AttributeError as error:
        raise ConfigError(f"{name}: the environment's name cannot be set: {error}") from error
    return environment


def _article(found: Any) -> str:
    kind = type(found).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
