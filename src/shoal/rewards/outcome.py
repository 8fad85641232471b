"""Validate what a reward function returned, and compute the total of its named parts.

Called in reward workers. An invalid value raises `RewardValueError`; it is never replaced by 0. `PartCheck` detects
misspelt names in `orch.reward.parts`.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from shoal.core.errors import ConfigError
from shoal.core.types import LossKind, Message, Reward, Score

# Minimum number of scores of every environment before a part counts as missing: a reward may omit a part sometimes.
ENOUGH = 8


class PartCheck:
    """Checks that rewards return every part named in `orch.reward.parts`."""

    def __init__(self, wanted: Iterable[str], environments: Iterable[str]) -> None:
        self._missing = set(wanted)
        self._scored = Counter(dict.fromkeys(environments, 0))
        self._seen: set[str] = set()

    def note(self, env: str, parts: Mapping[str, float]) -> None:
        """Record the parts of one scored rollout. Raises once a part counts as missing."""
        if not self._missing:
            return
        self._seen |= set(parts)
        self._missing -= set(parts)
        self._scored[env] += 1
        if min(self._scored.values()) >= ENOUGH:
            self._refuse()

    def _refuse(self) -> None:
        if not self._missing:
            return
        name = sorted(self._missing)[0]
        near = difflib.get_close_matches(name, sorted(self._seen), n=1)
        there = f"there are {', '.join(sorted(self._seen))}" if self._seen else "the rewards have no parts"
        hint = f"did you mean `{near[0]}`?" if near else "remove it"
        raise ConfigError(f"orch.reward.parts.{name}: no reward returns this part; {there}; {hint}")


LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
MAX_REWARD = 1e6
MAX_PARTS = 64
INVALID_REPLY = "the reward worker sent an invalid reply"


class RewardError(ValueError):
    """A rollout has no reward. The message says why, so it is shown without a line of code and without a traceback."""


class RewardValueError(RewardError):
    """The reward function returned something that is not a reward."""


def last_answer(messages: Sequence[Message]) -> Message:
    """Return the last assistant message, empty if there is none."""
    return next((message for message in reversed(messages) if message.get("role") == "assistant"), {})


def answer_of(messages: Sequence[Message]) -> str:
    """Return the last answer of the model: without reasoning and tool calls, if its chat template has them."""
    return str(last_answer(messages).get("content") or "")


def reasoning_of(messages: Sequence[Message]) -> str:
    """Return the reasoning before the last answer, empty if there is none."""
    return str(last_answer(messages).get("reasoning_content") or "")


def full_text_of(messages: Sequence[Message]) -> str:
    """Return the last answer with its reasoning and tool calls, as the model wrote it without special tokens."""
    answer = last_answer(messages)
    return str(answer.get("text") or answer.get("content") or "")


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a reward function. An `async def` function runs to completion."""
    target = function
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None)):  # noqa: B004
        return asyncio.run(function(*args))
    return function(*args)


def read_score(value: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `Score` for what a reward function returned."""
    if isinstance(value, Reward):
        return _read_reward(value, weights)
    total, parts = read_outcome(value, weights)
    return {"reward": total, "parts": parts}


def _read_reward(value: Reward, weights: Mapping[str, float]) -> dict[str, Any]:
    turns = None if value.turns is None else _numbers(value.turns, "the reward of a turn")
    tokens = None
    if value.tokens is not None:
        tokens = [_numbers(of_turn, "the reward of a token") for of_turn in _listed(value.tokens, "tokens")]
    total, parts = read_outcome(dict(value.parts), weights) if value.parts else (None, {})
    if value.total is not None:
        total = checked_number(value.total, "the reward")
    elif total is None and (turns is not None or tokens is not None):
        sums = turns if turns is not None else [sum(of_turn) for of_turn in tokens or []]
        total = checked_number(sum(sums), "the sum over the turns")
    kinds = None if value.kinds is None else [str(kind) for kind in _listed(value.kinds, "kinds")]
    if kinds is not None and not set(kinds) <= set(LOSS_KINDS):
        raise RewardValueError(f"kinds is {str(kinds)[:80]}; each must be one of {', '.join(LOSS_KINDS)}")
    if value.hint is not None and not isinstance(value.hint, str):
        raise RewardValueError(f"hint is {type(value.hint).__name__}, not a text")
    return {"reward": total, "parts": parts, "turns": turns, "tokens": tokens, "kinds": kinds, "hint": value.hint}


def _listed(values: Any, what: str) -> Sequence[Any]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise RewardValueError(f"{what} is {type(values).__name__}, not a list")
    return values


def _numbers(values: Any, what: str) -> list[float]:
    return [checked_number(value, what) for value in _listed(values, what)]


def read_outcome(value: Any, weights: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """Return (total, parts). The total is the weighted sum of named parts (default weight 1). None stays None."""
    if value is None:
        return None, {}
    if isinstance(value, Mapping):
        if not value or len(value) > MAX_PARTS:
            raise RewardValueError(f"the reward has {len(value)} parts; it needs 1 to {MAX_PARTS}")
        parts = {_part_name(name): checked_number(part, f"part {name!r}") for name, part in value.items()}
        total = sum(part * weights.get(name, 1.0) for name, part in parts.items())
        return checked_number(total, "the weighted sum"), parts
    return checked_number(value, "the reward"), {}


def _part_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 64:
        raise RewardValueError(f"reward parts need short text names, not {str(name)[:64]!r}")
    return name


def parse_reply(body: bytes) -> list[Score]:
    """Parse a worker's reply: one score per rollout, or one error for all. Raises ValueError if it is invalid.

    The reply is untrusted: reward code could have written it.
    """
    try:
        fields = json.loads(body)
        status, seconds = fields["status"], float(fields.get("seconds", 0.0))
        if status in ("error", "timeout"):
            text = "".join(c for c in str(fields.get("traceback", "")) if c.isprintable() or c == "\n")
            return [Score(status, error=str(fields.get("error")), seconds=seconds, traceback=text)]
        if status != "ok":
            raise ValueError(status)
        outcomes = fields.get("group", [fields])
        return [_parse_score(outcome, seconds / len(outcomes)) for outcome in outcomes]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        raise ValueError(INVALID_REPLY) from None


def _parse_score(outcome: Mapping[str, Any], seconds: float) -> Score:
    reward, parts = outcome.get("reward"), outcome.get("parts") or {}
    turns, tokens, kinds = (outcome.get(name) for name in ("turns", "tokens", "kinds"))
    return Score(
        "ok",
        None if reward is None else checked_number(reward, "the reward"),
        {str(name): checked_number(part, "a part") for name, part in parts.items()},
        seconds=seconds,
        turns=None if turns is None else _numbers(turns, "the reward of a turn"),
        tokens=None if tokens is None else [_numbers(of_turn, "the reward of a token") for of_turn in tokens],
        hint=None if outcome.get("hint") is None else str(outcome["hint"]),
        kinds=None if kinds is None else [LOSS_KINDS[LOSS_KINDS.index(kind)] for kind in kinds],
    )


def checked_number(value: Any, what: str) -> float:
    """Return a finite number within ±MAX_REWARD, or raise RewardValueError."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise RewardValueError(f"{what} is a coroutine: declare the reward 'async def', or await inside it")
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise RewardValueError(f"{what} is {str(value)[:80]!r} of type {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardValueError(f"{what} is {number}, not a finite number")
    if abs(number) > MAX_REWARD:
        raise RewardValueError(f"{what} is {number:g}; rewards must lie within ±{MAX_REWARD:g}")
    return number
