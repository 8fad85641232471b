"""`reinforce`: the plain policy gradient, reweighted from the sampler to the policy. KL is added by the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss
from shoal.algorithms.terms import log_ratio


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """-A · sg[exp(lp - inf)] · lp; `ratio: none` drops the factor"""

    name: ClassVar[str] = "reinforce"
    ratio: Literal["on", "none"] = "on"

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        loss = -inputs.advantages * inputs.policy_logprobs
        if self.ratio == "on":
            lp, sampler = inputs.policy_logprobs.detach(), inputs.sampler_logprobs
            loss = loss * log_ratio(lp, sampler, inputs.ratio_log_cap).exp()
        return TokenLoss(inputs.masked(loss))
