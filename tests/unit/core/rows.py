"""Random packed rows for tests: interleaved sequences, and random values where the mask is false."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shoal.core.loss_inputs import LossInputs

from .reference import PlainRow

GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0])


def random_row(seed: int, tokens: int = 48, sequences: int = 5, drift: float = 0.7) -> PlainRow:
    """`drift` is the distance between the four policies, in nats. The last sequence has no trained token."""
    rng = np.random.default_rng(seed)
    seq = rng.integers(0, sequences, tokens)
    mask = (rng.random(tokens) < 0.75) & (seq != sequences - 1)
    inf = -rng.exponential(1.0, tokens)
    row = PlainRow(
        lp=np.minimum(inf + drift * rng.normal(size=tokens), -1e-3),
        old=np.minimum(inf + drift * rng.normal(size=tokens), -1e-3),
        inf=inf,
        ref=np.minimum(inf + drift * rng.normal(size=tokens), -1e-3),
        m=mask,
        a=rng.normal(size=sequences)[seq] + 0.1 * rng.normal(size=tokens),
        seq=seq,
        num_sequences=sequences,
    )
    return row


def with_garbage(row: PlainRow, seed: int) -> PlainRow:
    """The same row with other values at all untrained positions, including sequence ids."""
    rng = np.random.default_rng(seed)

    def spoil(values: np.ndarray) -> np.ndarray:
        return np.where(row.m, values, rng.choice(GARBAGE, len(row.m)))

    seq = np.where(row.m, row.seq, rng.integers(0, row.num_sequences, len(row.m)))
    return replace(
        row, lp=spoil(row.lp), old=spoil(row.old), inf=spoil(row.inf), ref=spoil(row.ref), a=spoil(row.a), seq=seq
    )


def to_inputs(row: PlainRow, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, LossInputs]:
    """The leaf tensor that receives gradients, and the inputs made from it."""
    leaf = torch.tensor(row.lp, dtype=dtype, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=torch.tensor(row.old, dtype=dtype),
        sampler_logprobs=torch.tensor(row.inf, dtype=dtype),
        reference_logprobs=torch.tensor(row.ref, dtype=dtype),
        loss_mask=torch.tensor(row.m),
        advantages=torch.tensor(row.a, dtype=dtype),
        sequence_ids=torch.tensor(row.seq),
        num_sequences=row.num_sequences,
    )
    return leaf, inputs


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> np.ndarray:
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return grad.numpy()
