"""`dppo`: drops a token by how far its probability moved, not by its ratio, so noise on rare tokens drops none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss
from shoal.algorithms.terms import log_ratio


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-keep · A · exp(lp - inf) + kl_tau · (lp - inf)²"""

    name: ClassVar[str] = "dppo"
    mask_low: float = 0.2
    mask_high: float = 0.2
    kl_tau: float = 1e-3

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        lp, sampler = inputs.policy_logprobs, inputs.sampler_logprobs
        moved = lp.detach().exp() - sampler.exp()
        too_far = torch.where(inputs.advantages > 0, moved > self.mask_high, moved < -self.mask_low)
        gain = torch.where(too_far, 0.0, inputs.advantages) * log_ratio(lp, sampler, inputs.ratio_log_cap).exp()
        pull = self.kl_tau * (lp - sampler).square()
        kept = inputs.loss_mask & ~too_far
        return TokenLoss(inputs.masked(pull - gain), kept, {"mask/token_frac": inputs.token_metric(too_far)})
