"""The normaliser, by manual computation and by relations between the named estimators."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.advantages import is_uniform, reward_kl
from shoal.signals.advantages import AdvantageNormalizer

rewards = st.floats(-100, 100)
groups = st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=5)


def test_matches_manual_computation() -> None:
    group = [[0.0, 1.0, 1.0, 0.0]]
    std = math.sqrt(1 / 3)
    half = 0.5 / (std + 1e-6)
    assert AdvantageNormalizer().estimate(group)[0] == pytest.approx([-half, half, half, -half])
    assert AdvantageNormalizer(std="none").estimate(group)[0] == [-0.5, 0.5, 0.5, -0.5]
    assert AdvantageNormalizer(std="none", leave_one_out=True).estimate(group)[0] == pytest.approx(
        [-2 / 3, 2 / 3, 2 / 3, -2 / 3]
    )
    assert AdvantageNormalizer(mean="none", std="none").estimate(group)[0] == group[0]


def test_batch_statistics_span_all_groups() -> None:
    step = [[0.0, 2.0], [4.0, 6.0]]
    std = float(np.std([0, 2, 4, 6], ddof=1)) + 1e-6
    plus_plus = AdvantageNormalizer(mean="batch", std="batch").estimate(step)
    assert plus_plus[0] == pytest.approx([-3 / std, -1 / std]) and plus_plus[1] == pytest.approx([1 / std, 3 / std])
    lite = AdvantageNormalizer(std="batch").estimate(step)
    assert lite[0] == pytest.approx([-1 / std, 1 / std]) == lite[1]
    assert AdvantageNormalizer(mean="batch", std="batch").estimate([[3.0]]) == [[0.0]]


@settings(deadline=None)
@given(groups)
def test_leave_one_out_is_a_scaled_group_mean(step: list[list[float]]) -> None:
    plain = AdvantageNormalizer(std="none").estimate(step)
    rloo = AdvantageNormalizer(std="none", leave_one_out=True).estimate(step)
    for group, centred, left_out in zip(step, plain, rloo, strict=True):
        size = len(group)
        np.testing.assert_allclose(left_out, np.array(centred) * size / (size - 1), rtol=1e-12)
        direct = [r - (sum(group) - r) / (size - 1) for r in group]
        np.testing.assert_allclose(left_out, direct, atol=1e-10)


@settings(deadline=None)
@given(groups, st.floats(0.1, 10), st.floats(-5, 5))
def test_scale_and_bias_change_nothing_before_a_std(step: list[list[float]], scale: float, bias: float) -> None:
    def spread(group: list[float]) -> float:
        return float(np.std(group, ddof=1))

    step = [group for group in step if spread(group) > 0.1]
    moved = AdvantageNormalizer().estimate([[scale * r + bias for r in group] for group in step])
    for before, after in zip(AdvantageNormalizer().estimate(step), moved, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-3)


@settings(deadline=None)
@given(rewards, st.integers(2, 7))
def test_uniform_groups_have_exactly_zero_advantage(reward: float, size: int) -> None:
    group = [reward] * size
    assert is_uniform(group)
    for normaliser in (
        AdvantageNormalizer(),
        AdvantageNormalizer(std="none", leave_one_out=True),
        AdvantageNormalizer(std="batch"),
    ):
        assert normaliser.estimate([group, [0.0, 1.0]])[0] == [0.0] * size


def test_zero_variance_is_exact_equality() -> None:
    assert not is_uniform([1e30, 1e30 * (1 + 2**-52)])
    assert not is_uniform([0.0, 5e-324]) and not is_uniform([])


def test_only_batch_statistics_keep_uniform_groups() -> None:
    kept = {
        (m, s)
        for m in ("group", "batch", "none")
        for s in ("group", "batch", "none")
        if AdvantageNormalizer(m, s).keeps_uniform
    }
    assert kept == {("batch", "batch"), ("group", "batch"), ("none", "batch"), ("batch", "none")}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdvantageNormalizer(mean="median").estimate([]), "advantage.mean"),  # type: ignore[arg-type]
        (lambda: AdvantageNormalizer(mean="batch", leave_one_out=True), "leave_one_out"),
        (lambda: AdvantageNormalizer().estimate([[1.0]]), "at least two"),
        (lambda: AdvantageNormalizer().estimate([[1.0, math.nan]]), "finite"),
    ],
)
def test_bad_input_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_kl_in_the_reward() -> None:
    policy, reference = np.array([np.nan, -1.0, -2.0, -1.0]), np.array([np.nan, -1.5, -1.0, -90.0])
    mask = np.array([False, True, True, True])
    assert reward_kl(policy, reference, mask, 0.1) == pytest.approx(0.1 * (0.5 - 1.0 + 20.0))
    assert reward_kl(policy, reference, ~mask & False, 0.1) == 0.0


def test_no_torch_is_loaded() -> None:
    code = "import sys, shoal.core.advantages, shoal.core.batching"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
