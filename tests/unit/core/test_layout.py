"""A common prefix of samples of a group is stored once per row: which tokens, where, and the savings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batching import Packing, make_batches
from shoal.core.types import Row, Sample

from .steps import steps


def sample(name: str, prompt: Sequence[int], completion: Sequence[int], group: str = "g") -> Sample:
    ids = np.array([*prompt, *completion])
    mask = np.arange(len(ids)) >= max(1, len(prompt))
    logprobs = np.where(mask, -0.5, 0).astype(np.float32)
    ones = np.ones(len(ids), dtype=np.float32)
    return Sample(name, group, ids, mask, logprobs, ones, ones * ord(name))


def answers(group: str, prompt: Sequence[int], *lengths: int) -> list[list[Sample]]:
    """One rollout per completion length. Completions differ from their first token."""
    return [[sample(f"{n}", prompt, [100 + n] * length, group)] for n, length in enumerate(lengths)]


def rows_of(step: list[list[Sample]], budget: int = 1000, share: bool = True) -> list[Row]:
    (batch,) = make_batches(step, Packing(budget, "token-mean", 16, share_prefixes=share))
    return batch.rows


def test_row_of_the_documented_example() -> None:
    (row,) = rows_of([[sample("a", [5, 6], [7, 2])], [sample("b", [5, 6], [8])]])
    assert row.token_ids.tolist() == [5, 6, 7, 2, 8]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert row.segment_starts.tolist() == [0, 2, 4, 5] and row.segment_prefix.tolist() == [-1, 0, 0]
    assert row.predecessors[row.loss_mask].tolist() == [1, 2, 1], "both answers begin after the 6"
    assert row.loss_mask.tolist() == [False, False, True, True, True]
    assert row.sequence_ids[row.loss_mask].tolist() == [0, 0, 1] and row.rollout_ids == ["a", "b"]
    assert row.advantages[row.loss_mask].tolist() == [97, 97, 98]
    assert (row.tokens, row.sample_tokens) == (5, 7)


def test_group_in_one_row_counts_its_prompt_once() -> None:
    (row,) = rows_of(answers("g", range(40), 7, 3, 9, 1))
    assert row.tokens == 40 + 20 and row.sample_tokens == 4 * 40 + 20


def test_groups_do_not_share_with_each_other() -> None:
    first, second = answers("g", [1, 2, 3], 2, 2), [[s] for s in (sample("x", [1, 2, 3], [9], "h"),)]
    (row,) = rows_of(first + second)
    assert row.segment_prefix.tolist() == [-1, 0, 0, -1] and row.tokens == 3 + 4 + 4


def test_trained_token_is_never_shared() -> None:
    """Both answers start with the same two tokens, and the second has a shorter prompt."""
    (row,) = rows_of([[sample("a", [1, 2, 3], [4, 5, 6])], [sample("b", [1, 2], [3, 4, 7])]])
    assert row.segment_starts.tolist()[1] == 2 and row.loss_mask.sum() == 6
    assert row.tokens == 2 + 4 + 3


def test_prefix_sharing_ends_at_the_first_difference() -> None:
    (row,) = rows_of([[sample("a", [1, 2, 3, 4], [5])], [sample("b", [1, 2, 9, 4], [5])]])
    assert row.segment_prefix.tolist() == [-1, 0, 0] and row.segment_starts.tolist() == [0, 2, 5, 8]
    apart = rows_of([[sample("a", [1, 2], [5])], [sample("b", [9, 2], [5])]])
    assert [row.segment_prefix.tolist() for row in apart] == [[-1, -1]]


def test_group_larger_than_a_row_has_its_prompt_in_each() -> None:
    """After a prompt of 4, a row of 10 has space for 6 tokens: answers of 4 + 2, of 3 + 3, and of 2."""
    rows = rows_of(answers("g", range(4), 3, 4, 2, 3, 2), 10)
    assert [row.tokens for row in rows] == [10, 10, 6]
    assert [row.rollout_ids for row in rows] == [["1", "2"], ["0", "3"], ["4"]]
    assert [row.segment_prefix.tolist() for row in rows] == [[-1, 0, 0], [-1, 0, 0], [-1]]


def test_groups_that_fit_are_kept_together() -> None:
    """Groups of 9, 6 and 7 tokens in rows of 16, longest first: the last fits beside the first."""
    step = answers("g", range(3), 2, 4) + answers("h", range(4), 1, 1) + answers("i", range(5), 1, 1)
    for number, rollout in enumerate(step):
        rollout[0].rollout_id = f"{rollout[0].group_id}{number}"
    rows = rows_of(step, 16)
    assert [row.rollout_ids for row in rows] == [["g1", "g0", "i4", "i5"], ["h2", "h3"]]
    assert [row.tokens for row in rows] == [16, 6]
    assert rows[0].segment_prefix.tolist() == [-1, 0, 0, -1, 3, 3]


def test_turns_of_one_rollout_share_too() -> None:
    """A history that diverges after the prompt: two samples of one rollout, one prefix, one sequence."""
    (row,) = rows_of([[sample("a", [1, 2, 3], [4, 5]), sample("a", [1, 2, 3, 8, 9], [6])]])
    assert row.rollout_ids == ["a"] and row.segment_prefix.tolist() == [-1, 0, 0]
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 6] and set(row.sequence_ids.tolist()) == {0}


@settings(deadline=None)
@given(steps(), st.integers(8, 40))
def test_sharing_saves_tokens_and_changes_no_weight(step: list[list[Sample]], budget: int) -> None:
    batches = [make_batches(step, Packing(budget, "prompt-mean", 16, share_prefixes=share)) for share in (True, False)]
    shared, alone = ([row for batch in found for row in batch.rows] for found in batches)
    assert all((row.segment_prefix == -1).all() and row.tokens == row.sample_tokens for row in alone)
    assert sum(row.tokens for row in shared) <= sum(row.tokens for row in alone)
    for row in shared:
        lengths = np.diff(row.segment_starts)
        users = np.bincount(row.segment_prefix[row.segment_prefix >= 0], minlength=len(lengths))
        assert row.sample_tokens - row.tokens == sum((users - 1)[users > 0] * lengths[users > 0])
        assert not (users == 1).any(), "tokens of a single sample are not a separate segment"
    totals = [sum(row.weights.sum() for row in rows) for rows in (shared, alone)]
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-12)
