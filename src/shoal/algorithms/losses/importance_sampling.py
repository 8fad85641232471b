"""`importance_sampling`: the policy gradient weighted by its ratio, which two absolute bounds may clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import policy_ratio


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """-w · rho · A, or -w · clip(rho, ratio_low, ratio_high) · A; one bound alone leaves the other side open"""

    name: ClassVar[str] = "importance_sampling"
    ratio_low: float | None = None
    ratio_high: float | None = None

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        rho = policy_ratio(inputs)
        if self.ratio_low is None and self.ratio_high is None:
            return TokenLoss(inputs.masked(weigh(-rho * inputs.advantages, w)))
        bounded = rho.clamp(self.ratio_low, self.ratio_high)
        loss = inputs.masked(weigh(-bounded * inputs.advantages, w))
        return TokenLoss(loss, metrics={"policy/clip_frac": inputs.token_metric(bounded != rho)})
