"""`masked`: the quickstart's loss. No clip and no reference: what drifted too far from the sampler is dropped.

Dropped tokens stay in the denominators, which are counted before any loss is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss

_SEQUENCE_LOG_CAP = 10.0


@dataclass(frozen=True)
class Masked(PolicyLoss):
    """-sg[weight · (adv_tau·A - kl_tau·l)] · lp on kept tokens, l = lp - inf"""

    name: ClassVar[str] = "masked"
    ratio_type: Literal["token", "sequence"] = "token"
    adv_tau: float = 1.0
    kl_tau: float = 0.0
    token_mask_low: float = 0.125
    token_mask_high: float = 8.0
    geo_mask_low: float = 0.1
    geo_mask_high: float = 10.0
    sequence_mask_low: float = 0.0
    sequence_mask_high: float = 100.0
    sequence_clip_high: float = 10.0

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        gap = inputs.policy_logprobs.detach() - inputs.sampler_logprobs
        ratio = gap.exp()
        token_dropped = (ratio < self.token_mask_low) | (ratio > self.token_mask_high)
        sequence_dropped = self._drop_sequences(inputs, gap, ratio)
        with_sequence = inputs.spread(sequence_dropped)
        kept = inputs.loss_mask & ~token_dropped & ~with_sequence
        coefficient = self._weight(inputs, gap, ratio) * (self.adv_tau * inputs.advantages - self.kl_tau * gap)
        # A dropped token's coefficient may be infinite; zeroing it, not the product, keeps NaN out of the backward.
        coefficient = torch.where(kept, coefficient, 0.0)
        metrics = {
            "mask/token_frac": inputs.token_metric(token_dropped & ~with_sequence),
            "mask/sequence_frac": inputs.token_metric(with_sequence),
            "masked": inputs.token_metric(~kept),
        }
        return TokenLoss(-coefficient * inputs.policy_logprobs, kept, metrics)

    def _drop_sequences(self, inputs: LossInputs, gap: Tensor, ratio: Tensor) -> Tensor:  # [S] bool
        geometric = inputs.mean_by_sequence(gap).exp()
        return (
            (geometric < self.geo_mask_low)
            | (geometric > self.geo_mask_high)
            | (inputs.min_by_sequence(ratio) < self.sequence_mask_low)
            | (inputs.max_by_sequence(ratio) > self.sequence_mask_high)
        )

    def _weight(self, inputs: LossInputs, gap: Tensor, ratio: Tensor) -> Tensor:  # [T]
        if self.ratio_type == "token":
            return ratio
        product = inputs.sum_by_sequence(gap).clamp_max(_SEQUENCE_LOG_CAP).exp()
        return inputs.spread(product.clamp_max(self.sequence_clip_high))
