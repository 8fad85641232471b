"""`gspo`: one ratio a sequence, the geometric mean of its tokens' ratios, clipped as a whole.

Its bounds are far narrower than bf16 noise, so it wants the old policy's own log-probs, never the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.algorithms.inputs import LossInputs, TokenLoss
from shoal.algorithms.losses.base import PolicyLoss, weigh
from shoal.algorithms.terms import ClipBounds, clipped_surrogate


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """w · max(-s·A, -clip(s, 1-clip_low, 1+clip_high)·A), s = exp(lp - sg[lp] + sg[sequence mean of lp-old])"""

    name: ClassVar[str] = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs, w: Tensor | None = None) -> TokenLoss:
        lp = inputs.policy_logprobs
        cap = inputs.ratio_log_cap
        mean_gap = inputs.mean_by_sequence(lp.detach() - inputs.old_logprobs).clamp(-cap, cap)
        ratio = (lp - lp.detach() + inputs.spread(mean_gap)).exp()
        loss, clipped = clipped_surrogate(ratio, inputs.advantages, ClipBounds(self.clip_low, self.clip_high))
        return TokenLoss(inputs.masked(weigh(loss, w)), metrics={"policy/clip_frac": inputs.token_metric(clipped)})
