"""What becomes of a reward after the environment gave it: truncation, scale, bias, clip, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.types import Rollout


@dataclass(frozen=True)
class RewardShape:
    """`overlong_tokens` and `overlong_factor` are DAPO's soft penalty: it grows over the last so many tokens."""

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
