"""`grpo`, also called `ppo`: the clipped policy gradient. KL to the reference is added by the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import ClipBounds, clipped_surrogate, policy_ratio


@dataclass(frozen=True)
class GRPO(PolicyLoss):
    """w · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A)"""

    name: ClassVar[str] = "grpo"
    clip_low: float = 0.2
    clip_high: float | None = None  # None = clip_low

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        bounds = ClipBounds(self.clip_low, self.clip_low if self.clip_high is None else self.clip_high)
        loss, clipped = clipped_surrogate(policy_ratio(inputs), inputs.advantages, bounds)
        return TokenLoss(inputs.masked(weigh(loss, w)), metrics={"policy/clip_frac": inputs.token_metric(clipped)})
