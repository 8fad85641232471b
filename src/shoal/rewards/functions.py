"""Reward functions as Python users write them, turned into one reward over the rows of a data set.

Three forms: `f(completion, …)` whose other parameters are named after columns, `prompt`, `item` or `row`; TRL's
`f(prompts, completions, **columns)` over lists; and a judge that an item carries itself (`get_reward`, in envs.items).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.errors import ArgumentError
from shoal.rewards.outcome import RewardValueError, call

Function = Callable[..., Any]


@dataclass(frozen=True)
class Scored:
    """What a function may ask about: the item, its columns, the prompt as it was given, and what was answered."""

    item: Any
    columns: Mapping[str, Any]
    prompt: Any
    completion: str


class RewardFunctions:
    """One reward out of several functions. Their weights are read by the pool, as those of an environment."""

    def __init__(self, functions: Sequence[Function], weights: Sequence[float] | None = None) -> None:
        if weights is not None and len(weights) != len(functions):
            raise ArgumentError(f"reward_weights: {len(weights)} weights for {len(functions)} reward functions")
        names = _names(functions)
        self._functions = {name: _adapted(function, name) for name, function in zip(names, functions, strict=True)}
        self.weights = dict(zip(names, weights, strict=True)) if weights is not None else {}

    def check(self, columns: Sequence[str]) -> None:
        """Every parameter must be a column, or have a default."""
        for function in self._functions.values():
            function.check(columns)

    def __call__(self, scored: Scored) -> float | dict[str, float] | None:
        if len(self._functions) == 1 and not self.weights:
            return next(iter(self._functions.values()))(scored)
        parts: dict[str, float] = {}
        for name, function in self._functions.items():
            value = function(scored)
            if value is None and function.none_excludes:
                return None
            if value is not None:
                parts[name] = value
        return parts or None


@dataclass(frozen=True)
class _Plain:
    """`f(completion, …)`, or `f(prompt, completion)` in any order (`by_name`).

    None excludes the rollout: a sum without a part is not comparable within a group.
    """

    function: Function
    name: str
    others: tuple[str, ...]
    optional: tuple[str, ...]
    by_name: bool = False
    none_excludes = True

    def check(self, columns: Sequence[str]) -> None:
        for name in self.others:
            if name not in columns and name not in ("prompt", "item", "row") and name not in self.optional:
                known = ", ".join(dict.fromkeys(["prompt", "row", *columns]))
                raise ArgumentError(
                    f"reward_funcs: {self.name} asks for {name!r}, which is no column of the data; there are {known}"
                )

    def __call__(self, scored: Scored) -> Any:
        known = {**scored.columns, "prompt": scored.prompt, "item": scored.item, "row": scored.item}
        named = {name: known[name] for name in self.others if name in known}
        if self.by_name:
            return call(partial(self.function, completion=scored.completion, **named))
        return call(partial(self.function, **named), scored.completion)


@dataclass(frozen=True)
class _Batched:
    """TRL's form, called with lists of one. As there, None says that this function does not apply."""

    function: Function
    name: str
    takes: tuple[str, ...]
    takes_any: bool
    none_excludes = False

    def check(self, columns: Sequence[str]) -> None: ...

    def __call__(self, scored: Scored) -> Any:
        answer: Any = scored.completion
        if not isinstance(scored.prompt, str):  # messages in, messages out
            answer = [{"role": "assistant", "content": scored.completion}]
        named = {name: [value] for name, value in scored.columns.items() if name not in ("prompts", "completions")}
        named |= {"prompts": [scored.prompt], "completions": [answer]}
        values = call(partial(self.function, **{n: v for n, v in named.items() if self.takes_any or n in self.takes}))
        if not isinstance(values, Sequence) and not hasattr(values, "__len__"):
            raise RewardValueError(
                f"{self.name} returned {type(values).__name__}, not a list of one reward a completion"
            )
        if len(values) != 1:
            raise RewardValueError(f"{self.name} returned {len(values)} rewards for 1 completion")
        return values[0]


def _adapted(function: Any, name: str) -> Any:
    if not callable(function):
        raise ArgumentError(f"reward_funcs: {function!r} is not a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return _Plain(function, name, (), ())
    kinds = {p.kind for p in parameters.values()}
    if "completions" in parameters:
        return _Batched(function, name, tuple(parameters), inspect.Parameter.VAR_KEYWORD in kinds)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if not parameters:
        raise ArgumentError(f"reward_funcs: {name} takes no argument; write it as {name}(completion)")
    first, *rest = parameters.values()
    if first.name == "prompts":
        raise ArgumentError(
            f"reward_funcs: {name} takes prompts but no completions; write {name}(prompts, completions, **columns)"
        )
    by_name = "completion" in parameters and first.name != "completion"
    rest = [first, *(p for p in rest if p.name != "completion")] if by_name else rest
    others = [p for p in rest if p.kind not in variadic]
    optional = tuple(p.name for p in others if p.default is not inspect.Parameter.empty)
    return _Plain(function, name, tuple(p.name for p in others), optional, by_name)


def _names(functions: Sequence[Function]) -> list[str]:
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        again = sum(known == name or known.startswith(f"{name}_") for known in names)
        names.append(f"{name}_{again + 1}" if again else name)
    return names
