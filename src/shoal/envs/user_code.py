"""Load user code by name (`module:attribute` or `path/to/file.py:attribute`) and check the tasks it returns."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.core.errors import ConfigError, DataError, ShoalError, UserCodeError
from shoal.core.types import Task
from shoal.envs.base import TaskList


def load_object(name: str) -> Any:
    """Return the object that `module:attribute` names. Modules in the current folder are found too."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{name!r} does not name code; write module:attribute, e.g. my_env:MyEnvironment")
    module = _load_module(module_name, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [key for key in vars(module) if not key.startswith("_")], n=1)
            raise ConfigError(f"{module_name} has no {attribute!r}" + (f"; nearest is {near[0]!r}" if near else ""))
        found = getattr(found, part)
    return found


def load_function(name: str) -> Callable[..., Any]:
    """Load a function that the loop calls. Its exceptions become UserCodeError, not a bug report."""
    function = load_object(name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShoalError:
            raise
        except Exception as error:
            raise UserCodeError(f"{name} raised {type(error).__name__}: {error}") from error

    return call


def load_filter(name: str) -> Callable[..., bool]:
    """Load a function that must return a bool. A string (always true) or None (always false) is an error."""
    function = load_function(name)

    @wraps(function)
    def call(*args: Any) -> bool:
        answer = function(*args)
        if type(answer).__name__ not in ("bool", "bool_"):  # bool_: NumPy
            raise UserCodeError(f"{name} returned {answer!r:.80}; return True or False")
        return bool(answer)

    return call


def checked_tasks(label: str, tasks: Callable[[str], Any]) -> Callable[[str], Sequence[Task]]:
    """Wrap an environment's `tasks`: exceptions and invalid return values become one-line errors with its name."""

    def read(split: str) -> Sequence[Task]:
        place = f"orch.env: {label}: tasks({split!r})"
        found = _call_user(place, lambda: tasks(split))
        if isinstance(found, list):
            for index, task in enumerate(found):
                _checked_task(f"{place}[{index}]", task)
            return found
        if not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
            raise DataError(f"{place} returned {type(found).__name__}; return a list of tasks, as shoal.envs.ask makes")
        return CheckedTasks(found, place)

    return read


class CheckedTasks(TaskList):
    """Checks each task on access. Other attributes are those of the environment's own sequence."""

    def __init__(self, found: Any, place: str) -> None:
        super().__init__(len(found), lambda index: _made_task(f"{place}[{index}]", found, index))
        self._found = found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._found, name)


def _made_task(place: str, tasks: Any, index: int) -> Task:
    return _checked_task(place, _call_user(place, lambda: tasks[index]))


def _call_user(place: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:  # the environment is the user's code
        raise DataError(f"{place} raised {type(error).__name__}: {error}") from error


def _checked_task(place: str, task: Any) -> Task:
    if not hasattr(task, "messages") or not hasattr(task, "data"):
        raise DataError(f"{place} is {type(task).__name__}, not a task; make one with shoal.envs.ask")
    try:
        for message in task.messages:
            str(message.get("content") or "").encode()
    except UnicodeEncodeError:
        raise DataError(f"{place} contains a lone surrogate, which is not valid text; remove it") from None
    except (TypeError, AttributeError):
        raise DataError(f"{place}: messages must be a list of {{role, content}}") from None
    return task


def _load_module(module_name: str, name: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _load_file(Path(module_name).expanduser())
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # last, so that a local file never shadows an installed package
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {module_name!r} for {name!r}, neither installed nor in this folder"
            ) from error
        raise ConfigError(f"{name}: importing it needs {error.name!r}, which is not installed") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything when imported
        raise ConfigError(f"{name}: importing it raised {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    module_name = f"shoal_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
