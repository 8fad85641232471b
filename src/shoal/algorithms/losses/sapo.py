"""`sapo`: a sigmoid gate in place of the clip; the gradient fades smoothly as the ratio leaves 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import policy_ratio


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """-w · (4/t) · sigmoid(t · (rho - 1)) · A, t = tau_pos where A > 0, else tau_neg"""

    name: ClassVar[str] = "sapo"
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        negative = torch.full_like(inputs.advantages, self.tau_neg)
        tau = torch.where(inputs.advantages > 0, self.tau_pos, negative)  # two scalars would round tau to float32
        gate = (4 / tau) * torch.sigmoid(tau * (policy_ratio(inputs) - 1))
        return TokenLoss(inputs.masked(weigh(-gate * inputs.advantages, w)))
