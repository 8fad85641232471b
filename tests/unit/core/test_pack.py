"""Packing loses no token, stays within its budget, and weighs every token by the definition of the aggregation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import AGGREGATIONS, Packing, Totals, count_totals, make_batches, split_minibatches
from shoal.core.types import Batch, Row, Sample

from .steps import make_sample, steps

MAX_TOKENS = 16
BUDGET = 10


def pack(
    step: list[list[Sample]], aggregation: str = "token-mean", budget: int = BUDGET, minibatches: int = 1
) -> list[Batch]:
    return make_batches(step, Packing(budget, aggregation, MAX_TOKENS, minibatches))


def trainable(step: list[list[Sample]]) -> list[Sample]:
    return [sample for samples in step for sample in samples if sample.loss_mask.any()]


def sequence(rollout_id: str, group_id: str, prompt: int, completion: int) -> list[Sample]:
    mask = [False] * prompt + [True] * completion
    return [make_sample(rollout_id, group_id, mask, np.random.default_rng(0))]


def described(rollout_id: str, source: Row | Sample, at: np.ndarray) -> tuple[Any, ...]:
    """All data of the sample at `at`. Advantages count only at trained tokens."""
    arrays = (source.token_ids, source.loss_mask, source.sampler_logprobs, source.temperatures)
    return (rollout_id, *(a[at].tolist() for a in arrays), source.advantages[at][source.loss_mask[at]].tolist())


def unpack(row: Row) -> list[tuple[Any, ...]]:
    """The samples of a row, each assembled from its prefix segment and its own segment."""
    assert row.segment_starts[0] == 0 and row.segment_starts[-1] == row.tokens
    segments = [np.arange(start, end) for start, end in pairwise(row.segment_starts)]
    shared = set(row.segment_prefix[row.segment_prefix >= 0].tolist())
    samples = []
    for index, (own, prefix) in enumerate(zip(segments, row.segment_prefix, strict=True)):
        at = own if prefix < 0 else np.concatenate([segments[prefix], own])
        assert row.position_ids[at].tolist() == list(range(len(at)))
        assert row.predecessors[at[1:]].tolist() == at[:-1].tolist()
        if index in shared:
            assert prefix == -1 and not row.loss_mask[own].any() and not row.weights[own].any()
        else:
            (owner,) = set(row.sequence_ids[own].tolist())
            samples.append(described(row.rollout_ids[owner], row, at))
    return samples


@settings(deadline=None)
@given(steps(), st.integers(1, 4))
def test_packing_keeps_every_sample_once(step: list[list[Sample]], minibatches: int) -> None:
    rows = [row for batch in pack(step, minibatches=minibatches) for row in batch.rows]
    packed = [sample for row in rows for sample in unpack(row)]
    assert sorted(packed) == sorted(described(s.rollout_id, s, np.arange(s.tokens)) for s in trainable(step))
    trained = sum(int(sample.loss_mask.sum()) for sample in trainable(step))
    assert sum(int(row.loss_mask.sum()) for row in rows) == trained, "each in one place"
    assert sum(row.sample_tokens for row in rows) == sum(sample.tokens for sample in trainable(step))


@settings(deadline=None)
@given(steps(), st.integers(1, 4))
def test_budget_and_whole_rollouts(step: list[list[Sample]], minibatches: int) -> None:
    rows = [row for batch in pack(step, minibatches=minibatches) for row in batch.rows]
    for row in rows:
        single = len(row.rollout_ids) == 1 and len(row.segment_starts) > 2
        assert row.tokens <= BUDGET or single
    owners = [rollout_id for row in rows for rollout_id in row.rollout_ids]
    assert len(owners) == len(set(owners)) == len({sample.rollout_id for sample in trainable(step)})


@settings(deadline=None)
@given(steps(), st.integers(1, 6))
def test_minibatches_hold_whole_groups_in_order(step: list[list[Sample]], minibatches: int) -> None:
    parts = split_minibatches(step, minibatches)
    groups = [list(dict.fromkeys(samples[0].group_id for samples in part)) for part in parts]
    flat = [group for part in groups for group in part]
    assert flat == list(dict.fromkeys(sample.group_id for sample in trainable(step)))
    assert len(parts) == min(minibatches, len(flat))
    sizes = [len(part) for part in groups]
    assert not sizes or max(sizes) - min(sizes) <= 1


def expected_weights(step: list[list[Sample]], aggregation: str) -> dict[str, float]:
    """Rollout id → the weight of one of its trained tokens, from the definition."""
    tokens: dict[str, int] = defaultdict(int)
    group_of: dict[str, str] = {}
    for sample in trainable(step):
        tokens[sample.rollout_id] += int(sample.loss_mask.sum())
        group_of[sample.rollout_id] = sample.group_id
    by_group: dict[str, int] = defaultdict(int)
    for rollout_id, group_id in group_of.items():
        by_group[group_id] += tokens[rollout_id]
    return {
        rollout_id: {
            "token-mean": 1 / sum(tokens.values()),
            "token-sum": 1.0,
            "seq-mean-token-mean": 1 / len(tokens) / tokens[rollout_id],
            "seq-mean-token-sum-norm": 1 / len(tokens) / MAX_TOKENS,
            "prompt-mean": 1 / len(by_group) / by_group[group_of[rollout_id]],
        }[aggregation]
        for rollout_id in tokens
    }


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=40, deadline=None)
@given(step=steps(), minibatches=st.integers(1, 3))
def test_weights_follow_the_definition(aggregation: str, step: list[list[Sample]], minibatches: int) -> None:
    parts = split_minibatches(step, minibatches)
    for part, batch in zip(parts, pack(step, aggregation, minibatches=minibatches), strict=True):
        expected = expected_weights(part, aggregation)
        total = 0.0
        for row in batch.rows:
            owners = np.array([expected[rollout_id] for rollout_id in row.rollout_ids])
            np.testing.assert_allclose(row.weights, np.where(row.loss_mask, owners[row.sequence_ids], 0.0), rtol=1e-12)
            assert row.weights.dtype == np.float64
            total += row.weights.sum()
        if "sum" not in aggregation:
            assert total == pytest.approx(1.0)


def test_weights_by_hand() -> None:
    """Two groups: completions of 1 and 3 tokens, and of 2. A third rollout of the first group has no trained token."""
    step = [sequence("a", "g", 2, 1), sequence("b", "g", 2, 3), sequence("c", "g", 3, 0), sequence("d", "h", 1, 2)]
    assert count_totals(step) == Totals(tokens=6, sequences=3, prompts=2)
    by_hand = {
        "token-mean": (1 / 6, 1 / 6, 1 / 6),
        "token-sum": (1, 1, 1),
        "seq-mean-token-mean": (1 / 3, 1 / 9, 1 / 6),
        "seq-mean-token-sum-norm": (1 / 48, 1 / 48, 1 / 48),
        "prompt-mean": (1 / 8, 1 / 8, 1 / 4),
    }
    assert set(by_hand) == set(AGGREGATIONS)
    for aggregation, expected in by_hand.items():
        (batch,) = pack(step, aggregation)
        found = {
            rollout_id: row.weights[(row.sequence_ids == i) & row.loss_mask][0]
            for row in batch.rows
            for i, rollout_id in enumerate(row.rollout_ids)
        }
        assert (found["a"], found["b"], found["d"]) == pytest.approx(expected), aggregation


def test_rollout_of_several_samples_stays_together() -> None:
    rng = np.random.default_rng(0)
    long = [make_sample("a", "g", [False] + [True] * 5, rng) for _ in range(3)]
    (batch,) = pack([long, sequence("b", "g", 1, 2)])
    assert [row.rollout_ids for row in batch.rows] == [["a"], ["b"]]
    assert [row.tokens for row in batch.rows] == [18, 3]
    assert batch.rows[0].segment_starts.tolist() == [0, 6, 12, 18]


def test_rows_are_filled_longest_first() -> None:
    step = [sequence(name, name, 1, size - 1) for name, size in zip("abcd", (4, 6, 3, 7), strict=True)]
    (batch,) = pack(step)
    assert [row.rollout_ids for row in batch.rows] == [["d", "c"], ["b", "a"]]


def test_kept_sets_travel_with_their_tokens() -> None:
    (first,) = sequence("a", "g", 1, 2)
    (second,) = sequence("b", "g", 1, 1)
    first = replace(first, kept_ids=[None, [1, 2], [3]])
    (batch,) = pack([[first], [second]])
    # Both start with the same token, which is stored once.
    assert batch.rows[0].kept_ids == [None, [1, 2], [3], None]
    assert pack([[second]])[0].rows[0].kept_ids is None


def test_empty_step_has_no_batch() -> None:
    assert pack([]) == [] and pack([sequence("a", "g", 3, 0), []]) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pack([sequence("a", "g", 9, 2)]), "a sample of a has 11 tokens, a row holds 10"),
        (lambda: pack([sequence("a", "g", 1, 2)] * 2), "given twice"),
        (lambda: pack([sequence("a", "g", 1, 2) + sequence("b", "g", 1, 2)]), "several rollouts"),
        (lambda: pack([sequence("a", "g", 1, 2)], "mean"), "aggregation must be one of"),
        (lambda: pack([sequence("a", "g", 1, 2)], budget=0), "token_budget"),
    ],
)
def test_bad_input_is_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
