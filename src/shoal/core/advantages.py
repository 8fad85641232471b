"""Rewards before they become advantages: shaping, zero-variance groups, and a KL in the reward.

The estimators of advantages are in `signals/advantages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.core.terms import LOG_RATIO_CAP
from shoal.core.types import Rollout


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


def is_uniform(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal. Compared, not subtracted, because a difference may be lost to rounding."""
    return len(rewards) > 0 and max(rewards) == min(rewards)


def reward_kl(policy_logprobs: np.ndarray, reference_logprobs: np.ndarray, loss_mask: np.ndarray, beta: float) -> float:
    """beta · Σ k1 over the trained tokens of a rollout, to subtract from its reward."""
    gap = policy_logprobs[loss_mask].astype(np.float64) - reference_logprobs[loss_mask].astype(np.float64)
    return float(beta * np.clip(gap, -LOG_RATIO_CAP, LOG_RATIO_CAP).sum())
