"""Advantage estimators that use more than one reward per rollout: parts, turns, tokens, and functions of the user.

Each wraps the normaliser of `core/advantages.py` and implements `core.learn.Advantages`. Made by `build/parts.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.core.advantages import AdvantageNormalizer
from shoal.core.errors import UserCodeError
from shoal.core.types import Rollout, RolloutGroup

Credit = Literal["outcome", "turn", "return", "token"]


def total_reward(rollout: Rollout) -> Hashable:
    """What the rollouts of a group are compared by, to find out whether the group has zero variance."""
    return rollout.reward


def every_reward(rollout: Rollout) -> Hashable:
    """The same for estimators that use the parts, turns or tokens of a reward."""
    parts, turns, tokens = rollout.parts, rollout.turn_rewards, rollout.token_rewards
    return repr((rollout.reward, sorted(parts.items()), turns, tokens))


@dataclass(frozen=True)
class PartAdvantages:
    """GDPO: each part of the reward is normalised by itself, then the parts are added with their weights.

    What shaping and a KL in the reward add to the total counts as one more part with weight 1. With `rescale` the sums
    are divided by their standard deviation over the batch, after subtracting the mean.
    """

    normalizer: AdvantageNormalizer
    rescale: bool = False

    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        parts = [[_parts_of(rollout) for rollout in group.scored] for group in groups]
        sums = [np.zeros(len(group)) for group in parts]
        for name in sorted({name for group in parts for rollout in group for name in rollout}):
            values = [[rollout.get(name, (0.0, 0.0))[0] for rollout in group] for group in parts]
            for at, advantages in enumerate(self.normalizer.estimate(values)):
                weights = [rollout.get(name, (0.0, 1.0))[1] for rollout in parts[at]]
                sums[at] += np.array(weights) * np.array(advantages)
        if self.rescale:
            sums = [np.array(v) for v in AdvantageNormalizer("batch", "batch").estimate([v.tolist() for v in sums])]
        for group, advantages in zip(groups, sums, strict=True):
            for rollout, advantage in zip(group.scored, advantages.tolist(), strict=True):
                rollout.advantage = advantage


def _parts_of(rollout: Rollout) -> dict[str, tuple[float, float]]:
    """Part → (value, weight). A reward without parts is one part; the part without a name is the shaping."""
    assert rollout.reward is not None
    raw = rollout.reward if rollout.raw_reward is None else rollout.raw_reward
    parts = {name: (value, rollout.part_weights.get(name, 1.0)) for name, value in rollout.parts.items()}
    return {**(parts or {"reward": (raw, 1.0)}), "": (rollout.reward - raw, 1.0)}


@dataclass(frozen=True)
class TurnAdvantages:
    """One advantage per turn or token.

    `turn`: the reward of turn k is compared with turn k of the other rollouts. `return`: the same for the discounted
    sum of the rewards from turn k on. `token`: the discounted sum of the token rewards from each token on, compared
    with those of all tokens of the group. What the total has besides the rewards of the turns is added to the last one.
    """

    normalizer: AdvantageNormalizer
    credit: Credit
    discount: float = 1.0

    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        if self.credit == "token":
            self._assign_tokens(groups)
        else:
            self._assign_turns(groups)
        for rollout in (rollout for group in groups for rollout in group.scored):
            values = [value for turn in rollout.token_advantages or [] for value in turn]
            rollout.advantage = float(np.mean(values)) if values else 0.0

    def _assign_turns(self, groups: Sequence[RolloutGroup]) -> None:
        rewards = {rollout.rollout_id: turn_rewards(rollout) for group in groups for rollout in group.scored}
        if self.credit == "return":
            rewards = {name: returns(values, self.discount) for name, values in rewards.items()}
        for rollout in (rollout for group in groups for rollout in group.scored):
            rollout.token_advantages = [[0.0] * len(turn.completion.token_ids) for turn in rollout.turns]
        for k in range(max(map(len, rewards.values()), default=0)):
            # A rollout that alone reaches turn k is compared with nobody: its advantage there is 0.
            there = [[r for r in group.scored if len(r.turns) > k] for group in groups]
            there = [rollouts for rollouts in there if len(rollouts) > 1 or not self._compares_groups]
            values = [[rewards[r.rollout_id][k] for r in rollouts] for rollouts in there if rollouts]
            for rollouts, advantages in zip(filter(None, there), self.normalizer.estimate(values), strict=True):
                for rollout, advantage in zip(rollouts, advantages, strict=True):
                    assert rollout.token_advantages is not None
                    rollout.token_advantages[k] = [advantage] * len(rollout.turns[k].completion.token_ids)

    @property
    def _compares_groups(self) -> bool:
        return "group" in (self.normalizer.mean, self.normalizer.std) or self.normalizer.std == "mean"

    def _assign_tokens(self, groups: Sequence[RolloutGroup]) -> None:
        values = [[v for r in group.scored for v in returns(token_rewards(r), self.discount)] for group in groups]
        known = [at for at, group_values in enumerate(values) if len(group_values) > 1]
        estimates = dict(zip(known, self.normalizer.estimate([values[at] for at in known]), strict=True))
        for at, group in enumerate(groups):
            left = iter(estimates.get(at, [0.0] * len(values[at])))
            for rollout in group.scored:
                rollout.token_advantages = [[next(left) for _ in turn.completion.token_ids] for turn in rollout.turns]


def turn_rewards(rollout: Rollout) -> list[float]:
    """One reward per turn. Without rewards per turn or token, the whole reward belongs to the last turn."""
    given = rollout.turn_rewards
    if given is None and rollout.token_rewards is not None:
        given = [sum(values) for values in rollout.token_rewards]
    values = [0.0] * len(rollout.turns) if given is None else list(given)
    if values and rollout.reward is not None:
        values[-1] += rollout.reward - sum(values)
    return values


def token_rewards(rollout: Rollout) -> list[float]:
    """One reward per sampled token. A reward of a turn belongs to its last token."""
    if rollout.token_rewards is not None:
        values = [value for turn in rollout.token_rewards for value in turn]
    else:
        values = []
        for turn, reward in zip(rollout.turns, turn_rewards(rollout), strict=True):
            count = len(turn.completion.token_ids)
            values += [*([0.0] * (count - 1)), reward] if count else []
    if values and rollout.reward is not None:
        values[-1] += rollout.reward - sum(values)
    return values


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """The discounted sum of the rewards from each position on."""
    result, following = [0.0] * len(rewards), 0.0
    for at in range(len(rewards) - 1, -1, -1):
        result[at] = following = rewards[at] + discount * following
    return result


Estimator = Callable[..., Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class CustomAdvantages:
    """A function written by the user, from rewards to advantages. Its result is checked.

    A function with two parameters also receives the scored rollouts, nested like the rewards: parts, turns and token
    ids. It returns, for each rollout, a number, a list with one number per turn, or a list of lists per turn and token.
    """

    function: Estimator
    name: str = "custom"
    keeps_uniform: bool = False

    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        returned = self._call([group.rewards for group in groups], [group.scored for group in groups])
        self._check_shape(returned, [len(group.scored) for group in groups])
        for group, values in zip(groups, returned, strict=True):
            for rollout, value in zip(group.scored, values, strict=True):
                self._give(rollout, value)

    def estimate(self, groups_rewards: list[list[float]]) -> list[list[float]]:
        """Advantages from rewards alone, for callers that have no rollouts."""
        returned = self._call(groups_rewards, None)
        self._check_shape(returned, [len(group) for group in groups_rewards])
        return [[self._number(value) for value in group] for group in returned]

    def _call(self, rewards: list[list[float]], rollouts: list[list[Rollout]] | None) -> Any:
        if not _takes_two(self.function):
            return self.function(rewards)
        if rollouts is None:
            raise UserCodeError(f"advantage {self.name} needs rollouts, and here are only rewards")
        return self.function(rewards, rollouts)

    def _check_shape(self, returned: Any, sizes: list[int]) -> None:
        try:
            found = [len(group) for group in returned]
        except TypeError as error:
            raise UserCodeError(f"advantage {self.name} returned {type(returned).__name__}: {error}") from error
        if found != sizes:
            raise UserCodeError(f"advantage {self.name} must return one number per reward, grouped like its argument")

    def _give(self, rollout: Rollout, value: Any) -> None:
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            rollout.advantage = self._number(value)
            return
        lengths = [len(turn.completion.token_ids) for turn in rollout.turns]
        if len(value) != len(lengths):
            raise UserCodeError(
                f"advantage {self.name} returned {len(value)} values for a rollout of {len(lengths)} turns"
            )
        spread: list[list[float]] = []
        for of_turn, count in zip(value, lengths, strict=True):
            if isinstance(of_turn, Sequence | np.ndarray) and not isinstance(of_turn, str):
                spread.append([self._number(v) for v in of_turn])
            else:
                spread.append([self._number(of_turn)] * count)
        if [len(turn) for turn in spread] != lengths:
            found = [len(turn) for turn in spread]
            raise UserCodeError(f"advantage {self.name} returned {found} values for turns of {lengths} tokens")
        rollout.token_advantages = spread
        values = [v for turn in spread for v in turn]
        rollout.advantage = float(np.mean(values)) if values else 0.0

    def _number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise UserCodeError(f"advantage {self.name} returned list: {error}") from error
        if not np.isfinite(number):
            raise UserCodeError(f"advantage {self.name} returned a number that is not finite")
        return number


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters) > 1
