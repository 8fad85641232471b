"""Rows in micro-batches: within both bounds, few, of equal size, and a smaller bound after running out of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.batching import micro_batches, smaller

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 200) | st.none(), st.integers(1, 8) | st.none())
def test_every_row_once_in_order_and_within_the_bounds(sizes: list[int], tokens: int | None, most: int | None) -> None:
    parts = micro_batches(sizes, tokens, most)
    assert [at for part in parts for at in part] == list(range(len(sizes)))
    for part in parts:
        assert most is None or len(part) <= most
        assert tokens is None or len(part) == 1 or sum(sizes[part.start : part.stop]) <= tokens


@pytest.mark.parametrize(
    ("sizes", "bound", "most", "expected"),
    [
        ([5, 1, 1, 1, 5, 1], 8, None, [[5, 1, 1], [1, 5, 1]]),
        ([1, 9, 1, 1], 3, None, [[1], [9], [1, 1]]),  # a row that is too large alone is a separate micro-batch
        ([4, 4, 4, 4, 4], 16, None, [[4, 4, 4], [4, 4]]),
        ([1, 1, 1, 1, 9], 13, None, [[1, 1, 1, 1, 9]]),
        ([1, 1, 1, 1, 9], 12, None, [[1, 1, 1, 1], [9]]),
        ([1] * 5, 100, 2, [[1, 1], [1, 1], [1]]),
        ([1] * 5, None, 4, [[1] * 4, [1]]),  # the user set the number of rows
        ([1] * 5, None, None, [[1] * 5]),
        ([], 5, None, []),
    ],
)
def test_few_parts_of_equal_size(
    sizes: list[int], bound: int | None, most: int | None, expected: list[list[int]]
) -> None:
    assert [sizes[part.start : part.stop] for part in micro_batches(sizes, bound, most)] == expected


def test_half_of_the_largest_unless_each_is_a_row() -> None:
    assert smaller([[10, 30], [5]]) == 20
    assert smaller([[40], [5]]) is None
