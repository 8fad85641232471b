"""Preference training (DPO) on pairs of a chosen and a rejected completion. Shares everything but the loss with sft.py.

The loss is a function of one sum of log-probs per completion, so its gradient is

    dL/dw = sum over tokens t of dL/ds(t) · d policy_logprobs[t] / dw,    s(t) = the sum that the token belongs to.

A pass without gradient computes the sums under the current weights, and the loss of all pairs of the step gives the
coefficients dL/ds in float64. A second pass then trains each token with a fixed weight. This is the exact gradient of
the step, and the two sides of a pair may be in different rows and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.config.preference import PairRatios, PreferenceLoss
from shoal.core.errors import DataError
from shoal.core.loss_inputs import LossInputs
from shoal.core.terms import Metrics
from shoal.core.types import Row, Sample, Task
from shoal.models.chat import Chat
from shoal.trainer.policy import PendingPass
from shoal.trainer.sft import SampleMaker, SupervisedSteps

SIDES = ("chosen", "rejected")
Sums = dict[str, float]  # rollout id → sum over the tokens of a completion


@dataclass(frozen=True)
class WeightedLogprobs:
    """The sum of policy_logprobs times the weights of the row."""

    is_fixed: ClassVar[bool] = True  # equal for every pass, so passes may be captured

    def __call__(self, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Metrics]:
        return (inputs.policy_logprobs * weights.to(inputs.dtype)).sum(), {}


WEIGHTED_LOGPROBS = WeightedLogprobs()


def preference_pairs(
    tasks: Sequence[Task], chat: Chat, end_id: int, max_tokens: int
) -> tuple[list[tuple[Sample, Sample]], int]:
    """The samples of each pair, and the number of pairs with a side that is too long. Nothing is truncated."""
    maker = SampleMaker(chat, end_id, max_tokens)
    pairs = []
    for number, task in enumerate(tasks):
        # One group: a row with both sides stores the prompt once.
        sides = [maker.sample(task.messages, task.data[side], f"{number}/{side}", str(number)) for side in SIDES]
        chosen, rejected = sides
        if chosen is not None and rejected is not None:
            pairs.append((chosen, rejected))
    if not pairs:
        raise DataError(f"none of the {len(tasks)} pairs fits into train.sequence_len ({max_tokens}); raise it")
    return pairs, len(tasks) - len(pairs)


@dataclass
class PreferenceSteps(SupervisedSteps):
    """Optimizer steps over `batch_size` pairs each."""

    loss: PreferenceLoss

    def _passes(self, parts: Sequence[Sequence[Row]]) -> tuple[list[PendingPass], dict[str, float]]:
        reference = _sums(self.policy.reference_logprobs, parts)
        slopes, metrics = pair_slopes(self.loss, _sums(self.policy.logprobs, parts), reference, _lengths(parts))
        for row in (row for part in parts for row in part):
            weights = np.array([slopes[rollout_id] for rollout_id in row.rollout_ids])
            row.weights = np.where(row.loss_mask, weights[row.sequence_ids], 0.0)
        return [self.policy.forward_backward(part, WEIGHTED_LOGPROBS, "none") for part in parts], metrics


def pair_slopes(
    loss: PreferenceLoss, policy: Sums, reference: Sums, lengths: Sums
) -> tuple[dict[str, float], dict[str, float]]:
    """The derivative of the step's loss with respect to the sum of policy_logprobs of each completion, and metrics.

    The loss is the mean over the pairs, plus sft_weight times the mean cross-entropy of all chosen tokens of the step.
    """
    numbers = sorted({rollout_id.partition("/")[0] for rollout_id in policy})
    names = {side: [f"{number}/{side}" for number in numbers] for side in SIDES}

    def column(values: Sums, side: str) -> Tensor:
        return torch.tensor([values[name] for name in names[side]], dtype=torch.float64)

    sums = {side: column(policy, side).requires_grad_() for side in SIDES}
    chosen, rejected = (sums[side] - column(reference, side) for side in SIDES)
    chosen_tokens, rejected_tokens = (column(lengths, side) for side in SIDES)
    cross_entropy = -sums["chosen"].sum() / chosen_tokens.sum()
    total = loss(PairRatios(chosen, rejected, chosen_tokens, rejected_tokens)).mean()
    total = total + loss.sft_weight * cross_entropy
    total.backward()
    gradients = {side: value.grad.tolist() for side, value in sums.items() if value.grad is not None}
    slopes = {name: slope for side in SIDES for name, slope in zip(names[side], gradients[side], strict=True)}
    found = {
        "dpo/loss": total,
        "dpo/chosen_reward": loss.beta * chosen.mean(),
        "dpo/rejected_reward": loss.beta * rejected.mean(),
        "dpo/margin": loss.beta * (chosen - rejected).mean(),
        "dpo/accuracy": (chosen > rejected).double().mean(),
        "dpo/chosen_logprobs": sums["chosen"].mean(),
        "dpo/rejected_logprobs": sums["rejected"].mean(),
        **({"dpo/cross_entropy": cross_entropy} if loss.sft_weight else {}),
    }
    return slopes, {name: value.item() for name, value in found.items()}


def _sums(score: Callable[[Sequence[Row]], PendingPass], parts: Sequence[Sequence[Row]]) -> Sums:
    """Log-probs of all micro-batches, summed over each completion. All passes are launched before a result is read."""
    pending = [score(part) for part in parts]
    found = [zip(part, result.read()[1], strict=True) for part, result in zip(parts, pending, strict=True)]
    return {name: total for rows in found for row, values in rows for name, total in _by_completion(row, values)}


def _lengths(parts: Sequence[Sequence[Row]]) -> Sums:
    rows = [row for part in parts for row in part]
    return {name: total for row in rows for name, total in _by_completion(row, np.ones(row.tokens))}


def _by_completion(row: Row, values: np.ndarray) -> Iterator[tuple[str, float]]:
    """(rollout id, sum of the values of its trained tokens), added up in float64."""
    trained = values[row.loss_mask].astype(np.float64)
    sums = np.bincount(row.sequence_ids[row.loss_mask], trained, len(row.rollout_ids))
    return zip(row.rollout_ids, sums.tolist(), strict=True)
