"""Stateful environments: one object per rollout, in a process of its own.

The object has `reset`, tools (its other public methods), and optionally `get_reward` or `reward`, and `close`. The
registry wraps its class in `StatefulEnvironment`. `StatefulEpisode` runs in the main process, and `LiveEpisode`, which
holds the object, in the worker process. An object with `list_tools` and `call_tool` has these tools instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.types import Message, Score, Task
from shoal.envs.base import TaskList, _Base, as_message
from shoal.envs.datasets import DatasetSpec, read_splits, to_messages
from shoal.envs.items import ItemError, Items, columns_of
from shoal.envs.tools import as_text, calls_of
from shoal.rewards.functions import RewardFunctions, RewardInput
from shoal.rewards.outcome import answer_of

if TYPE_CHECKING:
    from shoal.rewards.environment_process import EnvironmentProcess
    from shoal.rewards.pool import RewardPool

RESERVED = frozenset(("reset", "get_reward", "reward", "close", "tasks", "list_tools", "call_tool"))
GENERATED = {"train": 1000, "eval": 100}  # tasks of an environment that makes them in `reset`
Factory = Callable[[], Any]


class EndEpisode(Exception):
    """A tool raises it to end the conversation. Its text is the result of the tool, and the model gets no more turn."""


class BrokenEnvironment(Exception):
    """A tool raises it if the environment cannot go on. The rollout is an error, and is not trained."""


@dataclass(frozen=True, slots=True)
class StatefulTask(Task):
    split: str = "train"
    index: int = 0


def is_stateful(kind: Any) -> bool:
    """True for a class whose objects hold the state of one rollout: with `reset`, and not an `Environment` itself."""
    if not inspect.isclass(kind) or not callable(getattr(kind, "reset", None)) or hasattr(kind, "start"):
        return False
    reward = getattr(kind, "reward", None)
    return not (inspect.isfunction(reward) and "task" in inspect.signature(reward).parameters)


def tools_of(kind: type) -> list[str]:
    """The methods of a class that are tools."""
    # Of the class: getattr on the object would evaluate its properties.
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in methods if not name.startswith("_") and name not in RESERVED]


def has_reward(kind: type) -> bool:
    return any(inspect.isfunction(getattr(kind, name, None)) for name in ("get_reward", "reward"))


def check_class(kind: type) -> None:
    """Raise unless the methods of a class can be tools: get_json_schema needs type hints and documented arguments."""
    if hasattr(kind, "list_tools"):
        return
    if not (names := tools_of(kind)):
        raise ConfigError(f"{kind.__name__}: has no tools; give it public methods with type hints and docstrings")
    for name in names:
        _schema(kind, name)


@cache
def _schema(kind: type, name: str) -> dict[str, Any]:
    from transformers.utils import chat_template_utils

    # It would import torch, only to know torch.Tensor. Reward workers must be forked before that.
    torch_available, chat_template_utils.is_torch_available = chat_template_utils.is_torch_available, lambda: False
    try:
        function = getattr(kind, name)
        # Of a method, because a function would have the parameter self.
        own = isinstance(inspect.getattr_static(kind, name), staticmethod)
        return chat_template_utils.get_json_schema(function if own else MethodType(function, kind))
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"{kind.__name__}.{name} cannot be a tool: {first}; write type hints and a Google-style docstring with "
            "Args, or start the name with an underscore"
        ) from None
    finally:
        chat_template_utils.is_torch_available = torch_available


class StatefulEnvironment(_Base):
    """Tasks and episodes of a class of stateful environments.

    The tasks come from `tasks(split)` of the class, a data set, or `rows` per split. Without any, `reset` makes them.
    With several `factories`, the column `environment` of a task selects one.
    """

    def __init__(
        self,
        factories: Factory | Mapping[str, Factory],
        *,
        name: str = "",
        dataset: DatasetSpec | None = None,
        rows: Mapping[str, Items] | None = None,
        functions: RewardFunctions | None = None,
        max_turns: int | None = None,
    ) -> None:
        self._factories: dict[Any, Factory] = {**factories} if isinstance(factories, Mapping) else {None: factories}
        kinds = [_class_of(factory) for factory in self._factories.values()]
        self._kind = kinds[0] or object
        for kind in kinds:
            if kind is not None and not is_stateful(kind):
                raise ConfigError(f"{kind.__name__}: has no method reset, which starts an episode")
            if kind is not None:
                check_class(kind)
        self.name = name or self._kind.__name__
        highest = {getattr(kind, "max_reward", None) for kind in kinds}
        self.max_reward = highest.pop() if len(highest) == 1 else None  # of every task; unknown if they differ
        self.weights = {**_weights_of(kinds), **(functions.weights if functions else {})}
        self.keep_env = [
            *(functions.keep_env if functions else ()),
            *(n for k in kinds for n in getattr(k, "keep_env", ())),
        ]
        self._max_turns = max_turns
        self.kind = " or ".join(kind.__name__ for kind in kinds if kind is not None)
        self.needs_isolation = any(getattr(kind, "needs_isolation", False) for kind in kinds)
        self.pool: RewardPool | None = None
        self._functions = functions
        self._dataset = dataset
        self._found = None if rows is None else {split: _of_items(rows[split], split, self.name) for split in rows}
        if functions is None and not any(kind is None or has_reward(kind) for kind in kinds):
            self.reward = MethodType(_Base.reward, self)  # scored by orch.reward.function

    @property
    def tools(self) -> list[str]:
        """Names of the tools that are methods, without those that an object lists when it runs."""
        kinds = [kind for factory in self._factories.values() if (kind := _class_of(factory)) is not None]
        return [name for kind in kinds if not hasattr(kind, "list_tools") for name in tools_of(kind)]

    @property
    def scores_itself(self) -> bool:
        """False if a reward function scores the conversation in a reward worker."""
        return getattr(self.reward, "__func__", None) is StatefulEnvironment.reward

    def tasks(self, split: str) -> Sequence[StatefulTask]:
        if self._found is None and self._dataset is not None:
            splits = read_splits(self._dataset, (), lambda row: _row_task(row, "", 0))
            self._found = {name: _numbered(tasks, name) for name, tasks in splits.items()}
        if self._found is not None:
            return self._found.get(split, [])
        if callable(getattr(self._kind, "tasks", None)):
            return _numbered(self._kind.tasks(split), split)  # type: ignore[attr-defined]
        make = lambda index: StatefulTask([{"role": "user", "content": ""}], {}, split, index)  # noqa: E731
        return TaskList(GENERATED.get(split, 0), make)  # type: ignore[return-value]

    def prepare(self) -> None:
        """Import what makes schemas, and what the reward functions need, once, before the workers fork."""
        import transformers.utils.chat_template_utils  # noqa: F401

        if self._functions is not None:
            self._functions.prepare()

    def start(self, task: Task) -> StatefulEpisode:
        assert isinstance(task, StatefulTask)
        return StatefulEpisode(self, task)

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        raise RuntimeError(f"{self.name} is scored in its own process")

    def live(self, task: StatefulTask) -> LiveEpisode:
        """In the worker process: the object of one rollout."""
        seed = f"{self.name}/{task.split}/{task.index}"
        return LiveEpisode(self._factory_of(task), task, self._functions, seed)

    def max_turns_of(self, task: StatefulTask) -> int | None:
        """The largest number of answers in a rollout of the task."""
        if self._max_turns is not None:
            return self._max_turns
        return getattr(_class_of(self._factory_of(task)), "max_turns", None)

    def _factory_of(self, task: StatefulTask) -> Factory:
        name = task.data.get("environment") if None not in self._factories else None
        if name not in self._factories:
            raise DataError(f"the task has environment {name!r}; there are {', '.join(map(str, self._factories))}")
        return self._factories[name]


def _weights_of(kinds: Sequence[type | None]) -> dict[str, float]:
    """Weights of the parts of all classes. A part has one weight, because parts are logged and added by name."""
    weights: dict[str, float] = {}
    for kind in kinds:
        for part, weight in (getattr(kind, "weights", None) or {}).items():
            if weights.setdefault(part, weight) != weight:
                assert kind is not None
                raise ConfigError(
                    f"{kind.__name__}.weights: the part {part!r} has weight {weight:g} here and {weights[part]:g} in "
                    "another environment; use the same weight in both, or rename one of the parts"
                )
    return weights


def _class_of(factory: Factory) -> type | None:
    target = factory.func if isinstance(factory, partial) else factory
    return target if inspect.isclass(target) else None


def _row_task(row: Any, split: str, index: int) -> StatefulTask:
    prompt = row.get("prompt")
    messages = to_messages(prompt) if prompt is not None else [{"role": "user", "content": ""}]
    return StatefulTask(messages, dict(row), split, index)


def _of_items(items: Items, split: str, name: str) -> list[StatefulTask]:
    tasks = []
    for index in range(len(items)):
        try:
            tasks.append(_row_task(columns_of(items[index]), split, index))
            json.dumps(tasks[-1].data)  # compared when a run is resumed
        except (DataError, TypeError, ValueError) as error:
            raise ItemError(name, split, f"item {index}: {error}") from error
    if split == "train" and not tasks:
        raise ItemError(name, split, "is empty; provide at least one item")
    return tasks


def _numbered(tasks: Sequence[Task], split: str) -> list[StatefulTask]:
    return [StatefulTask(list(task.messages), dict(task.data), split, index) for index, task in enumerate(tasks)]


class StatefulEpisode:
    """One rollout, in the main process. Used inside `running`."""

    def __init__(self, environment: StatefulEnvironment, task: StatefulTask) -> None:
        self.messages: list[Message] = [dict(message) for message in task.messages]
        self.tools: list[dict[str, Any]] = []
        self._environment = environment
        self._task = task
        self._turns = 0
        self._process: EnvironmentProcess | None = None

    @contextlib.asynccontextmanager
    async def running(self, phase: Any) -> AsyncIterator[None]:
        environment, task = self._environment, self._task
        assert environment.pool is not None, "a stateful environment needs a started pool"
        async with environment.pool.environment(environment.name, task.split, task.index, phase) as process:
            self._process = process
            self.tools = process.opened["tools"]
            self._observe(process.opened["observation"])
            yield

    def _observe(self, observation: str | None) -> None:
        """Append the first observation to the last user message, as TRL does."""
        if not self.messages or self.messages[-1].get("role") != "user":
            self.messages.append({"role": "user", "content": ""})
        content = str(self.messages[-1].get("content") or "") + (observation or "")
        if not content:
            raise DataError("the task has no prompt and reset returned no text; return the first observation")
        self.messages[-1] = {**self.messages[-1], "content": content}

    async def reply(self, answer: Message | str) -> list[Message] | None:
        assert self._process is not None, "the episode is not running"
        self._turns += 1
        message = as_message(answer)
        self.messages.append(message)
        calls = calls_of(message)
        if not calls or self._turns == self._environment.max_turns_of(self._task):
            return None
        found = await self._process.call_tools([{"name": call.name, "arguments": call.arguments} for _, call in calls])
        following: list[Message] = [
            {"role": "tool", "tool_call_id": call_id, "name": call.name, "content": str(content)}
            for (call_id, call), content in zip(calls, found["results"], strict=True)
        ]
        self.messages.extend(following)
        return None if found["over"] else following

    async def score(self, messages: Sequence[Message]) -> Score | None:
        environment = self._environment
        assert self._process is not None and environment.pool is not None, "the episode is not running"
        if not environment.scores_itself:
            return None
        return environment.pool.noted(environment.name, [await self._process.score(messages)])[0]


class LiveEpisode:
    """The object of one rollout, in its process. `async def` methods share one event loop."""

    def __init__(self, factory: Factory, task: StatefulTask, functions: RewardFunctions | None, seed: str) -> None:
        self._factory = factory
        self._task = task
        self._functions = functions
        self._seed = seed
        self._runner: asyncio.Runner | None = None
        self._object: Any = None
        self._tools: list[str] | None = None  # None = the object lists its tools

    def open(self) -> dict[str, Any]:
        """Create the object and reset it. All rollouts of a task have the same random numbers."""
        random.seed(self._seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))
        self._object = self._factory()
        observation = self._await(self._object.reset(**self._columns()))
        if observation is not None and not isinstance(observation, str):
            raise DataError(f"reset returned {type(observation).__name__}; return text or None")
        if hasattr(self._object, "list_tools"):
            return {"observation": observation, "tools": list(self._await(self._object.list_tools()))}
        self._tools = tools_of(type(self._object))
        return {"observation": observation, "tools": [_schema(type(self._object), name) for name in self._tools]}

    def _columns(self) -> dict[str, Any]:
        """The data of the task, as far as `reset` takes it. As in TRL, the column `environment` only selects."""
        data = {name: value for name, value in self._task.data.items() if name != "environment"}
        parameters = inspect.signature(self._object.reset).parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return data
        return {p.name: data[p.name] for p in parameters if p.name in data}

    def call_tools(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The results of the calls of one turn, in order. An exception of a tool is a message for the model."""
        results: list[str] = []
        for call in calls:
            try:
                results.append(as_text(self._call(call["name"], call["arguments"])))
            except EndEpisode as end:
                results += [str(end)] + ["the episode is over"] * (len(calls) - len(results) - 1)
                return {"results": results, "over": True}
            except BrokenEnvironment:
                raise
            except Exception as error:  # user code, called with arguments written by the model
                results.append(f"error: {type(error).__name__}: {error}")
        return {"results": results, "over": False}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if self._tools is None:
            return self._await(self._object.call_tool(name, dict(arguments)))
        if name not in self._tools:
            return f"error: there is no tool {name!r}"
        return self._await(getattr(self._object, name)(**arguments))

    def reward(self, messages: Sequence[Message]) -> Any:
        own = [name for name in ("get_reward", "reward") if inspect.isfunction(getattr(type(self._object), name, None))]
        value = self._await(getattr(self._object, own[0])()) if own else None
        if self._functions is None:
            return value
        columns = {**self._task.data, "environments": self._object}
        prompt = columns.get("prompt", self._task.messages)
        scored = RewardInput(columns, columns, prompt, answer_of(messages), self._task, messages)
        found = self._functions(scored)
        if not own:
            return found
        # None excludes the rollout; from all functions of TRL's form it means that none of them applies.
        if value is None or (found is None and not self._functions.takes_groups):
            return None
        parts = dict(found) if isinstance(found, Mapping) else {} if found is None else {"reward": found}
        return {**parts, **(value if isinstance(value, Mapping) else {type(self._object).__name__: value})}

    def close(self) -> None:
        """Close the object if it has a method `close`, also if `reset` failed."""
        try:
            if callable(close := getattr(self._object, "close", None)):
                self._await(close())
        finally:
            if self._runner is not None:
                self._runner.close()

    def _await(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await value

        return self._runner.run(wait())
