"""Any split into rows, micro-batches and ranks, in any order, gives the same loss, gradient and metrics.

The policy is a bigram table, so the log-prob of a token depends on its segment only, and packing errors are visible.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import AGGREGATIONS, Packing, count_totals, make_batches
from shoal.core.loss_inputs import LossInputs
from shoal.core.losses import LOSSES, Reinforce
from shoal.core.objective import Objective
from shoal.core.terms import KLPenalty, NoCorrection, TruncatedImportance
from shoal.core.types import Batch, Row, Sample

from .steps import VOCABULARY, random_step, steps

TABLES = {name: torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
          for seed, name in enumerate(("policy", "old", "reference"))}  # fmt: skip

Outcome = tuple[np.ndarray, dict[str, tuple[float, float]]]


def bigram_logprobs(table: torch.Tensor, row: Row) -> torch.Tensor:
    """[T]. Values across a segment boundary are meaningless, as in a real forward pass, and masked."""
    ids = torch.tensor(row.token_ids)
    found = torch.log_softmax(table, dim=-1)[ids[row.predecessors], ids]
    return torch.cat([torch.full((1,), torch.nan, dtype=table.dtype), found[1:]])


def run(batches: list[Batch], objective: Objective) -> Outcome:
    table = TABLES["policy"].clone().requires_grad_()
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for batch in batches:
        for row in batch.rows:
            inputs = LossInputs(
                policy_logprobs=bigram_logprobs(table, row),
                old_logprobs=bigram_logprobs(TABLES["old"], row),
                sampler_logprobs=torch.tensor(row.sampler_logprobs),
                reference_logprobs=bigram_logprobs(TABLES["reference"], row),
                loss_mask=torch.tensor(row.loss_mask),
                advantages=torch.tensor(row.advantages),
                sequence_ids=torch.tensor(row.sequence_ids),
                num_sequences=len(row.rollout_ids),
            )
            loss, metrics = objective(inputs, torch.tensor(row.weights))
            loss.backward()
            for name, pair in metrics.items():
                sums[name] += [float(value) for value in pair]
    assert table.grad is not None
    return table.grad.numpy(), {name: (float(pair[0]), float(pair[1])) for name, pair in sums.items()}


def assert_same(one: Outcome, other: Outcome) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=0, atol=1e-10)
    assert set(one[1]) == set(other[1])
    for name, pair in one[1].items():
        assert pair == pytest.approx(other[1][name], abs=1e-10, rel=1e-10), name


def pack(step: list[list[Sample]], aggregation: str, budget: int) -> list[Batch]:
    return make_batches(step, Packing(budget, aggregation, max_tokens=9))


def make_objective(name: str) -> Objective:
    loss = LOSSES[name]
    correction = TruncatedImportance(cap=1.5, level="sequence") if loss.takes_correction else NoCorrection()
    return Objective(loss(correction=correction, kl=KLPenalty(beta=0.1 if loss.takes_kl else 0.0)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_order_and_ranks_do_not_matter(name: str, aggregation: str) -> None:
    step = random_step(len(name))
    objective = make_objective(name)
    whole = run(pack(step, aggregation, 10_000), objective)
    assert np.abs(whole[0]).max() > 1e-6
    assert_same(whole, run(pack(step, aggregation, 12), objective))
    assert_same(whole, run(make_batches(step, Packing(24, aggregation, 9, share_prefixes=False)), objective))
    order = np.random.default_rng(0).permutation(len(step))
    assert_same(whole, run(pack([step[i] for i in order], aggregation, 24), objective))
    rows = [row for batch in pack(step, aggregation, 16) for row in batch.rows]
    assert len(rows) >= 3
    assert_same(whole, run([Batch(rows[rank::3]) for rank in range(3)], objective))  # as `deal` divides them


@settings(max_examples=25, deadline=None)
@given(steps(), st.integers(8, 40), st.sampled_from(AGGREGATIONS), st.sampled_from(["grpo", "gspo", "masked"]))
def test_loss_does_not_depend_on_budget_or_order(
    step: list[list[Sample]], budget: int, aggregation: str, name: str
) -> None:
    if not count_totals(step).tokens:
        return
    objective = make_objective(name)
    assert_same(
        run(pack(step, aggregation, 10_000), objective),
        run(pack(step[::-1], aggregation, budget), objective),
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_is_the_aggregation_written_out(aggregation: str) -> None:
    """Compared with nested means over rollouts and groups, for a loss of -A·lp per token."""
    step = random_step(5)
    objective = Objective(Reinforce(ratio="none"))
    _, metrics = run(pack(step, aggregation, 12), objective)
    table = torch.log_softmax(TABLES["policy"], dim=-1).numpy()
    per_rollout: dict[str, list[float]] = {}
    group_of: dict[str, str] = {}
    for samples in step:
        losses = [
            -float(s.advantages[t]) * float(table[s.token_ids[t - 1], s.token_ids[t]])
            for s in samples
            for t in range(s.tokens)
            if s.loss_mask[t]
        ]
        if losses:
            per_rollout[samples[0].rollout_id] = losses
            group_of[samples[0].rollout_id] = samples[0].group_id
    everything = [loss for losses in per_rollout.values() for loss in losses]
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout_id, losses in per_rollout.items():
        groups[group_of[rollout_id]] += losses
    expected = {
        "token-mean": np.mean(everything),
        "token-sum": np.sum(everything),
        "seq-mean-token-mean": np.mean([np.mean(losses) for losses in per_rollout.values()]),
        "seq-mean-token-sum-norm": np.mean([np.sum(losses) / 9 for losses in per_rollout.values()]),
        "prompt-mean": np.mean([np.mean(losses) for losses in groups.values()]),
    }[aggregation]
    assert metrics["policy/loss"] == (pytest.approx(expected, abs=1e-12), 0.0)
