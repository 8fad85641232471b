"""Replay of groups: which are stored, drawn and dropped, what a resume keeps, and what learning does to them."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.types import Completion, Prompt, Rollout, RolloutGroup, Span, Turn
from shoal.signals.advantages import AdvantageNormalizer, every_reward, total_reward
from shoal.signals.replay import GroupReplay, ReplaySettings


def group(index: int, version: int = 0, rewards: tuple[float | None, ...] = (0.0, 1.0)) -> RolloutGroup:
    prompt = Prompt("env", index, [{"role": "user", "content": str(index)}])
    rollouts = []
    for number, reward in enumerate(rewards):
        completion = Completion("r", [3, 4], [-0.1 * (number + 1), -1 / 3], [Span(0, 2, version)], "stop", "ab")
        status = "ok" if reward is not None else "error"
        rollouts.append(Rollout(prompt, number, [Turn([1, 2], completion)], status, reward, reward))
    return RolloutGroup(prompt, rollouts, version)


def replay(groups: int = 1, max_age: int = 2, times: int = 1, seed: int = 0) -> GroupReplay:
    return GroupReplay(ReplaySettings(groups, max_age, times, seed), total_reward)


def names(groups: list[RolloutGroup]) -> list[str]:
    return [group.prompt.group_id for group in groups]


def draw(made: GroupReplay, kept: list[RolloutGroup], version: int) -> list[RolloutGroup]:
    """The replayed groups of a step."""
    mixed = made.mix(kept, version)
    assert [found for found in mixed if found.prompt.attempt == 0] == kept, "in their order"
    return [found for found in mixed if found.prompt.attempt > 0]


def test_matches_manual_computation():
    """One group per step, each replayed once while it is at most two versions old."""
    made = replay()
    assert draw(made, [group(0)], 0) == [] and made.metrics == {"replay/frac": 0.0}
    (again,) = draw(made, [group(1, 1)], 1)
    assert again.prompt.group_id == "env/0/0/1" and again.version == 0
    assert [rollout.rollout_id for rollout in again.rollouts] == ["env/0/0/1/0", "env/0/0/1/1"]
    assert [rollout.reward for rollout in again.rollouts] == [0.0, 1.0]
    assert [rollout.turns for rollout in again.rollouts] == [rollout.turns for rollout in group(0).rollouts]
    assert made.metrics == {"replay/frac": 0.5, "replay/age": 1.0}
    assert names(draw(made, [group(2, 2)], 2)) == ["env/1/0/1"]
    assert draw(made, [group(5, 5)], 5) == [], "the group of version 2 is too old"
    assert draw(made, [], 6) == [], "a step that trains nothing replays nothing"
    assert names(draw(made, [group(7, 7)], 7)) == ["env/5/0/1"], "and uses no stored group"


def test_replayed_groups_are_spread_over_the_minibatches():
    made = replay(groups=2)
    made.mix([group(0), group(1)], 0)
    mixed = made.mix([group(index, 1) for index in range(2, 6)], 1)
    assert ["r" if found.prompt.attempt else "k" for found in mixed] == list("krkkrk")


def test_only_useful_groups_are_stored():
    """Two different rewards are needed; rollouts without one are left out. Parts count if advantages use them."""
    groups = [group(0, 0, (1.0, 1.0)), group(1, 0, (1.0, None)), group(2, 0, (None, 0.0, 1.0)), group(3, 0, (None,))]
    made = replay(groups=9)
    draw(made, groups, 0)
    (found,) = draw(made, [group(9, 1)], 1)
    assert found.prompt.index == 2 and [rollout.index for rollout in found.rollouts] == [1, 2]
    alike = group(4, 0, (1.0, 1.0))
    alike.rollouts[0].parts = {"style": 1.0}
    detailed = GroupReplay(ReplaySettings(9, 2), every_reward)
    draw(detailed, [alike], 0)
    assert names(draw(detailed, [group(9, 1)], 1)) == ["env/4/0/1"]


def test_training_does_not_change_stored_groups():
    """The KL in the reward and the advantages are those of each step: a replay starts from the sampled rewards."""
    made, fresh = replay(groups=1, max_age=9, times=3), group(0)
    expected = [-np.sqrt(0.5), np.sqrt(0.5)]  # of the rewards 0 and 1, with the unbiased standard deviation √½
    for version in range(3):
        groups = [fresh] if version == 0 else draw(made, [group(version, version, (1.0, 1.0))], version)
        if version == 0:
            draw(made, groups, 0)
        assert [rollout.reward for rollout in groups[0].rollouts] == [0.0, 1.0]
        AdvantageNormalizer().assign(groups)
        found = [rollout.advantage for rollout in groups[0].rollouts]
        np.testing.assert_allclose(np.array(found, dtype=float), expected, rtol=1e-5)
        for rollout in groups[0].rollouts:
            assert rollout.reward is not None
            rollout.reward -= 0.25  # as core.learn subtracts a KL
            rollout.token_advantages = [[9.0, 9.0]]
        groups[0].drop_reason = "stale"


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    limits=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    stop=st.integers(0, 11),
)
def test_replay_limits_hold_for_any_run(counts: list[int], limits: tuple[int, int, int], stop: int):
    """Never too many, too old or too often, and no id twice. A resume after any step, through JSON, changes nothing."""
    made, seen, times, index = replay(*limits), Counter[str](), Counter[int](), 0
    for version, count in enumerate(counts):
        kept = [group(index + number, version) for number in range(count)]
        index += count
        found = draw(made, kept, version)
        if version == stop:
            state = json.loads(msgspec.json.encode(made.state()))
            made = replay(*limits)
            made.load_state(state)
        assert len(found) <= limits[0] and (kept or not found)
        assert all(1 <= version - again.version <= limits[1] for again in found)
        seen.update(rollout.rollout_id for again in [*kept, *found] for rollout in again.rollouts)
        times.update(again.prompt.index for again in found)
        undisturbed = replay(*limits)
        start = 0
        for earlier, size in enumerate(counts[: version + 1]):
            expected = draw(undisturbed, [group(start + number, earlier) for number in range(size)], earlier)
            start += size
        assert found == expected
    assert max(seen.values(), default=0) <= 1 and max(times.values(), default=0) <= limits[2]


def test_every_group_has_the_same_chance():
    """One of four stored groups is drawn: each in about a quarter of the cases, and differently by seed."""
    drawn = Counter[int]()
    for seed in range(2000):
        made = replay(seed=seed)
        draw(made, [group(index) for index in range(4)], 0)
        drawn.update(again.prompt.index for again in draw(made, [group(9, 1)], 1))
    assert sorted(drawn) == [0, 1, 2, 3] and all(400 < count < 600 for count in drawn.values())  # 500 ± 19


def test_age_is_that_of_the_oldest_token():
    made, mixed = replay(max_age=2), group(0, 3)
    mixed.rollouts[1].turns[0].completion.spans.insert(0, Span(0, 1, 1))
    draw(made, [mixed], 3)
    assert draw(made, [group(1, 4, (1.0, 1.0))], 4) == []
    assert made.metrics == {"replay/frac": 0.0}


@pytest.mark.parametrize("state", [[], [msgspec.to_builtins(group(0))]])
def test_state_of_an_earlier_run(state: list[object]):
    made = replay()
    made.load_state(state)
    assert len(draw(made, [group(1, 1)], 1)) == len(state)
