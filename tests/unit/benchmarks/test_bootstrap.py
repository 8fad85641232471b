"""The paired bootstrap interval: pairing, coverage, and the interval of the normal distribution for large samples."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from support.pages import ROOT


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bootstrap

    yield bootstrap
    sys.modules.pop("bootstrap", None)


def named(values: Any) -> dict[str, float]:
    return {str(number): float(value) for number, value in enumerate(values)}


def test_a_constant_difference_has_no_width(bootstrap: Any):
    hard = np.random.default_rng(0).random(50)
    found = bootstrap.paired_bootstrap(named(hard + 0.25), named(hard))
    assert found.value == pytest.approx(0.25) and found.problems == 50
    assert (found.low, found.high) == pytest.approx((0.25, 0.25))


def test_interval_of_many_problems_is_the_normal_one(bootstrap: Any):
    draw = np.random.default_rng(1)
    ours, theirs = draw.random(1319) < 0.12, draw.random(1319) < 0.08
    gaps = ours.astype(float) - theirs.astype(float)
    half = 1.96 * gaps.std() / math.sqrt(len(gaps))
    found = bootstrap.paired_bootstrap(named(ours), named(theirs))
    assert found.value == pytest.approx(gaps.mean())
    assert found.low == pytest.approx(gaps.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(gaps.mean() + half, abs=0.1 * half)


def test_answers_are_paired_by_problem_and_not_by_order(bootstrap: Any):
    ours = named(np.arange(20) % 2)
    turned = dict(reversed(ours.items()))
    assert bootstrap.paired_bootstrap(ours, turned)[:3] == (0.0, 0.0, 0.0)


def test_the_interval_covers_the_true_difference_about_as_often_as_it_says(bootstrap: Any):
    draw, covered = np.random.default_rng(2), 0
    for trial in range(100):
        ours, theirs = draw.random(200) < 0.4, draw.random(200) < 0.3
        found = bootstrap.paired_bootstrap(named(ours), named(theirs), seed=trial)
        covered += found.low <= 0.1 <= found.high
    assert 88 <= covered <= 100


@pytest.mark.parametrize(("ours", "theirs"), [({"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0}), ({"a": 1.0}, {"a": 1.0})])
def test_other_problems_or_too_few_are_refused(bootstrap: Any, ours: dict[str, float], theirs: dict[str, float]):
    with pytest.raises(ValueError, match="problems"):
        bootstrap.paired_bootstrap(ours, theirs)
