"""The inputs of a loss: tensors over one packed row. Custom losses receive a `LossInputs`.

All tensors have shape [T]. Positions with loss_mask false may contain any value, including NaN; they are set to zero on
construction. A metric is a pair (sum, count): both are added up over rows, micro-batches and ranks, and the value is
sum / count. A count of 0 marks a plain sum (`policy/loss`, whose weights contain the denominator).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from shoal.core.terms import LOG_RATIO_CAP

MismatchSource = Literal["old", "policy", "none"]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One packed row, as a loss sees it.

    `mismatch_from` is what `mismatch/*` compares with the sampler: `old` if a forward pass computed old_logprobs,
    otherwise `policy` in the first minibatch (`trainer/device_batch.py` replaces `old`), and `none` in later ones.
    """

    policy_logprobs: Tensor  # [T], with gradient
    old_logprobs: Tensor  # [T]
    sampler_logprobs: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    advantages: Tensor  # [T]
    sequence_ids: Tensor  # [T] int64, 0 .. num_sequences - 1
    num_sequences: int
    reference_logprobs: Tensor | None = None  # [T]
    mismatch_from: MismatchSource = "old"
    ratio_log_cap: float = LOG_RATIO_CAP  # largest absolute value of the log of the policy's ratio
    entropy: Tensor | None = None  # [T], of the policy; with gradient if the objective asks for it
    teacher_logprobs: Tensor | None = None  # [T]
    teacher_baseline: Tensor | None = None  # [T], subtracted from teacher - student
    entropy_coef: Tensor | None = None  # [T], weight of the entropy bonus in this step
    top_entropy: Tensor | None = None  # [T], 0 where the policy loss is left out because of a low entropy
    cross_entropy: Tensor | None = None  # [T], with gradient, of tokens that loss_mask leaves out here; 0 elsewhere
    teacher_term: Tensor | None = None  # [T], set by the objective for losses that add the teacher themselves

    def __post_init__(self) -> None:
        mask = self.loss_mask.bool()
        dtype = torch.promote_types(self.policy_logprobs.dtype, torch.float32)  # half precision is not enough
        object.__setattr__(self, "loss_mask", mask)
        names = (
            "policy_logprobs", "old_logprobs", "sampler_logprobs", "advantages", "reference_logprobs", "entropy",
            "teacher_logprobs", "teacher_baseline", "entropy_coef", "top_entropy",
        )  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if value.shape != mask.shape or mask.dim() != 1:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, loss_mask {tuple(mask.shape)}, not [T]")
            # Only the policy has a gradient; where() also keeps NaN at masked positions out of the backward pass.
            value = value if name in ("policy_logprobs", "entropy") else value.detach()
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
        """`values` on trained tokens; 0 and no gradient elsewhere."""
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
