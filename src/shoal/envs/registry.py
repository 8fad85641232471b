"""The registry of built-in environments, and `load_environment`, which loads an environment by id.

Used by the configuration checks, `shoal envs` and `build.workspace`. Importing it does not import torch.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import Annotated, Any, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from shoal.core.errors import ConfigError, ShoalError
from shoal.core.protocols import Environment
from shoal.core.section import IN_MEMORY
from shoal.envs.arithmetic import Arithmetic
from shoal.envs.base import OneAnswer, SingleTurn
from shoal.envs.countdown import Countdown
from shoal.envs.dataset_env import DatasetEnvironment
from shoal.envs.datasets import DatasetSpec
from shoal.envs.gsm8k import Gsm8k
from shoal.envs.items import ItemEnvironment
from shoal.envs.reasoning import ReasoningGym
from shoal.envs.reverse_text import ReverseText
from shoal.envs.stateful import StatefulEnvironment, is_stateful
from shoal.envs.user_code import load_object
from shoal.envs.verifiers_env import Verifiers

REASONING_GYM = "reasoning-gym:"
VERIFIERS = "verifiers:"
PACKAGES = {REASONING_GYM: ReasoningGym, VERIFIERS: Verifiers}
EXAMPLES = {REASONING_GYM: "reasoning-gym:chain_sum", VERIFIERS: "verifiers:gsm8k-v1"}
OWN_TASKS = tuple(PACKAGES)  # environments of these packages take no dataset
MAX_SHOWN_DEFAULT = 20  # characters


BUILT_IN: dict[str, type[SingleTurn]] = {
    environment.name: environment for environment in (ReverseText, Arithmetic, Gsm8k, Countdown, DatasetEnvironment)
}


def summary(environment: type) -> str:
    """Return the first line of the docstring of an environment class."""
    return (environment.__doc__ or "").partition("\n")[0]


def takes_dataset(environment: type) -> bool:
    return "dataset" in inspect.signature(environment).parameters


@cache
def arguments_of(environment: type) -> type[BaseModel]:
    """Return the arguments of an environment class as a strict pydantic model, made from its signature.

    The arguments are the parameters with an `Annotated` type. `load_environment` supplies the others, such as
    `dataset`. `**kwargs` accepts any further argument.
    """
    hints = get_type_hints(environment.__init__, include_extras=True)
    parameters = inspect.signature(environment).parameters
    declared = {name: hint for name, hint in hints.items() if get_origin(hint) is Annotated and name in parameters}
    fields: dict[str, Any] = {
        name: (hint, ... if parameters[name].default is inspect.Parameter.empty else parameters[name].default)
        for name, hint in declared.items()
    }
    any_other = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    config = ConfigDict(extra="allow" if any_other else "forbid", strict=True, allow_inf_nan=False)
    return create_model(f"{environment.__name__}Arguments", __config__=config, **fields)


def shown_default(argument: FieldInfo) -> str:
    """Return the default of an argument as `shoal envs` and the documentation show it."""
    if argument.is_required():
        return "required"
    default = argument.default
    if isinstance(default, str) and len(default) > MAX_SHOWN_DEFAULT:
        return "built-in"
    if default is None or default == ():
        return "unset"
    return f"{default:g}" if isinstance(default, float) else str(default)


def takes_data(id: str) -> bool:
    """True if the environment may read `orch.dataset`. For user code this is checked when it is loaded."""
    return takes_dataset(BUILT_IN[id]) if id in BUILT_IN else not id.startswith(OWN_TASKS)


def problem_with(id: str, args: Mapping[str, Any] | None = None) -> str | None:
    """Return what is wrong with an environment id or its arguments, None if no problem is found without loading it."""
    if id == IN_MEMORY:
        return "the data of this run is a Python object; run its script again with resume"
    for prefix, environment in PACKAGES.items():
        if id.startswith(prefix):
            if id == prefix:
                return f"{id!r} names no environment; write for example {EXAMPLES[prefix]}"
            return None if args is None else _wrong_argument(id, environment, args)
    if id in BUILT_IN:
        return None if args is None else _wrong_argument(id, BUILT_IN[id], args)
    if id.endswith(".py"):
        return f"{id!r} is a file; name the environment in it, as {id}:MyEnv"
    return None if ":" in id else f"unknown environment {id!r}; {_nearest(id)}"


def _wrong_argument(id: str, environment: type, args: Mapping[str, Any]) -> str | None:
    """Describe the first invalid argument, None if all are valid."""
    arguments = arguments_of(environment)
    try:
        arguments.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        known = arguments.model_fields
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"nearest is {near[0]!r}" if near else f"it takes {', '.join(known)}"
            return f"environment {id!r} has no argument {name!r}; {hint}"
        if first["type"] == "missing":
            return f"environment {id!r} needs args.{name}; set it to {known[name].description}"
        wanted = first["msg"].removeprefix("Input should be ")
        return f"environment {id!r}: args.{name} is {args[name]!r}; it must be {wanted} ({known[name].description})"
    return None


def _nearest(id: str) -> str:
    near = difflib.get_close_matches(id.replace("_", "-"), [*BUILT_IN, "reasoning-gym"], n=1, cutoff=0.5)
    if near and near[0] == "reasoning-gym":
        return "nearest is 'reasoning-gym:<task>', e.g. reasoning-gym:chain_sum"
    known = f"built in are {', '.join(BUILT_IN)}; reasoning-gym:<task>, verifiers:<id> and module:attribute work too"
    return f"nearest is {near[0]!r}" if near else known


def load_environment(
    id: str, args: Mapping[str, Any] | None = None, name: str | None = None, dataset: DatasetSpec | None = None
) -> Environment:
    """Load an environment: a built-in id, `reasoning-gym:<task>`, `verifiers:<id>` or `module:attribute`."""
    args = dict(args or {})
    problem = problem_with(id, args)
    if problem is not None:
        raise ConfigError(problem)
    if id in BUILT_IN:
        environment = _load_built_in(id, args, dataset)
    elif id.startswith(OWN_TASKS):
        prefix = next(prefix for prefix in PACKAGES if id.startswith(prefix))
        if dataset is not None:
            raise ConfigError(f"environment {id!r} has its own tasks and takes no dataset")
        environment = _construct(PACKAGES[prefix], id, id.removeprefix(prefix), **args)
    else:
        environment = _load_user(id, args, dataset)
    return _named(environment, name or id)


def as_environment(found: Any, what: str) -> Environment:
    """Return an environment unchanged; wrap items with `get_reward` (one, a list, {"train": […], "eval": […]})."""
    if is_stateful(found):
        return StatefulEnvironment(found)
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
    if dataset is not None:
        if not takes_dataset(BUILT_IN[id]):
            raise ConfigError(f"environment {id!r} generates its own tasks and takes no dataset")
        args["dataset"] = dataset
    return _construct(BUILT_IN[id], id, **args)


def _load_user(id: str, args: dict[str, Any], dataset: DatasetSpec | None) -> Environment:
    found = load_object(id)
    if is_stateful(found):
        _bind(found, id, **args)
        return StatefulEnvironment(partial(found, **args), dataset=dataset)
    if inspect.isclass(found) or inspect.isroutine(found):
        if dataset is not None:
            if "dataset" not in inspect.signature(found).parameters:
                raise ConfigError(f"{id} takes no dataset: give it a parameter named dataset")
            args["dataset"] = dataset
        return as_environment(_construct(found, id, **args), id)
    if args or dataset is not None:
        raise ConfigError(f"{id} is an object, so it takes neither args nor a dataset; name a class or a function")
    return as_environment(copy.copy(found), id)


def _bind(factory: Any, what: str, /, *positional: str, **args: Any) -> None:
    try:
        inspect.signature(factory).bind(*positional, **args)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}; its signature is {inspect.signature(factory)}") from error


def _construct(factory: Any, what: str, /, *positional: str, **args: Any) -> Any:
    _bind(factory, what, *positional, **args)
    try:
        return factory(*positional, **args)
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
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


def argument_table(environment: type) -> Iterator[str]:
    yield "| Argument | Default | |"
    yield "|---|---|---|"
    for name, argument in arguments_of(environment).model_fields.items():
        default = shown_default(argument)
        shown = default if default in ("required", "built-in", "unset") else f"`{default}`"
        yield f"| `{name}` | {shown} | {argument.description} |"


def with_tables(page: str) -> str:
    """Return the page with the table below each `<!-- arguments of ID -->` generated again."""
    environments = {**BUILT_IN, **{prefix.rstrip(":"): environment for prefix, environment in PACKAGES.items()}}

    def table(found: re.Match[str]) -> str:
        return found[1] + "".join(f"{line}\n" for line in argument_table(environments[found[2]]))

    return re.sub(r"(<!-- arguments of (\S+) -->\n)(?:\|.*\n)*", table, page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_tables(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
