"""`cispo`: the ratio is clipped and only weighs the gradient, so no token stops learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import policy_ratio


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """-w · sg[clip(rho, ratio_low, ratio_high)] · lp · A"""

    name: ClassVar[str] = "cispo"
    ratio_low: float = 0.0
    ratio_high: float = 4.0

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        rho = policy_ratio(inputs).detach()
        bounded = rho.clamp(self.ratio_low, self.ratio_high)
        loss = inputs.masked(weigh(-bounded * inputs.policy_logprobs * inputs.advantages, w))
        return TokenLoss(loss, metrics={"policy/clip_frac": inputs.token_metric(bounded != rho)})
