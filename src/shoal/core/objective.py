"""The objective that the policy minimises: a loss with its correction and KL penalty, summed with fixed weights.

The weights contain the aggregation, so results of any split of a step add up to the step's loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.loss_inputs import LossInputs
from shoal.core.losses import Loss
from shoal.core.terms import Metrics, mismatch, policy_ratio


@dataclass(frozen=True)
class Objective:
    """Computes what one row adds to the loss and the metrics of a step."""

    loss: Loss

    def __post_init__(self) -> None:
        loss = self.loss
        if loss.correction.type != "none" and not loss.takes_correction:
            raise ValueError(f"loss {loss.type} has no correction weight; remove loss.correction")
        if loss.kl.in_loss and not loss.takes_kl:
            raise ValueError(f"loss {loss.type} takes no KL penalty; remove loss.kl")
        if loss.kl.in_loss and loss.kl.estimator == "k1":
            raise ValueError("k1 as a loss has a gradient of zero-mean noise; use k3, or set loss.kl.in to reward")

    @property
    def is_fixed(self) -> bool:
        """Whether every call runs the same operations, so that a CUDA graph may capture it. Unknown for user code."""
        return not self.loss.custom

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl.in_loss

    @property
    def needs_old(self) -> bool:
        """Whether a forward pass must compute old_logprobs, because the sampler's log-probs are not exact enough."""
        return self.loss.needs_old or self.loss.correction.type != "none"

    def __call__(self, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Metrics]:
        """The row's share of the loss, and metric name → (sum, count). `policy/loss` is a plain sum: its count is 0."""
        if self.loss.ratio_log_cap != inputs.ratio_log_cap:
            inputs = replace(inputs, ratio_log_cap=self.loss.ratio_log_cap)
        w, metrics = self.loss.correction(inputs)
        result = self.loss(inputs, w)
        token_loss = result.loss
        metrics = {**mismatch(inputs), **metrics, **result.metrics}
        metrics["policy/ratio_mean"] = inputs.token_metric(policy_ratio(inputs))
        if self.loss.kl.in_loss:
            penalty, kl_metrics = self.loss.kl(inputs)
            token_loss = token_loss + inputs.masked(penalty)
            metrics.update(kl_metrics)
        # Weights of masked positions may contain any value too.
        total = (inputs.masked(weights.detach().to(inputs.dtype)) * token_loss).sum()
        metrics["policy/loss"] = (total.detach(), torch.zeros((), dtype=torch.int64, device=total.device))
        return total, metrics
