"""Packed rows as one batch on the device, uploaded at once, so that no forward waits for the host.

Built by the policy for each forward. Per-token tensors are [T] over all tokens or [N] over tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.loss_inputs import LossInputs, MismatchSource
from shoal.core.types import Row
from shoal.models.attention import Packed, upload
from shoal.models.logprobs import AllowedTokens

SCORED = ("sampler_logprobs", "temperatures", "advantages", "weights")
SCORED_IF_GIVEN = ("old_logprobs", "reference_logprobs")
SIGNALS = ("cross_entropy", "entropy_coef", "top_entropy", "teacher_logprobs", "teacher_baseline")


@dataclass(frozen=True)
class HostBatch:
    """Rows end to end, on the host."""

    arrays: dict[str, np.ndarray]
    context: Packed
    kept: AllowedTokens | None
    sequences: int

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> HostBatch:
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
            "loss_mask": np.ones(len(at), dtype=bool),
            **{name: np.concatenate([getattr(row, name)[row.loss_mask] for row in rows]) for name in (*SCORED, *given)},
            **{name: np.concatenate([_signal(row, name) for row in rows]) for name in _signal_names(rows)},
        }
        return HostBatch(arrays, _context(rows, before_row, device), _kept(rows, device), int(rollouts[-1]))


@dataclass(frozen=True)
class DeviceBatch:
    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    context: Packed
    before: Tensor  # [N], index of the state that predicts each scored token
    targets: Tensor  # [N]
    kept: AllowedTokens | None  # for the [N], if sampling was truncated
    sequence_ids: Tensor  # [N], index of each token's rollout
    num_sequences: int
    scored: dict[str, Tensor]  # [N] each: temperatures, weights, advantages and the rows' log-probs
    loss_mask: Tensor  # [N], false for padding

    @classmethod
    def upload(cls, laid: HostBatch, device: torch.device) -> DeviceBatch:
        return cls.made_of(upload(laid.arrays, device), laid.context, laid.sequences, laid.kept)

    @classmethod
    def made_of(
        cls, found: Mapping[str, Tensor], context: Packed, sequences: int, kept: AllowedTokens | None = None
    ) -> DeviceBatch:
        return cls(
            found["token_ids"],
            found["position_ids"],
            context,
            found["before"],
            found["targets"],
            kept,
            found["sequence_ids"],
            sequences,
            {name: found[name] for name in (*SCORED, *SCORED_IF_GIVEN, *SIGNALS) if name in found},
            found["loss_mask"],
        )

    @property
    def needs_entropy_gradient(self) -> bool:
        return "entropy_coef" in self.scored

    def loss_inputs(
        self, policy_logprobs: Tensor, mismatch_from: MismatchSource, entropy: Tensor | None = None
    ) -> LossInputs:
        """The inputs of a loss: only tokens under the loss mask. Those with a cross-entropy weight are kept apart."""
        kind, mask, apart = self.scored.get("cross_entropy"), self.loss_mask, None
        if kind is not None:
            apart = torch.where(mask & (kind > 0), -kind * policy_logprobs, 0.0)
            mask = mask & (kind == 0)
        old = self.scored.get("old_logprobs")
        if mismatch_from == "old" and old is None:
            mismatch_from = "policy"
        sampler = self.scored["sampler_logprobs"]
        return LossInputs(
            policy_logprobs=policy_logprobs,
            old_logprobs=sampler if old is None else old,
            sampler_logprobs=sampler,
            loss_mask=mask,
            advantages=self.scored["advantages"],
            sequence_ids=self.sequence_ids,
            num_sequences=self.num_sequences,
            reference_logprobs=self.scored.get("reference_logprobs"),
            mismatch_from=mismatch_from,
            entropy=entropy,
            teacher_logprobs=self.scored.get("teacher_logprobs"),
            teacher_baseline=self.scored.get("teacher_baseline"),
            entropy_coef=self.scored.get("entropy_coef"),
            top_entropy=self.scored.get("top_entropy"),
            cross_entropy=apart,
        )


def _signal_names(rows: Sequence[Row]) -> list[str]:
    return [name for name in SIGNALS if any(name in row.signals for row in rows)]


def _signal(row: Row, name: str) -> np.ndarray:
    """A row without a token trained by cross-entropy does not have that signal."""
    values = row.signals.get(name)
    return np.zeros(int(row.loss_mask.sum()), dtype=np.float32) if values is None else values[row.loss_mask]


def spread_over_rows(rows: Sequence[Row], scored: Tensor) -> list[np.ndarray]:
    """Scatter scored values to their token positions: [T] float32 per row, zero elsewhere."""
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


def _kept(rows: Sequence[Row], device: torch.device) -> AllowedTokens | None:
    if all(row.kept_ids is None for row in rows):
        return None
    ids: list[list[int] | None] = []
    for row in rows:
        of_row = row.kept_ids or [None] * row.tokens
        ids += [of_row[t] for t in np.flatnonzero(row.loss_mask)]
    return AllowedTokens(ids, device) if any(ids) else None
