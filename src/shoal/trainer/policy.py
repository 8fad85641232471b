"""The model being trained: log-probs of packed rows, gradients of an objective, optimizer steps.

Runs on one thread, the device's. Knows no algorithm: the objective turns log-probs into a loss and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.inputs import LossInputs, Metrics, MismatchSource
from shoal.models.attention import Packed
from shoal.models.decoder import Decoder
from shoal.models.logprobs import Scored, token_logprobs
from shoal.trainer.optimizer import AdamSettings, MasterAdamW
from shoal.trainer.schedule import Schedule
from shoal.types import Row

Objective = Callable[[LossInputs, Tensor], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Reference:
    """Where reference log-probs come from: the decoder itself under `within` (adapter off), or a frozen copy."""

    decoder: Decoder
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class OwnStep:
    """One optimizer step's numbers. Without `adam`, betas, epsilon and decay stay as they are."""

    rate: float
    max_grad_norm: float
    adam: AdamSettings | None = None


@dataclass
class RowResults:
    """What one micro-batch came to, still on the device; `read` waits for it."""

    metrics: Metrics
    _rows: Sequence[Row]
    _logprobs: Tensor  # [scored tokens of all rows]

    def read(self) -> tuple[dict[str, tuple[float, float]], list[np.ndarray]]:
        metrics = {name: (float(total), float(count)) for name, (total, count) in self.metrics.items()}
        return metrics, spread_over_rows(self._rows, self._logprobs)


class TrainedPolicy:
    def __init__(
        self,
        decoder: Decoder,
        optimizer: MasterAdamW,
        schedule: Schedule,
        max_grad_norm: float = 1.0,
        reference: Reference | None = None,
        sum_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.reference = reference
        self.optimizer_steps = 0
        self._sum_gradients = sum_gradients  # over the processes that train together

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        return spread_over_rows(rows, self._score(self.decoder, rows).logprobs)

    @torch.no_grad()
    def reference_logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        if self.reference is None:
            raise RuntimeError("this policy has no reference model")
        with self.reference.within():
            return spread_over_rows(rows, self._score(self.reference.decoder, rows).logprobs)

    def forward_backward(
        self, rows: Sequence[Row], objective: Objective, mismatch_from: MismatchSource = "old"
    ) -> RowResults:
        """Add the gradient of one micro-batch, its rows laid end to end."""
        with self._training():
            scored = self._score(self.decoder, rows)
            inputs = loss_inputs(rows, scored.logprobs, mismatch_from)
            weights = torch.as_tensor(_scored(rows, "weights"), device=self.decoder.device)
            loss, metrics = objective(inputs, weights)
            loss.backward()
        metrics["policy/entropy"] = inputs.token_metric(scored.entropy)
        return RowResults(metrics, rows, scored.logprobs.detach())

    def optim_step(self, own: OwnStep | None = None) -> dict[str, float]:
        """Step, unless the gradient is not finite: then nothing moves, and `optim/skipped` says so.

        `own` takes the place of the schedule, for loops that are written outside.
        """
        own = own or OwnStep(self.schedule(self.optimizer_steps + 1), self.max_grad_norm)
        rate = own.rate
        if self._sum_gradients is not None:
            self._sum_gradients(self.optimizer.masters)
        norm = float(self.optimizer.clip(own.max_grad_norm))
        skipped = not np.isfinite(norm)
        if not skipped:
            self.optimizer.step(rate, own.adam)
        self.optimizer.zero_grad()
        self.optimizer_steps += 1
        result = {"optim/lr": rate, "optim/skipped": float(skipped)}
        return result if skipped else {**result, "optim/grad_norm": norm}

    def _score(self, decoder: Decoder, rows: Sequence[Row]) -> Scored:
        """Log-probs of the masked tokens of the rows, one after another."""
        lengths = np.cumsum([0, *(row.tokens for row in rows)])
        starts = np.concatenate([[0], *(row.segment_starts[1:] + at for row, at in zip(rows, lengths, strict=False))])
        device = decoder.device
        ids = np.concatenate([row.token_ids for row in rows])
        positions = np.concatenate([row.position_ids for row in rows])
        at = np.flatnonzero(np.concatenate([row.loss_mask for row in rows]))
        hidden = decoder.hidden(_long(ids, device)[None], _long(positions, device)[None], Packed(starts, device))[0]
        # The state before a token predicts it; a segment's first token is never in the loss, so `at - 1` stays inside.
        return token_logprobs(
            decoder.logits,
            hidden[_long(at - 1, device)],
            _long(ids[at], device),
            torch.as_tensor(_scored(rows, "temperatures"), dtype=torch.float32, device=device),
            decoder.vocab_size,
            _scored_kept(rows),
        )

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.decoder.model.train()
        try:
            yield
        finally:
            self.decoder.model.eval()


def loss_inputs(rows: Sequence[Row], policy_logprobs: Tensor, mismatch_from: MismatchSource) -> LossInputs:
    """The rows as a loss sees them: only their masked tokens, rollouts numbered through."""
    device = policy_logprobs.device

    def tensor(name: str) -> Tensor:
        return torch.as_tensor(_scored(rows, name), device=device)

    offsets = np.cumsum([0, *(len(row.rollout_ids) for row in rows)])
    sequences = [row.sequence_ids[row.loss_mask] + at for row, at in zip(rows, offsets, strict=False)]
    sampler = tensor("sampler_logprobs")
    has_old = all(row.old_logprobs is not None for row in rows)
    has_reference = all(row.reference_logprobs is not None for row in rows)
    if mismatch_from == "old" and not has_old:
        mismatch_from = "policy"
    return LossInputs(
        policy_logprobs=policy_logprobs,
        old_logprobs=tensor("old_logprobs") if has_old else sampler,
        sampler_logprobs=sampler,
        loss_mask=torch.ones(len(sampler), dtype=torch.bool, device=device),
        advantages=tensor("advantages"),
        sequence_ids=_long(np.concatenate(sequences), device),
        num_sequences=int(offsets[-1]),
        reference_logprobs=tensor("reference_logprobs") if has_reference else None,
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


def _scored(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.concatenate([getattr(row, name)[row.loss_mask] for row in rows])


def _scored_kept(rows: Sequence[Row]) -> list[list[int] | None] | None:
    if all(row.kept_ids is None for row in rows):
        return None
    kept: list[list[int] | None] = []
    for row in rows:
        ids = row.kept_ids or [None] * row.tokens
        kept += [ids[t] for t in np.flatnonzero(row.loss_mask)]
    return kept


def _long(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(array, dtype=torch.long).to(device, non_blocking=True)
