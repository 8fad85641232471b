"""What a loss is given and what it gives back: tensors over one packed row, cleaned once.

Every tensor is [T], indexed by the token it speaks of. Positions with loss_mask false may hold anything, NaN included;
they are zeroed on construction and count nowhere. Sequence statistics go by `sequence_ids`, contiguous or not.

A metric is a pair (sum, count): its value is sum / count after both were added up over rows, micro-batches and ranks.
A count of 0 marks a plain sum (`policy/loss`, whose weights already hold the denominator).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]
MismatchSource = Literal["old", "policy", "none"]
LOG_RATIO_CAP = 20.0  # exp(20) is 4.9e8: far beyond any use, far below overflow


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One packed row, as a loss sees it.

    `mismatch_from` says what the sampler is compared with for `mismatch/*`: the old policy where it was computed by a
    forward, the policy in the first minibatch where old = sampler, and nothing in the minibatches after that.
    """

    policy_logprobs: Tensor  # [T], has the gradient
    old_logprobs: Tensor  # [T]
    sampler_logprobs: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    advantages: Tensor  # [T]
    sequence_ids: Tensor  # [T] int64, 0 .. num_sequences - 1
    num_sequences: int
    reference_logprobs: Tensor | None = None  # [T]
    mismatch_from: MismatchSource = "old"
    ratio_log_cap: float = LOG_RATIO_CAP  # the log of the policy's ratio is clamped to ± this

    def __post_init__(self) -> None:
        mask = self.loss_mask.bool()
        dtype = torch.promote_types(self.policy_logprobs.dtype, torch.float32)  # half precision is never enough here
        object.__setattr__(self, "loss_mask", mask)
        names = ("policy_logprobs", "old_logprobs", "sampler_logprobs", "advantages", "reference_logprobs")
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if value.shape != mask.shape or mask.dim() != 1:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, loss_mask {tuple(mask.shape)}; both must be [T]"
                )
            # Only the policy carries a gradient; where() also keeps NaN at masked positions out of its backward.
            value = value if name == "policy_logprobs" else value.detach()
            object.__setattr__(self, name, torch.where(mask, value.to(dtype), 0.0))
        if self.sequence_ids.shape != mask.shape:
            raise ValueError(f"sequence_ids has shape {tuple(self.sequence_ids.shape)}, loss_mask {tuple(mask.shape)}")
        object.__setattr__(self, "sequence_ids", torch.where(mask, self.sequence_ids.long(), 0))

    @property
    def dtype(self) -> torch.dtype:
        return self.policy_logprobs.dtype

    @cached_property
    def tokens_per_sequence(self) -> Tensor:  # [S]
        return self.sum_by_sequence(self.loss_mask.to(self.dtype))

    def masked(self, values: Tensor) -> Tensor:
        """`values` on trained tokens, 0 elsewhere, with no gradient elsewhere."""
        return torch.where(self.loss_mask, values, 0.0)

    def sum_by_sequence(self, values: Tensor) -> Tensor:  # [T] -> [S]
        empty = torch.zeros(self.num_sequences, dtype=values.dtype, device=values.device)
        return empty.index_add(0, self.sequence_ids, self.masked(values))

    def mean_by_sequence(self, values: Tensor) -> Tensor:  # [T] -> [S], 0 for a sequence without trained tokens
        return self.sum_by_sequence(values) / self.tokens_per_sequence.clamp_min(1.0)

    def min_by_sequence(self, values: Tensor) -> Tensor:  # [T] -> [S], +inf for a sequence without trained tokens
        return self._extreme_by_sequence(values, "amin", torch.inf)

    def max_by_sequence(self, values: Tensor) -> Tensor:  # [T] -> [S], -inf for a sequence without trained tokens
        return self._extreme_by_sequence(values, "amax", -torch.inf)

    def _extreme_by_sequence(self, values: Tensor, how: str, neutral: float) -> Tensor:
        empty = torch.full((self.num_sequences,), neutral, dtype=values.dtype, device=values.device)
        filled = torch.where(self.loss_mask, values, neutral)
        return empty.scatter_reduce(0, self.sequence_ids, filled, reduce=how)

    def spread(self, per_sequence: Tensor) -> Tensor:  # [S] -> [T]
        return per_sequence[self.sequence_ids]

    def token_metric(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(sum, count) over trained tokens."""
        return self.masked(values.detach().to(self.dtype)).sum(), self.loss_mask.sum()


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss before aggregation."""

    loss: Tensor  # [T], 0 where loss_mask is false
    kept: Tensor | None = None  # [T] bool, false on trained tokens the loss dropped; None = it drops none
    metrics: Metrics = field(default_factory=dict)
