"""The objective that the policy minimises: a loss with its correction and KL penalty, summed with fixed weights.

The weights contain the aggregation, so results of any split of a step add up to the step's loss and gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.loss_inputs import LossInputs
from shoal.core.losses import Loss
from shoal.core.terms import Metrics, log_ratio, mismatch, policy_ratio


@dataclass(frozen=True)
class TeacherWeights:
    """How the teacher's signal and the reward are weighed against each other."""

    tau: float
    reward_weight: float = 1.0

    def apply(self, loss: Loss, inputs: LossInputs) -> LossInputs:
        """A = reward_weight·A + tau·sg[clamp(teacher - old, ±20)]. A loss that adds the teacher itself compares it with
        the current policy instead of the old one."""
        if inputs.teacher_logprobs is None:
            raise ValueError("the objective has a teacher, but the row has no teacher_logprobs")
        student = inputs.policy_logprobs.detach() if loss.adds_teacher else inputs.old_logprobs
        gap = log_ratio(inputs.teacher_logprobs, student)
        term = self.tau * (gap if inputs.teacher_baseline is None else gap - inputs.teacher_baseline)
        advantages = self.reward_weight * inputs.advantages
        if loss.adds_teacher:
            return replace(inputs, advantages=advantages, teacher_term=term)
        return replace(inputs, advantages=advantages + term)


@dataclass(frozen=True)
class Objective:
    """Computes what one row adds to the loss and the metrics of a step."""

    loss: Loss
    teacher: TeacherWeights | None = None

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
    def needs_entropy_gradient(self) -> bool:
        """Whether every pass needs it. With the entropy bonus, those whose rows have an `entropy_coef` need it."""
        return self.loss.needs_entropy_gradient

    @property
    def needs_old(self) -> bool:
        """Whether a forward pass must compute old_logprobs, because the sampler's log-probs are not exact enough."""
        return self.loss.needs_old or self.loss.correction.type != "none"

    def __call__(self, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Metrics]:
        """The row's share of the loss, and metric name → (sum, count). `policy/loss` is a plain sum: its count is 0."""
        if self.loss.ratio_log_cap != inputs.ratio_log_cap:
            inputs = replace(inputs, ratio_log_cap=self.loss.ratio_log_cap)
        if self.teacher is not None:
            inputs = self.teacher.apply(self.loss, inputs)
        w, metrics = self.loss.correction(inputs)
        result = self.loss(inputs, w)
        token_loss = result.loss if inputs.top_entropy is None else result.loss * inputs.top_entropy
        metrics = {**mismatch(inputs), **metrics, **result.metrics}
        metrics["policy/ratio_mean"] = inputs.token_metric(policy_ratio(inputs))
        if inputs.teacher_logprobs is not None:
            gap = inputs.policy_logprobs.detach() - inputs.teacher_logprobs
            metrics["teacher/kl"] = inputs.token_metric(gap)
        if self.loss.kl.in_loss:
            penalty, kl_metrics = self.loss.kl(inputs)
            token_loss = token_loss + inputs.masked(penalty)
            metrics.update(kl_metrics)
        if inputs.entropy_coef is not None and inputs.entropy is not None:
            token_loss = token_loss - inputs.entropy_coef * inputs.entropy
        # Weights of masked positions may contain any value too.
        weights = weights.detach().to(inputs.dtype)
        total = (inputs.masked(weights) * token_loss).sum()
        if inputs.cross_entropy is not None:
            total = total + (weights * inputs.cross_entropy).sum()
        metrics["policy/loss"] = (total.detach(), torch.zeros((), dtype=torch.int64, device=total.device))
        return total, metrics
