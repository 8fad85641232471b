"""Rows laid end to end on the device, uploaded at once, so that nothing within a step waits for the host.

Made by the policy for each forward. Per-token tensors are [T] over all tokens or [N] over those in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, MismatchSource
from shoal.models.attention import Packed
from shoal.models.kept import Kept
from shoal.models.upload import upload
from shoal.types import Row

SCORED = ("sampler_logprobs", "temperatures", "advantages", "weights")
SCORED_IF_GIVEN = ("old_logprobs", "reference_logprobs")


@dataclass(frozen=True)
class MicroBatch:
    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    context: Packed
    before: Tensor  # [N], where the state lies that predicts each scored token
    targets: Tensor  # [N]
    kept: Kept | None  # of the [N], where the sampler narrowed its choice
    sequence_ids: Tensor  # [N], rollouts numbered through
    num_sequences: int
    scored: dict[str, Tensor]  # [N] each: temperatures, weights, advantages and the log-probs the rows came with

    @classmethod
    def upload(cls, rows: Sequence[Row], device: torch.device) -> MicroBatch:
        before_row = np.cumsum([0, *(row.tokens for row in rows)])[:-1]
        rollouts = np.cumsum([0, *(len(row.rollout_ids) for row in rows)])
        at = np.flatnonzero(np.concatenate([row.loss_mask for row in rows]))
        ids = np.concatenate([row.token_ids for row in rows])
        before = np.concatenate([row.predecessors + first for row, first in zip(rows, before_row, strict=True)])
        sequences = [row.sequence_ids[row.loss_mask] + first for row, first in zip(rows, rollouts, strict=False)]
        given = [name for name in SCORED_IF_GIVEN if all(getattr(row, name) is not None for row in rows)]
        arrays = {
            "token_ids": ids,
            "position_ids": np.concatenate([row.position_ids for row in rows]),
            "before": before[at],
            "targets": ids[at],
            "sequence_ids": np.concatenate(sequences),
            **{name: np.concatenate([getattr(row, name)[row.loss_mask] for row in rows]) for name in (*SCORED, *given)},
        }
        found = upload(arrays, device)
        return cls(
            found["token_ids"],
            found["position_ids"],
            _context(rows, before_row, device),
            found["before"],
            found["targets"],
            _kept(rows, device),
            found["sequence_ids"],
            int(rollouts[-1]),
            {name: found[name] for name in (*SCORED, *given)},
        )

    def loss_inputs(self, policy_logprobs: Tensor, mismatch_from: MismatchSource) -> LossInputs:
        """The rows as a loss sees them: only their masked tokens."""
        old = self.scored.get("old_logprobs")
        if mismatch_from == "old" and old is None:
            mismatch_from = "policy"
        sampler = self.scored["sampler_logprobs"]
        return LossInputs(
            policy_logprobs=policy_logprobs,
            old_logprobs=sampler if old is None else old,
            sampler_logprobs=sampler,
            loss_mask=torch.ones(len(sampler), dtype=torch.bool, device=sampler.device),
            advantages=self.scored["advantages"],
            sequence_ids=self.sequence_ids,
            num_sequences=self.num_sequences,
            reference_logprobs=self.scored.get("reference_logprobs"),
            mismatch_from=mismatch_from,
        )


def spread_over_rows(rows: Sequence[Row], scored: Tensor) -> list[np.ndarray]:
    """Scored values back at their token positions, [T] float32 a row, zero elsewhere."""
    values = scored.detach().float().cpu().numpy()
    result, at = [], 0
    for row in rows:
        count = int(row.loss_mask.sum())
        full = np.zeros(row.tokens, dtype=np.float32)
        full[row.loss_mask] = values[at : at + count]
        result.append(full)
        at += count
    return result


def _context(rows: Sequence[Row], before_row: np.ndarray, device: torch.device) -> Packed:
    starts = [row.segment_starts[1:] + at for row, at in zip(rows, before_row, strict=True)]
    segments = np.cumsum([0, *(len(row.segment_prefix) for row in rows)])
    prefixes = [
        np.where(row.segment_prefix < 0, -1, row.segment_prefix + at) for row, at in zip(rows, segments, strict=False)
    ]
    return Packed(np.concatenate([[0], *starts]), device, prefixes=np.concatenate(prefixes))


def _kept(rows: Sequence[Row], device: torch.device) -> Kept | None:
    if all(row.kept_ids is None for row in rows):
        return None
    ids: list[list[int] | None] = []
    for row in rows:
        of_row = row.kept_ids or [None] * row.tokens
        ids += [of_row[t] for t in np.flatnonzero(row.loss_mask)]
    return Kept(ids, device) if any(ids) else None
