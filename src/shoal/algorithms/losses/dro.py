"""`dro`: log-prob times advantage, held near the old policy by a square instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh


@dataclass(frozen=True)
class DRO(PolicyLoss):
    """-(w · lp · A - ½ · quad_beta · (lp - old)²)"""

    name: ClassVar[str] = "dro"
    quad_beta: float = 0.05

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        gain = weigh(inputs.policy_logprobs * inputs.advantages, w)
        pull = 0.5 * self.quad_beta * (inputs.policy_logprobs - inputs.old_logprobs).square()
        return TokenLoss(inputs.masked(pull - gain))
