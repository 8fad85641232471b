"""Known intervals: Student's table, Wilson's formula, pass@k by counting."""

from __future__ import annotations

import itertools
import math

import pytest

from shoal.build.evaluate import average, difference, interval, pass_at, student_quantile


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (1000, 1.962)],
)
def test_student_by_the_table(freedom: int, value: float):
    assert student_quantile(0.975, freedom) == pytest.approx(value, abs=0.012)


def test_average_is_over_prompts():
    estimate = average({0: [0.0], 1: [1.0, 1.0, 0.5, 0.5], 2: [0.3], 3: []})
    assert estimate.value == pytest.approx((0 + 0.75 + 0.3) / 3) and estimate.prompts == 3


def test_interval_matches_manual_computation():
    estimate = interval([0.2, 0.4, 0.6, 0.9])
    mean, sd = 0.525, math.sqrt(((0.325**2) + (0.125**2) + (0.075**2) + (0.375**2)) / 3)
    assert estimate.value == pytest.approx(mean)
    assert estimate.high - mean == pytest.approx(3.182 * sd / 2, rel=0.01) and mean - estimate.low == pytest.approx(
        estimate.high - mean
    )


def test_perfect_score_has_a_wide_interval():
    """Wilson: 8 of 8 gives at least 0.676, 0 of 8 at most 0.324."""
    assert (interval([1.0] * 8).low, interval([1.0] * 8).high) == pytest.approx((0.6756, 1.0), abs=1e-4)
    assert (interval([0.0] * 8).low, interval([0.0] * 8).high) == pytest.approx((0.0, 0.3244), abs=1e-4)


@pytest.mark.parametrize("solved", range(5))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_counts_the_draws(solved: int, k: int):
    rewards = [1.0] * solved + [0.4] * (4 - solved)
    draws = list(itertools.combinations(rewards, k))
    assert pass_at({0: rewards}, k).value == pytest.approx(sum(max(draw) >= 1 for draw in draws) / len(draws))


def test_paired_difference_is_narrower_than_two_intervals():
    hard = [0.1 * n for n in range(10)]
    ours = {n: [value + 0.05 + 0.01 * (n % 2)] for n, value in enumerate(hard)}
    theirs = {n: [value] for n, value in enumerate(hard)}
    gap = difference(ours, theirs)
    assert gap.value == pytest.approx(0.055) and gap.low > 0.05
    assert average(ours).low < average(theirs).high, "unpaired intervals overlap"
    assert difference(theirs, ours).value == pytest.approx(-0.055)
    assert difference({0: [1.0], 1: []}, {0: [0.5], 2: [1.0]}).prompts == 1


def test_too_few_prompts_have_no_interval():
    """Two rewards of 0.2 and 0.9 would have an interval from -3.9 to 5. Zeros and ones use Wilson's interval for any
    number.
    """
    few = interval([0.2, 0.9])
    assert few.value == pytest.approx(0.55) and math.isnan(few.low) and math.isnan(few.high)
    assert str(few) == "0.55 (too few for an interval)"
    assert str(interval([0.25])) == "0.25 (too few for an interval)"
    assert str(interval([1.0])) == "1 [0.2065, 1]"
    assert "(" not in str(interval([0.2, 0.9, 0.4, 0.3]))
