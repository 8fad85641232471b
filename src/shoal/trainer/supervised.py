"""Supervised and preference training: samples, and optimizer steps over one batch of the data set each.

Policy, packing, metrics and checkpoints are those of GRPO. The order of rows is a pure function of seed and epoch, so
resuming needs only the step number.

In preference training (DPO) on pairs of a chosen and a rejected completion, the loss is a function of one sum of
log-probs per completion, so its gradient is

    dL/dw = sum over tokens t of dL/ds(t) · d policy_logprobs[t] / dw,    s(t) = the sum that the token belongs to.

A pass without gradient computes the sums under the current weights, and the loss of all pairs of the step gives the
coefficients dL/ds in float64. A second pass then trains each token with a fixed weight. This is the exact gradient of
the step, and the two sides of a pair may be in different rows and micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.config.preference import PairRatios, PreferenceLoss
from shoal.core.batching import Packing, make_batches, micro_batches, smaller
from shoal.core.errors import DataError
from shoal.core.loss_inputs import LossInputs
from shoal.core.metrics import Tally
from shoal.core.terms import Metrics
from shoal.core.types import Batch, Message, Row, Sample, Task
from shoal.models.chat import Chat
from shoal.trainer.policy import PendingPass, TrainedPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CrossEntropy:
    """The negative log-prob of every completion token."""

    is_fixed: ClassVar[bool] = True  # equal for every pass, so passes may be captured

    def __call__(self, inputs: LossInputs, weights: Tensor) -> tuple[Tensor, Metrics]:
        loss = -(inputs.policy_logprobs * weights.to(inputs.dtype)).sum()
        return loss, {"sft/loss": inputs.token_metric(-inputs.policy_logprobs)}


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class SampleMaker:
    chat: Chat
    end_id: int  # ends every completion
    max_tokens: int

    def sample(self, messages: Sequence[Message], completion: str, rollout_id: str, group_id: str) -> Sample | None:
        """A sample with the loss on the completion and its end token; None if it is too long."""
        answer: Message = {"role": "assistant", "content": completion}
        if self.chat.exceeds([*messages, answer], self.max_tokens):
            return None
        prompt = self.chat.prompt_ids(messages)
        ids = [*prompt, *self.chat.tokenizer.encode(completion, add_special_tokens=False), self.end_id]
        if len(ids) > self.max_tokens:
            return None
        mask = np.arange(len(ids)) >= max(1, len(prompt))
        ones, zeros = np.ones(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.float32)
        return Sample(rollout_id, group_id, np.array(ids, dtype=np.int64), mask, zeros, ones, ones)


def supervised_samples(tasks: Sequence[Task], chat: Chat, end_id: int, max_tokens: int) -> tuple[list[Sample], int]:
    """Samples with the loss on the completion and its end token, and the number of rows that were too long."""
    maker = SampleMaker(chat, end_id, max_tokens)
    found = [maker.sample(t.messages, t.data["completion"], str(n), str(n)) for n, t in enumerate(tasks)]
    samples = [sample for sample in found if sample is not None]
    if not samples:
        raise DataError(f"none of the {len(tasks)} rows fits into train.sequence_len ({max_tokens}); raise it")
    return samples, len(tasks) - len(samples)


@dataclass
class SupervisedSteps:
    """Optimizer steps over `batch_size` items each. An item is the samples of one row of the data set."""

    policy: TrainedPolicy
    items: Sequence[Sequence[Sample]]
    batch_size: int
    token_budget: int
    rows_per_micro_batch: int | None  # upper limit; None = limited by tokens only
    micro_batch_tokens: int | None  # upper limit, except for a single longer row
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.items) // self.batch_size)

    def step(self, step: int) -> dict[str, float]:
        """Step `step`, counted from 1; returns its metrics."""
        tally = Tally()
        rows = self._batch(step).rows
        pending, metrics = self._gradient(rows)
        tally.values({**metrics, **self.policy.optim_step()})
        for result in pending:  # read last, so the device never waits within a step
            tally.add_all(result.read()[0])
        tally.value("tokens/completion", sum(int(row.loss_mask.sum()) for row in rows))
        return tally.reduce()

    def _passes(self, parts: Sequence[Sequence[Row]]) -> tuple[list[PendingPass], dict[str, float]]:
        """Add the gradient of the micro-batches. Returns their passes, and metrics that are known already."""
        return [self.policy.forward_backward(part, CROSS_ENTROPY, "none") for part in parts], {}

    def _gradient(self, rows: Sequence[Row]) -> tuple[list[PendingPass], dict[str, float]]:
        """Compute the gradient; after an out-of-memory error, repeat it with smaller micro-batches."""
        sizes = [row.tokens for row in rows]
        while True:
            parts = micro_batches(sizes, self.micro_batch_tokens, self.rows_per_micro_batch)
            try:
                return self._passes([rows[part.start : part.stop] for part in parts])
            except torch.OutOfMemoryError:
                fewer = smaller([sizes[part.start : part.stop] for part in parts])
                if fewer is None:
                    raise
            # After the except block: the exception keeps the tensors of the failed pass alive.
            self.micro_batch_tokens = fewer
            log.warning("out of memory: micro-batches are limited to %d tokens from now on", fewer)
            self.policy.discard_gradient()

    def _batch(self, step: int) -> Batch:
        epoch, at = divmod(step - 1, self.steps_per_epoch)
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.items))
        taken = [self.items[i] for i in order[at * self.batch_size : (at + 1) * self.batch_size]]
        packing = Packing(self.token_budget, "token-mean", max_tokens=1, share_prefixes=self.policy.shares_prefixes)
        (batch,) = make_batches([[sample] for item in taken for sample in item], packing)
        return batch


def train_supervised(
    steps: SupervisedSteps, first: int, last: int, after_step: Callable[[int, dict[str, float]], bool]
) -> int:
    """Run steps first..last; `after_step` records each and returns whether to stop. Returns the last step done."""
    done = first - 1
    for step in range(first, last + 1):
        metrics = steps.step(step)
        done = step
        if after_step(step, metrics):
            break
    return done


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
