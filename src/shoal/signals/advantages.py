"""Advantage estimators: one normaliser in float64 NumPy, for totals, parts, turns or tokens, and functions of the user.

The settings of the normaliser cover GRPO, Dr.GRPO, RLOO, LitePPO, REINFORCE++ and MaxRL. Each estimator implements
`core.learn.Advantages`; `build/parts.py` chooses one. The learner calls it once per step with all kept groups, so that
batch statistics include the whole step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.core.advantages import is_uniform
from shoal.core.errors import UserCodeError
from shoal.core.losses import keeps_uniform
from shoal.core.types import Rollout, RolloutGroup

Statistic = Literal["group", "batch", "none"]
Scale = Literal["group", "batch", "none", "mean"]
STATISTICS = ("group", "batch", "none")  # the population of an advantage's mean and std
ADVANTAGE_EPS = 1e-6
Credit = Literal["outcome", "turn", "return", "token"]


def total_reward(rollout: Rollout) -> Hashable:
    """What the rollouts of a group are compared by, to find out whether the group has zero variance."""
    return rollout.reward


def every_reward(rollout: Rollout) -> Hashable:
    """The same for estimators that use the parts, turns or tokens of a reward."""
    parts, turns, tokens = rollout.parts, rollout.turn_rewards, rollout.token_rewards
    return repr((rollout.reward, sorted(parts.items()), turns, tokens))


@dataclass(frozen=True)
class AdvantageNormalizer:
    """A = (r - mean) / (std + eps), with the unbiased (N-1) standard deviation.

    Example: the group rewards [0, 1, 1, 0] give ±.5 with the group mean only, 4/3 of that with leave_one_out, and ±.866
    with group mean and group std. `std: mean` is MaxRL: A = (r - mean) / mean.
    """

    mean: Statistic = "group"
    std: Scale = "group"
    leave_one_out: bool = False
    eps: float = ADVANTAGE_EPS

    def __post_init__(self) -> None:
        for name, choices in (("mean", STATISTICS), ("std", (*STATISTICS, "mean"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"advantage.{name} must be one of {', '.join(choices)}, not {getattr(self, name)}")
        if self.std == "mean" and (self.mean != "group" or self.leave_one_out):
            raise ValueError("advantage.std: mean needs advantage.mean: group without leave_one_out")
        if self.leave_one_out and self.mean != "group":
            raise ValueError(f"advantage.leave_one_out needs advantage.mean: group, not {self.mean}")

    @property
    def keeps_uniform(self) -> bool:
        """Whether zero-variance groups are trained."""
        return keeps_uniform(self.mean, self.std)

    @property
    def compares_groups(self) -> bool:
        return "group" in (self.mean, self.std) or self.std == "mean"

    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        """Set the advantage of every scored rollout."""
        estimates = self.estimate([group.rewards for group in groups])
        for group, advantages in zip(groups, estimates, strict=True):
            for rollout, advantage in zip(group.scored, advantages, strict=True):
                rollout.advantage = advantage

    def estimate(self, groups_rewards: list[list[float]]) -> list[list[float]]:
        """One advantage per reward, in the same nesting."""
        groups = [_checked(rewards, self.mean, self.std) for rewards in groups_rewards]
        if not groups:
            return []
        if self.std == "mean":
            return [_by_mean(group).tolist() for group in groups]
        batch = np.concatenate(groups)
        return [(self._centre(group, batch) / self._scale(group, batch)).tolist() for group in groups]

    def estimate_known(self, groups_rewards: list[list[float | None]]) -> list[list[float]]:
        """The same where some rewards are None. These, and a reward that is alone in its group if groups are compared,
        get the advantage 0."""
        known = [[value for value in group if value is not None] for group in groups_rewards]
        used = [len(group) > (1 if self.compares_groups else 0) for group in known]
        estimates = iter(self.estimate([group for group, is_used in zip(known, used, strict=True) if is_used]))
        result = []
        for group, is_used in zip(groups_rewards, used, strict=True):
            values = iter(next(estimates) if is_used else [0.0] * len(group))
            result.append([0.0 if value is None else next(values) for value in group])
        return result

    def _centre(self, group: np.ndarray, batch: np.ndarray) -> np.ndarray:
        if self.mean == "none":
            return group
        population = group if self.mean == "group" else batch
        if is_uniform(population.tolist()):
            return np.zeros_like(group)  # exactly 0: the mean of equal numbers may be rounded
        centred = group - population.mean()
        return centred * len(group) / (len(group) - 1) if self.leave_one_out else centred

    def _scale(self, group: np.ndarray, batch: np.ndarray) -> float:
        if self.std == "none":
            return 1.0
        population = group if self.std == "group" else batch
        spread = 0.0 if is_uniform(population.tolist()) else float(population.std(ddof=1))
        return spread + self.eps


def _by_mean(group: np.ndarray) -> np.ndarray:
    """MaxRL. A group with a mean <= 0 has no success to weigh and gets 0. For rewards >= 0, r <= N·mean bounds the
    advantage by N - 1; the same bound is applied to groups with negative rewards, whose mean may be close to 0."""
    mean = group.mean()
    if mean <= 0 or is_uniform(group.tolist()):
        return np.zeros_like(group)
    bound = len(group) - 1
    return ((group - mean) / mean).clip(-bound, bound)


def _checked(rewards: Sequence[float], mean: Statistic, std: Scale) -> np.ndarray:
    group = np.asarray(rewards, dtype=np.float64)
    if group.ndim != 1 or not np.isfinite(group).all():
        raise ValueError(f"rewards of a group must be finite numbers: {rewards}")
    if "group" in (mean, std) and len(group) < 2:
        raise ValueError("group statistics need at least two scored rollouts; drop smaller groups first")
    return group


@dataclass(frozen=True)
class PartAdvantages:
    """GDPO: each part of the reward is normalised by itself, then the parts are added with their weights.

    A part is compared among the rollouts that have it. What shaping and a KL in the reward add to the total counts as
    one more part with weight 1. With `rescale` the sums are divided by their standard deviation over the batch, after
    subtracting the mean.
    """

    normalizer: AdvantageNormalizer
    rescale: bool = False

    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        parts = [[_parts_of(rollout) for rollout in group.scored] for group in groups]
        sums = [np.zeros(len(group)) for group in parts]
        for name in sorted({name for group in parts for rollout in group for name in rollout}):
            values = [[rollout[name][0] if name in rollout else None for rollout in group] for group in parts]
            for at, advantages in enumerate(self.normalizer.estimate_known(values)):
                weights = [rollout.get(name, (0.0, 1.0))[1] for rollout in parts[at]]
                sums[at] += np.array(weights) * np.array(advantages)
        if self.rescale:
            over_batch = AdvantageNormalizer("batch", "batch", eps=self.normalizer.eps)
            sums = [np.array(values) for values in over_batch.estimate([values.tolist() for values in sums])]
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
            there = [rollouts for rollouts in there if len(rollouts) > 1 or not self.normalizer.compares_groups]
            values = [[rewards[r.rollout_id][k] for r in rollouts] for rollouts in there if rollouts]
            for rollouts, advantages in zip(filter(None, there), self.normalizer.estimate(values), strict=True):
                for rollout, advantage in zip(rollouts, advantages, strict=True):
                    assert rollout.token_advantages is not None
                    rollout.token_advantages[k] = [advantage] * len(rollout.turns[k].completion.token_ids)

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
        if not _takes_two_arguments(self.function):
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


def _takes_two_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters) > 1
