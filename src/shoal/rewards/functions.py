"""Adapts reward functions to one reward. Used by `GRPOTrainer`, the recipe, `orch.reward.function` and `dataset`.

A function has one of four forms, recognised by its parameter names, everywhere in the same way:
`f(completion, …)` takes columns of the row, `prompt` or `row` by name; `f(task, messages)` takes the task and the
conversation; `f(task, conversations)` takes all conversations of a group; `f(prompts, completions, **columns)` is TRL's
form, which takes lists over the whole group. A first parameter with another name takes the completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.core.errors import ArgumentError
from shoal.core.types import Message, Task
from shoal.rewards.outcome import RewardValueError, answer_of, call, full_text_of, reasoning_of

Function = Callable[..., Any]
FORMS = (
    "write f(completion, …) with columns by name, f(task, messages), f(task, conversations), or TRL's "
    "f(prompts, completions, **columns)"
)
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

_GIVEN = ("prompt", "item", "row", "reasoning", "full_text")  # parameters that need no column
_GIVEN_TO_GROUPS = ("prompts", "completions", "environments")  # the same for TRL's form


@dataclass(frozen=True)
class RewardInput:
    """The values that a reward function can take as parameters."""

    item: Any
    columns: Mapping[str, Any]
    prompt: Any
    completion: str
    task: Task | None = None
    messages: Sequence[Message] = ()


def input_of(task: Task, messages: Sequence[Message]) -> RewardInput:
    """Return the input for an environment's task: its data are the columns, a single user message is a text prompt."""
    single = len(task.messages) == 1 and task.messages[0].get("role") == "user"
    prompt = task.messages[0]["content"] if single else task.messages
    return RewardInput(task.data, task.data, prompt, answer_of(messages), task, messages)


class RewardFunctions:
    """One reward made of several functions. The pool reads `weights`, as it does for an environment.

    `label` starts the error messages.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        weights: Sequence[float] | None = None,
        *,
        label: str = "reward_funcs",
    ) -> None:
        if weights is not None and len(weights) != len(functions):
            raise ArgumentError(f"reward_weights: {len(weights)} weights for {len(functions)} reward functions")
        names = _names(functions)
        self._functions = {
            name: _adapted(function, name, label) for name, function in zip(names, functions, strict=True)
        }
        self.weights = dict(zip(names, weights, strict=True)) if weights is not None else {}

    @property
    def takes_groups(self) -> bool:
        """True if a function takes the whole group, so that rewards are computed by `score_group`."""
        return any(isinstance(function, _Grouped) for function in self._functions.values())

    @property
    def keep_env(self) -> list[str]:
        """Environment variables with secrets that the functions read, such as the key of a judge."""
        return [name for f in self._functions.values() for name in getattr(f.function, "keep_env", ())]

    def prepare(self) -> None:
        for function in self._functions.values():
            if callable(prepare := getattr(function.function, "prepare", None)):
                prepare()

    def columns(self) -> list[str]:
        """Return the columns that the functions require by name."""
        return [name for function in self._functions.values() for name in function.required()]

    def check(self, columns: Sequence[str]) -> None:
        """Raise unless every parameter is a column or has a default."""
        for function in self._functions.values():
            for name in function.required():
                if name not in columns:
                    known = ", ".join(dict.fromkeys(["prompt", "row", *columns]))
                    raise ArgumentError(
                        f"{function.label}: {function.name} has a parameter {name!r}, which is not a column; "
                        f"columns are {known}; {FORMS}"
                    )

    def __call__(self, scored: RewardInput) -> Any:
        return self.score_group([scored])[0]

    def score_group(self, group: Sequence[RewardInput]) -> list[Any]:
        """Return one reward per rollout of a group: a number, named parts, or None."""
        grouped = {name: f.score(group) for name, f in self._functions.items() if isinstance(f, _Grouped)}
        return [
            self._combine(scored, {name: values[index] for name, values in grouped.items()})
            for index, scored in enumerate(group)
        ]

    def _combine(self, scored: RewardInput, grouped: Mapping[str, Any]) -> Any:
        parts: dict[str, Any] = {}
        for name, function in self._functions.items():
            value = grouped[name] if isinstance(function, _Grouped) else function(scored)
            if len(self._functions) == 1 and not self.weights:
                return value
            if value is None and not isinstance(function, _Grouped):
                return None  # a sum without a part is not comparable within a group
            if value is not None:  # TRL: None means that the function does not apply
                parts[name] = value
        return parts or None


@dataclass(frozen=True)
class _Conversation:
    """`f(task, messages)`, in any order."""

    function: Function
    name: str
    label: str

    def required(self) -> list[str]:
        return []

    def __call__(self, scored: RewardInput) -> Any:
        return call(partial(self.function, task=scored.task, messages=scored.messages))


@dataclass(frozen=True)
class _Plain:
    """`f(completion, …)`, or `f(prompt, completion)` in any order (`by_name`)."""

    function: Function
    name: str
    label: str
    others: Mapping[str, bool]  # parameter → whether it is required
    by_name: bool

    def required(self) -> list[str]:
        return [name for name, needed in self.others.items() if needed and name not in _GIVEN]

    def __call__(self, scored: RewardInput) -> Any:
        known = {"reasoning": reasoning_of(scored.messages), "full_text": full_text_of(scored.messages)}
        known |= {**scored.columns, "prompt": scored.prompt, "item": scored.item, "row": scored.item}
        named = {name: known[name] for name in self.others if name in known}
        if self.by_name:
            return call(partial(self.function, completion=scored.completion, **named))
        return call(partial(self.function, **named), scored.completion)


@dataclass(frozen=True)
class _Grouped:
    """TRL's form: one call for the whole group."""

    function: Function
    name: str
    label: str
    takes: Mapping[str, bool]  # parameter → whether it is required
    takes_any: bool

    def required(self) -> list[str]:
        return [name for name, needed in self.takes.items() if needed and name not in _GIVEN_TO_GROUPS]

    def arguments(self, group: Sequence[RewardInput]) -> dict[str, Any]:
        # TRL passes messages as completions if the prompts are messages: all that follow the prompt.
        answers = [
            scored.completion
            if isinstance(scored.prompt, str)
            else list(scored.messages[len(scored.prompt) :]) or [{"role": "assistant", "content": scored.completion}]
            for scored in group
        ]
        named: dict[str, list[Any]] = {
            name: [scored.columns[name] for scored in group]
            for name in group[0].columns
            if name not in ("prompts", "completions")
        }
        named |= {"prompts": [scored.prompt for scored in group], "completions": answers}
        return {name: value for name, value in named.items() if self.takes_any or name in self.takes}

    def score(self, group: Sequence[RewardInput]) -> list[Any]:
        values = call(partial(self.function, **self.arguments(group)))
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
            raise RewardValueError(
                f"{self.name} returned {type(values).__name__}, not a list with one reward per completion"
            )
        if len(values) != len(group):
            raise RewardValueError(f"{self.name} returned {len(values)} rewards for {len(group)} completions")
        return list(values)


@dataclass(frozen=True)
class _GroupedConversations(_Grouped):
    """`f(task, conversations)`: one call for the whole group."""

    def arguments(self, group: Sequence[RewardInput]) -> dict[str, Any]:
        return {"task": group[0].task, "conversations": [scored.messages for scored in group]}


def _adapted(function: Any, name: str, label: str) -> _Conversation | _Plain | _Grouped:
    if not callable(function):
        raise ArgumentError(f"{label}: {function!r} is not a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in without a signature
        return _Plain(function, name, label, {}, False)
    parameters = signature.parameters
    needed = {p.name: p.default is inspect.Parameter.empty for p in parameters.values() if p.kind not in _VARIADIC}
    if "completions" in parameters:
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return _Grouped(function, name, label, needed, takes_any)
    if "completion" not in parameters and {"task", "messages", "conversations"} & set(parameters):
        grouped = "conversations" in parameters
        try:
            signature.bind(task=None, **{"conversations" if grouped else "messages": None})
        except TypeError:
            raise ArgumentError(f"{label}: {name}{signature} is not a reward function; {FORMS}") from None
        return (
            _GroupedConversations(function, name, label, {}, False) if grouped else _Conversation(function, name, label)
        )
    if "prompts" in parameters or not parameters:
        raise ArgumentError(f"{label}: {name}{signature} takes no completion; {FORMS}")
    first = next(iter(parameters))
    by_name = first != "completion" and "completion" in parameters
    taken = "completion" if by_name else first
    others = {name: required for name, required in needed.items() if name != taken}
    return _Plain(function, name, label, others, by_name)


def _names(functions: Sequence[Function]) -> list[str]:
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        again = sum(known == name or known.startswith(f"{name}_") for known in names)
        names.append(f"{name}_{again + 1}" if again else name)
    return names


class FunctionReward:
    """The methods `reward` and `reward_group` of an environment that a reward function scores."""

    def __init__(self, functions: RewardFunctions) -> None:
        self._functions = functions
        self.keep_env = functions.keep_env
        self.prepare = functions.prepare
        self.reward_group = self._reward_group if functions.takes_groups else None

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        return self._functions(input_of(task, messages))

    def _reward_group(self, task: Task, group: Sequence[Sequence[Message]]) -> list[Any]:
        return self._functions.score_group([input_of(task, messages) for messages in group])
