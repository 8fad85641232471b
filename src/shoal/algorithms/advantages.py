"""From rewards to advantages: one normaliser covers GRPO, Dr.GRPO, RLOO, LitePPO and REINFORCE++. NumPy only, float64.

Called by the loop once a step, with every kept group of the step, so that batch statistics are over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.config.catalogue import ADVANTAGE_EPS, STATISTICS, keeps_uniform
from shoal.errors import UserCodeError

Statistic = Literal["group", "batch", "none"]
GroupVerdict = Literal["mixed", "uniform-good", "uniform-bad", "too-few-scored"]
Estimator = Callable[[list[list[float]]], Sequence[Sequence[float]]]

_LOG_RATIO_CAP = 20.0


def is_uniform(rewards: Sequence[float]) -> bool:
    """True if all rewards are one number. Compared, never subtracted: rounding cannot make a group look mixed."""
    return len(rewards) > 0 and max(rewards) == min(rewards)


def judge_group(rewards: Sequence[float], good: float = 1.0) -> GroupVerdict:
    """What a group's scored rewards can teach. A uniform group is good if its reward is at least `good`."""
    if len(rewards) < 2:
        return "too-few-scored"
    if not is_uniform(rewards):
        return "mixed"
    return "uniform-good" if rewards[0] >= good else "uniform-bad"


def reward_kl(policy_logprobs: np.ndarray, reference_logprobs: np.ndarray, loss_mask: np.ndarray, beta: float) -> float:
    """beta · Σ k1 over a rollout's trained tokens: what KL folded into the reward takes off it."""
    gap = policy_logprobs[loss_mask].astype(np.float64) - reference_logprobs[loss_mask].astype(np.float64)
    return float(beta * np.clip(gap, -_LOG_RATIO_CAP, _LOG_RATIO_CAP).sum())


@dataclass(frozen=True)
class Normaliser:
    """A = (r - mean) / (std + eps), with the unbiased (N-1) standard deviation.

    Worked example, group rewards [0, 1, 1, 0]: group mean alone gives ±.5, leave_one_out 4/3 of that, and group mean
    with group std ±.866.
    """

    mean: Statistic = "group"
    std: Statistic = "group"
    leave_one_out: bool = False
    eps: float = ADVANTAGE_EPS

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if getattr(self, name) not in STATISTICS:
                raise ValueError(f"advantage.{name} must be one of {', '.join(STATISTICS)}, not {getattr(self, name)}")
        if self.leave_one_out and self.mean != "group":
            raise ValueError(f"advantage.leave_one_out needs advantage.mean: group, not {self.mean}")

    @property
    def keeps_uniform(self) -> bool:
        """True if a uniform group takes part."""
        return keeps_uniform(self.mean, self.std)

    def estimate(self, groups_rewards: list[list[float]]) -> list[list[float]]:
        """One advantage a reward, in the same nesting."""
        groups = [_checked(rewards, self.mean, self.std) for rewards in groups_rewards]
        if not groups:
            return []
        batch = np.concatenate(groups)
        return [(self._centre(group, batch) / self._scale(group, batch)).tolist() for group in groups]

    def _centre(self, group: np.ndarray, batch: np.ndarray) -> np.ndarray:
        if self.mean == "none":
            return group
        population = group if self.mean == "group" else batch
        if is_uniform(population.tolist()):
            return np.zeros_like(group)  # exactly: the mean of equal numbers may round away from them
        centred = group - population.mean()
        return centred * len(group) / (len(group) - 1) if self.leave_one_out else centred

    def _scale(self, group: np.ndarray, batch: np.ndarray) -> float:
        if self.std == "none":
            return 1.0
        population = group if self.std == "group" else batch
        spread = 0.0 if is_uniform(population.tolist()) else float(population.std(ddof=1))
        return spread + self.eps


@dataclass(frozen=True)
class CustomAdvantages:
    """The user's own function from rewards to advantages, held to the shape it was given."""

    function: Estimator
    name: str = "custom"
    keeps_uniform: bool = False

    def estimate(self, groups_rewards: list[list[float]]) -> list[list[float]]:
        returned = self.function(groups_rewards)
        try:
            advantages = [[float(value) for value in group] for group in returned]
        except (TypeError, ValueError) as error:
            raise UserCodeError(f"advantage {self.name} returned {type(returned).__name__}: {error}") from error
        if [len(group) for group in advantages] != [len(group) for group in groups_rewards]:
            raise UserCodeError(f"advantage {self.name} must return one number a reward, in groups as given")
        if not all(np.isfinite(value) for group in advantages for value in group):
            raise UserCodeError(f"advantage {self.name} returned a number that is not finite")
        return advantages


def _checked(rewards: Sequence[float], mean: Statistic, std: Statistic) -> np.ndarray:
    group = np.asarray(rewards, dtype=np.float64)
    if group.ndim != 1 or not np.isfinite(group).all():
        raise ValueError(f"rewards of a group must be finite numbers: {rewards}")
    if "group" in (mean, std) and len(group) < 2:
        raise ValueError("group statistics need at least two scored rollouts; set smaller groups aside first")
    return group
