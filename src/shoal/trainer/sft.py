"""Supervised fine-tuning on given completions. Shares the policy, packing, metrics and checkpoints with GRPO.

The order of rows is a pure function of seed and epoch, so resuming needs only the step number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

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
