"""Estimators over parts, turns and tokens against their float64 references, and functions written by the user."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.errors import UserCodeError
from shoal.core.types import RolloutGroup
from shoal.signals.advantages import (
    AdvantageNormalizer,
    CustomAdvantages,
    PartAdvantages,
    TurnAdvantages,
    every_reward,
    total_reward,
)
from unit.core.groups import make_group, make_prompt, make_turn
from unit.core.reference import gdpo, maxrl, per_turn, standardised


def group_with(turns: list[list[float]], index: int = 0) -> RolloutGroup:
    """One rollout per list; turn k of a rollout has k + 1 tokens, and the rewards of the list."""
    group = make_group(make_prompt(index), [sum(rewards) for rewards in turns])
    for rollout, rewards in zip(group.rollouts, turns, strict=True):
        rollout.turns = [make_turn([3] * (k + 1)) for k in range(len(rewards))]
        rollout.turn_rewards = rewards
    return group


@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 0], [1.0, 1, 0, 0], [0.2, 0.9, 0.4], [-1.0, 2.0, 0.5], [5.0, -4.9]])
def test_maxrl(rewards: list[float]) -> None:
    (found,) = AdvantageNormalizer("group", "mean").estimate([rewards])
    np.testing.assert_allclose(found, maxrl(rewards), rtol=1e-14, atol=1e-14)
    assert max(map(abs, found)) <= len(rewards) - 1


def test_maxrl_where_the_mean_is_not_positive() -> None:
    groups = [[0.0, 0.0, 0.0], [-1.0, 1.0], [-2.0, -1.0, 0.5], [1.0, 1.0]]
    assert AdvantageNormalizer("group", "mean").estimate(groups) == [[0.0] * len(group) for group in groups]
    assert AdvantageNormalizer("group", "mean").estimate([[1.0, 0.0, 0.0, 0.0]]) == [[3.0, -1.0, -1.0, -1.0]]


@pytest.mark.parametrize("rescale", [False, True])
def test_gdpo(rescale: bool) -> None:
    rng = np.random.default_rng(3)
    parts = [[{"right": float(rng.integers(0, 2)), "short": rng.normal()} for _ in range(5)] for _ in range(3)]
    weights = {"right": 2.0, "short": 0.3}
    groups = []
    for index, of_group in enumerate(parts):
        group = make_group(make_prompt(index), [2 * p["right"] + 0.3 * p["short"] for p in of_group])
        for rollout, values in zip(group.rollouts, of_group, strict=True):
            rollout.parts, rollout.part_weights = values, weights
        groups.append(group)
    PartAdvantages(AdvantageNormalizer(), rescale).assign(groups)
    for group, expected in zip(groups, gdpo(parts, weights, rescale), strict=True):
        np.testing.assert_allclose([r.advantage for r in group.rollouts], expected, rtol=1e-12, atol=1e-12)


def test_gdpo_distinguishes_equal_sums_of_parts() -> None:
    """Two rollouts with the total 1 and different parts: no signal in the total, one in the parts."""
    group = make_group(make_prompt(0), [1.0, 1.0, 1.0])
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]
    for rollout, values in zip(group.rollouts, parts, strict=True):
        rollout.parts, rollout.part_weights = values, {"a": 3.0}
    PartAdvantages(AdvantageNormalizer()).assign([group])
    assert group.rollouts[0].advantage == pytest.approx(2 * 2 / np.sqrt(3), rel=1e-5)
    assert len({total_reward(r) for r in group.rollouts}) == 1 and len({every_reward(r) for r in group.rollouts}) == 2


def test_gdpo_compares_a_part_among_the_rollouts_that_have_it() -> None:
    """By hand: `a` is 0 and 2 in the first two rollouts (mean 1, std √2), `b` only in the last one."""
    group = make_group(make_prompt(0), [0.0, 2.0, 7.0])
    for rollout, parts in zip(group.rollouts, ({"a": 0.0}, {"a": 2.0}, {"b": 7.0}), strict=True):
        rollout.parts = parts
    PartAdvantages(AdvantageNormalizer()).assign([group])
    assert advantages(group) == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-6)


def test_gdpo_rescales_with_the_same_eps() -> None:
    group = make_group(make_prompt(0), [0.0, 1.0])
    PartAdvantages(AdvantageNormalizer(eps=0.5), rescale=True).assign([group])
    first = 0.5 / (0.5**0.5 + 0.5)
    assert advantages(group)[1] == pytest.approx(first / (first * 2**0.5 + 0.5))


def advantages(group: RolloutGroup) -> list[float]:
    return [float(rollout.advantage) for rollout in group.rollouts if rollout.advantage is not None]


def test_gdpo_keeps_penalties_and_plain_rewards() -> None:
    plain = make_group(make_prompt(0), [0.0, 1.0, 1.0])
    PartAdvantages(AdvantageNormalizer()).assign([plain])
    np.testing.assert_allclose(advantages(plain), standardised([0.0, 1.0, 1.0]), atol=1e-15)
    shaped = make_group(make_prompt(0), [0.5, 1.0])
    for rollout in shaped.rollouts:
        rollout.parts, rollout.raw_reward = {"a": 1.0}, 1.0
    PartAdvantages(AdvantageNormalizer()).assign([shaped])
    np.testing.assert_allclose(advantages(shaped), standardised([-0.5, 0.0]), atol=1e-15)


@pytest.mark.parametrize(("credit", "discount"), [("turn", None), ("return", 1.0), ("return", 0.5)])
def test_turns(credit: str, discount: float | None) -> None:
    rng = np.random.default_rng(5)
    step = [[rng.normal(size=rng.integers(1, 4)).tolist() for _ in range(4)] for _ in range(3)]
    groups = [group_with(turns, index) for index, turns in enumerate(step)]
    TurnAdvantages(AdvantageNormalizer(), credit, discount or 1.0).assign(groups)  # type: ignore[arg-type]
    for group, turns in zip(groups, step, strict=True):
        for rollout, expected in zip(group.rollouts, per_turn(turns, discount), strict=True):
            assert rollout.token_advantages is not None
            assert [len(values) for values in rollout.token_advantages] == [k + 1 for k in range(len(expected))]
            for values, value in zip(rollout.token_advantages, expected, strict=True):
                np.testing.assert_allclose(values, value, rtol=1e-10, atol=1e-10)
            every = [v for values in rollout.token_advantages for v in values]
            assert rollout.advantage == pytest.approx(np.mean(every))


def test_tokens() -> None:
    group = group_with([[1.0, 0.0], [0.0]])
    for rollout, rewards in zip(group.rollouts, [[[0.5], [0.0, 1.0]], [[-1.0]]], strict=True):
        rollout.token_rewards, rollout.reward = rewards, sum(sum(turn) for turn in rewards)
    TurnAdvantages(AdvantageNormalizer(), "token", 0.5).assign([group])
    expected = standardised([0.5 + 0.5 * 0.5, 0.5, 1.0, -1.0])
    found = [value for r in group.rollouts for turn in r.token_advantages or [] for value in turn]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_reward_without_turns_belongs_to_the_last_turn() -> None:
    """The same for shaping: every turn has the same return, and only the last turn has its own reward."""
    groups = [group_with([[0.0, 0.0], [0.0, 0.0]]) for _ in range(2)]
    for group in groups:
        for rollout, reward in zip(group.rollouts, [1.0, 0.0], strict=True):
            rollout.turn_rewards, rollout.reward = None, reward
    TurnAdvantages(AdvantageNormalizer(std="none"), "return").assign(groups[:1])
    TurnAdvantages(AdvantageNormalizer(std="none"), "turn").assign(groups[1:])
    assert groups[0].rollouts[0].token_advantages == [[0.5], [0.5, 0.5]]
    assert groups[1].rollouts[0].token_advantages == [[0.0], [0.5, 0.5]]


def test_user_advantages_must_have_the_right_shape() -> None:
    assert CustomAdvantages(lambda step: [[2 * r for r in g] for g in step]).estimate([[1.0, 2.0]]) == [[2.0, 4.0]]
    with pytest.raises(ValueError, match="one number per reward"):
        CustomAdvantages(lambda step: [[1.0]]).estimate([[1.0, 2.0]])
    with pytest.raises(ValueError, match="finite"):
        CustomAdvantages(lambda step: [[np.inf, 1.0]]).estimate([[1.0, 2.0]])
    with pytest.raises(UserCodeError, match="advantage mine returned list: could not convert string to float"):
        CustomAdvantages(lambda step: [["high", 1.0]], "mine").estimate([[1.0, 2.0]])


def test_function_with_two_parameters_receives_parts_turns_and_tokens() -> None:
    group = group_with([[0.25, 0.5], [1.0]])
    group.rollouts[1].parts = {"style": 7.0}

    def credit(rewards, rollouts):
        ((first, second),) = rollouts
        assert rewards == [[0.75, 1.0]] and first.turns[1].completion.token_ids == [3, 3]
        return [[first.turn_rewards, [[second.parts["style"]]]]]

    CustomAdvantages(credit).assign([group])
    assert [r.token_advantages for r in group.rollouts] == [[[0.25], [0.5, 0.5]], [[7.0]]]
    assert group.rollouts[0].advantage == pytest.approx(1.25 / 3)


@pytest.mark.parametrize(
    ("returned", "said"),
    [([1.0, 2.0, 3.0], "2 turns"), ([[1.0], [1.0]], "tokens"), ([[1.0], [1.0, float("nan")]], "finite")],
)
def test_list_of_the_wrong_length_is_refused(returned: list, said: str) -> None:
    with pytest.raises(UserCodeError, match=said):
        CustomAdvantages(lambda rewards: [[returned]]).assign([group_with([[0.0, 1.0]])])
