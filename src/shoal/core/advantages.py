"""From rewards to advantages: reward shaping, zero-variance groups, and one normaliser in float64 NumPy.

The settings of the normaliser cover GRPO, Dr.GRPO, RLOO, LitePPO and REINFORCE++. The learner calls it once per step
with all kept groups, so that batch statistics include the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.core.losses import keeps_uniform
from shoal.core.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class RewardShape:
    """What happens to a reward before training: truncation, scale, bias and clip, in this order.

    With `truncated: overlong` a penalty grows linearly over the last `overlong_tokens` tokens before the limit (DAPO).
    """

    scale: float = 1.0
    bias: float = 0.0
    clip: tuple[float, float] | None = None
    truncated: Literal["keep", "mask", "zero", "overlong"] = "keep"
    overlong_tokens: int | None = None
    overlong_factor: float = 1.0

    def __call__(self, reward: float, rollout: Rollout, max_tokens: int) -> float:
        if self.truncated == "zero" and rollout.truncated:
            reward = 0.0
        if self.truncated == "overlong" and self.overlong_tokens:
            over = rollout.completion_tokens - (max_tokens - self.overlong_tokens)
            reward -= self.overlong_factor * min(max(over, 0), self.overlong_tokens) / self.overlong_tokens
        reward = reward * self.scale + self.bias
        if self.clip is not None:
            reward = min(max(reward, self.clip[0]), self.clip[1])
        return reward

    def trains(self, rollout: Rollout) -> bool:
        """Whether the rollout's tokens are in the loss."""
        return not (self.truncated == "mask" and rollout.truncated)


Statistic = Literal["group", "batch", "none"]
Scale = Literal["group", "batch", "none", "mean"]
GroupVerdict = Literal["mixed", "uniform-good", "uniform-bad", "too-few-scored"]

STATISTICS = ("group", "batch", "none")  # the population of an advantage's mean and std
ADVANTAGE_EPS = 1e-6
_LOG_RATIO_CAP = 20.0


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal. Compared, not subtracted, because a difference may be lost to rounding."""
    return len(rewards) > 0 and max(rewards) == min(rewards)


def judge_group(rewards: Sequence[float], good: float = 1.0) -> GroupVerdict:
    """Classify a group by its rewards. A zero-variance group is good if its reward is at least `good`."""
    if len(rewards) < 2:
        return "too-few-scored"
    if not is_uniform(rewards):
        return "mixed"
    return "uniform-good" if rewards[0] >= good else "uniform-bad"


def reward_kl(policy_logprobs: np.ndarray, reference_logprobs: np.ndarray, loss_mask: np.ndarray, beta: float) -> float:
    """beta · Σ k1 over the trained tokens of a rollout, to subtract from its reward."""
    gap = policy_logprobs[loss_mask].astype(np.float64) - reference_logprobs[loss_mask].astype(np.float64)
    return float(beta * np.clip(gap, -_LOG_RATIO_CAP, _LOG_RATIO_CAP).sum())


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
