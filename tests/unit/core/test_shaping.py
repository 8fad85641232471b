"""Truncation, scale, bias and clip, in this order, computed manually."""

from __future__ import annotations

import pytest

from shoal.core.advantages import RewardShape
from shoal.core.types import Completion, FinishReason, Prompt, Rollout, Turn


def rollout(tokens: int, reason: FinishReason = "stop", earlier: int = 0) -> Rollout:
    turns = []
    answers: tuple[tuple[int, FinishReason], ...] = ((earlier, "stop"), (tokens, reason))
    for size, how in answers:
        if size:
            turns.append(Turn([1], Completion("r", [5] * size, [-1.0] * size, [], how)))
    return Rollout(Prompt("env", 0, []), 0, turns)


CUT, WHOLE = rollout(100, "length"), rollout(100)


def test_default_shape_changes_nothing() -> None:
    for made in (CUT, WHOLE):
        assert RewardShape()(0.7, made, 100) == 0.7 and RewardShape().trains(made)


def test_scale_then_bias_then_clip() -> None:
    assert RewardShape(scale=2, bias=0.5)(0.7, WHOLE, 100) == pytest.approx(1.9)
    shape = RewardShape(scale=2, bias=0.5, clip=(-1.0, 1.0))
    assert [shape(reward, WHOLE, 100) for reward in (0.7, -3, 0.1)] == pytest.approx([1, -1, 0.7])


def test_truncated_reward_is_zero() -> None:
    shape = RewardShape(truncated="zero", scale=3, bias=1)
    assert shape(0.7, CUT, 100) == 1, "scale and bias apply to a zero like to any reward"
    assert shape(0.7, WHOLE, 100) == pytest.approx(3.1)
    assert shape.trains(CUT)


def test_mask_keeps_the_reward_and_leaves_the_tokens_out() -> None:
    shape = RewardShape(truncated="mask")
    assert shape(0.7, CUT, 100) == 0.7
    assert not shape.trains(CUT) and shape.trains(WHOLE)


@pytest.mark.parametrize(("tokens", "penalty"), ((50, 0), (80, 0), (81, 0.05), (90, 0.5), (100, 1), (140, 1)), ids=str)
def test_overlong_grows_over_the_last_tokens(tokens: int, penalty: float) -> None:
    shape = RewardShape(truncated="overlong", overlong_tokens=20, overlong_factor=1.0)
    assert shape(0.7, rollout(tokens), 100) == pytest.approx(0.7 - penalty)
    twice = RewardShape(truncated="overlong", overlong_tokens=20, overlong_factor=2.0)
    assert twice(0.7, rollout(tokens), 100) == pytest.approx(0.7 - 2 * penalty)


def test_conversation_is_truncated_if_its_last_answer_is() -> None:
    assert rollout(5, "length", earlier=7).truncated and not rollout(5, "stop", earlier=7).truncated
    assert not rollout(0).truncated
