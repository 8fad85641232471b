"""The objective handed to the trainer: a loss, its correction and its KL penalty, summed with fixed weights.

Weights hold the whole aggregation, so adding the results of any split of a step gives the step's loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.algorithms.inputs import LOG_RATIO_CAP, LossInputs, Metrics
from shoal.algorithms.losses import CustomLoss, PolicyLoss
from shoal.algorithms.terms import Correction, KLPenalty, mismatch, policy_ratio


@dataclass(frozen=True)
class Objective:
    """What one row adds to the step's loss, and what there is to report about it."""

    loss: PolicyLoss | CustomLoss
    correction: Correction | None = None
    kl: KLPenalty | None = None
    ratio_log_cap: float = LOG_RATIO_CAP

    def __post_init__(self) -> None:
        if self.correction is not None and not self.loss.takes_correction:
            raise ValueError(f"loss {self.loss.name} has no correction weight; remove loss.correction")
        if self.kl is not None and not self.loss.takes_kl:
            raise ValueError(f"loss {self.loss.name} takes no KL penalty; remove loss.kl")

    @property
    def is_fixed(self) -> bool:
        """Whether it does the same every time it is called, which of a user's own function nobody knows."""
        return not isinstance(self.loss, CustomLoss)

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None

    @property
    def needs_old(self) -> bool:
        """True if the sampler's log-probs cannot stand in for the old policy's."""
        return self.loss.needs_old or self.correction is not None

    def __call__(self, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Metrics]:
        """The row's share of the loss, and metric name → (sum, count). `policy/loss` is a plain sum: its count is 0."""
        if self.ratio_log_cap != inputs.ratio_log_cap:
            inputs = replace(inputs, ratio_log_cap=self.ratio_log_cap)
        w, metrics = (None, {}) if self.correction is None else self.correction(inputs)
        result = self.loss(inputs, w)
        token_loss = result.loss
        metrics = {**mismatch(inputs), **metrics, **result.metrics}
        metrics["policy/ratio_mean"] = inputs.token_metric(policy_ratio(inputs))
        if self.kl is not None:
            penalty, kl_metrics = self.kl(inputs)
            token_loss = token_loss + inputs.masked(penalty)
            metrics.update(kl_metrics)
        # where() on the weights as well: a masked position may hold anything there too.
        total = (inputs.masked(weights.detach().to(inputs.dtype)) * token_loss).sum()
        metrics["policy/loss"] = (total.detach(), torch.zeros((), dtype=torch.int64, device=total.device))
        return total, metrics
