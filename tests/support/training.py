"""Short ways to build a policy and its training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.losses import LOSSES
from shoal.core.objective import Objective
from shoal.core.types import Batch, Completion, Prompt, Rollout, Row, Sample, Turn
from shoal.models.decoder import Decoder
from shoal.models.lora import trained_parameters
from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
from shoal.trainer.policy import Reference, TrainedPolicy
from support.models import VOCABULARY


def make_policy(
    decoder: Decoder,
    schedule: Schedule | None = None,
    reference: Reference | None = None,
    max_grad_norm: float = 1.0,
    adam: AdamSettings | None = None,
) -> TrainedPolicy:
    optimizer = MasterAdamW(trained_parameters(decoder.model), adam or AdamSettings())
    return TrainedPolicy(decoder, optimizer, schedule or Schedule(1e-2, 100), max_grad_norm, reference)


def grpo() -> Objective:
    return Objective(LOSSES["grpo"]())


def as_rollout(number: int, turns: Sequence[Turn], advantage: float, group: int = 0) -> Rollout:
    return Rollout(Prompt("env", group, []), number, list(turns), advantage=advantage)


def one_turn(prompt_ids: list[int], completion: Completion, temperature: float = 1.0) -> list[Turn]:
    return [Turn(prompt_ids, completion, temperature)]


def pack(samples: Sequence[Sequence[Sample]], token_budget: int = 100_000, **settings: Any) -> Batch:
    values = {"aggregation": "token-mean", "max_tokens": 64, **settings}
    (batch,) = make_batches(samples, Packing(token_budget, **values))
    return batch


def rows_of(rollouts: Sequence[Rollout], token_budget: int = 100_000) -> list[Row]:
    return pack([rollout_samples(rollout) for rollout in rollouts], token_budget).rows


def random_samples(seed: int, *shapes: tuple[int, int], temperature: float = 1.0) -> list[list[Sample]]:
    """One rollout per (prompt length, completion length), with sampler log-probs close to those of a small model."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for number, (prompt, completion) in enumerate(shapes):
        size = prompt + completion
        mask = np.arange(size) >= prompt
        sample = Sample(
            rollout_id=f"env/{number // 2}/0/0/{number}",
            group_id=f"env/{number // 2}/0/0",
            token_ids=rng.integers(3, VOCABULARY, size),
            loss_mask=mask,
            sampler_logprobs=np.where(mask, -4 + rng.normal(size=size), 0).astype(np.float32),
            temperatures=np.where(mask, temperature, 1).astype(np.float32),
            advantages=np.full(size, rng.normal(), dtype=np.float32),
        )
        rollouts.append([sample])
    return rollouts


def grouped_samples(seed: int, *groups: tuple[int, Sequence[int]], temperature: float = 1.0) -> list[list[Sample]]:
    """One group per (prompt length, completion lengths). Its rollouts share the prompt."""
    rollouts = []
    for number, (prompt, completions) in enumerate(groups):
        shapes = [(prompt, completion) for completion in completions]
        members = random_samples(seed + number, *shapes, temperature=temperature)
        for index, (sample,) in enumerate(members):
            sample.token_ids[:prompt] = members[0][0].token_ids[:prompt]
            sample.group_id, sample.rollout_id = f"group {number}", f"group {number}/{index}"
        rollouts += members
    return rollouts


def by_rollout(rows: Sequence[Row], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Values at the trained tokens of each rollout, independent of packing."""
    found = {}
    for row, at_tokens in zip(rows, values, strict=True):
        for index, rollout_id in enumerate(row.rollout_ids):
            found[rollout_id] = at_tokens[row.loss_mask & (row.sequence_ids == index)]
    return found


def gradients(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    """The accumulated gradient by parameter. Clears it."""
    found = {name: master.grad.clone() for name, master in policy.optimizer.masters.items() if master.grad is not None}
    policy.optimizer.zero_grad()
    return found


def weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.model.named_parameters()}
