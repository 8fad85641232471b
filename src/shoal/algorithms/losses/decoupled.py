"""`decoupled`: clips against the old policy and weighs against the sampler, for rollouts drawn by older weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss
from shoal.algorithms.terms import ClipBounds, clipped_surrogate, log_ratio, policy_ratio


@dataclass(frozen=True)
class Decoupled(PolicyLoss):
    """v · max(-rho·A, -clip(rho, 1-clip_low, 1+clip_high)·A) with v = exp(old - inf), 0 above cap"""

    name: ClassVar[str] = "decoupled"
    clip_low: float = 0.4
    clip_high: float = 0.4
    cap: float = 5.0
    dual_clip: float | None = None

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        behaviour = log_ratio(inputs.old_logprobs, inputs.sampler_logprobs).exp()
        kept = behaviour <= self.cap
        bounds = ClipBounds(self.clip_low, self.clip_high, self.dual_clip)
        surrogate, clipped = clipped_surrogate(policy_ratio(inputs), inputs.advantages, bounds)
        metrics = {
            "policy/clip_frac": inputs.token_metric(clipped),
            "mask/token_frac": inputs.token_metric(~kept),
        }
        return TokenLoss(inputs.masked(torch.where(kept, behaviour, 0.0) * surrogate), kept & inputs.loss_mask, metrics)
