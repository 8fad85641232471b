"""`dapo`: the clipped policy gradient with more room upwards, and optionally a second clip for negative advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import ClipBounds, clipped_surrogate, policy_ratio


@dataclass(frozen=True)
class DAPO(PolicyLoss):
    """w · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A); with dual_clip c, at most -c·A where A < 0"""

    name: ClassVar[str] = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        bounds = ClipBounds(self.clip_low, self.clip_high, self.dual_clip)
        loss, clipped = clipped_surrogate(policy_ratio(inputs), inputs.advantages, bounds)
        return TokenLoss(inputs.masked(weigh(loss, w)), metrics={"policy/clip_frac": inputs.token_metric(clipped)})
