"""The collector: groups of a step, their order, dropped groups and reasons, and that each group is settled once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.admission import Admission
from shoal.core.collect import CollectedGroups, Collector, GroupRules, StopRequested, zero_variance_kind
from shoal.core.errors import DeadlineError
from shoal.core.types import Prompt, RolloutGroup

from .groups import (
    ShuffledRunner,
    every_third_flat,
    make_collector,
    make_group,
    make_prompt,
    make_stream,
    make_turn,
    mixed,
)

TIMEOUT_S = 20


def steps_of(collector: Collector, runner: ShuffledRunner, steps: int, first: int = 0) -> list[CollectedGroups]:
    """Collect `steps` steps and sync the runner's version as the loop does."""

    async def run() -> list[CollectedGroups]:
        collected = []
        for version in range(first, first + steps):
            if collector.admission.syncs_at(version):
                runner.version = version
            collected.append(await asyncio.wait_for(collector.collect(version, asyncio.Event()), TIMEOUT_S))
        await collector.cancel()
        return collected

    return asyncio.run(run())


def ids(groups: Sequence[RolloutGroup]) -> list[str]:
    return [group.prompt.group_id for group in groups]


@pytest.mark.parametrize("seed", range(5))
def test_synchronous_steps_are_in_prompt_order_whatever_finishes_first(seed: int):
    collector, runner = make_collector(every_third_flat, Admission(12, 2), seed=seed)
    steps = steps_of(collector, runner, 4)
    stream = make_stream()
    expected = [stream.next() for _ in range(60)]
    kept = [p.group_id for p in expected if p.index % 3][: 4 * 6]
    assert [group_id for step in steps for group_id in ids(step.kept)] == kept
    order = {p.group_id: i for i, p in enumerate(expected)}
    for step in steps:
        places = [order[group_id] for group_id in ids(step.dropped)]
        assert places == sorted(places), "including dropped groups, which the metrics contain"
    assert [p.group_id for p in runner.finished] != [p.group_id for p in runner.dispatched], "the order was shuffled"


def test_dropped_groups_have_a_reason_and_are_replaced():
    def rewards(prompt: Prompt) -> Sequence[float | None]:
        kinds = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.5], [None, 1.0], [None, None]]
        return kinds[prompt.index % 5]

    collector, runner = make_collector(rewards, Admission(8, 2), GroupRules(max_refill=50))
    (step,) = steps_of(collector, runner, 1)
    assert len(step.kept) == 4 and {group.prompt.index % 5 for group in step.kept} == {0}
    wanted = {1: "uniform-good", 2: "uniform", 3: "too-few-scored", 4: "too-few-scored"}
    assert {group.prompt.index % 5: group.drop_reason for group in step.dropped} == wanted
    assert len(step.all) + step.surplus == len(runner.dispatched)


@pytest.mark.parametrize(
    ("reward", "highest", "kind"),
    [
        (1.0, None, "uniform-good"), (0.0, None, "uniform-bad"), (0.95, None, "uniform"), (-2.0, None, "uniform-bad"),
        (0.95, 1.0, "uniform-bad"), (0.0, 0.0, "uniform-good"), (-1.0, 0.0, "uniform-bad"), (1.0, 2.0, "uniform-bad"),
        (0.95, 0.95, "uniform-good"),
    ],
)  # fmt: skip
def test_group_is_solved_at_the_highest_reward_of_its_environment(reward: float, highest: float | None, kind: str):
    group = make_group(Prompt("letters", 0, []), [reward, reward])
    group.max_reward = highest
    assert zero_variance_kind(group) == kind


@pytest.mark.parametrize("max_refill", [0, 1, 3])
def test_refills_are_bounded_and_the_next_step_starts_afresh(max_refill: int):
    """All groups have zero variance: a step samples its groups and a limited number of further batches, then continues
    with none.
    """
    collector, runner = make_collector(lambda _: [0.0, 0.0], Admission(8, 2), GroupRules(max_refill=max_refill))
    steps = steps_of(collector, runner, 3)
    assert [len(step.kept) for step in steps] == [0, 0, 0]
    assert [len(step.dropped) for step in steps] == [4 * (1 + max_refill)] * 3


def test_short_step_does_not_affect_later_steps():
    """Step 1 stays short because its replacements are used up. From step 2 on all steps are full."""
    drawn: list[Prompt] = []

    def rewards(prompt: Prompt) -> Sequence[float]:
        drawn.append(prompt)
        return [0.0, 0.0] if len(drawn) <= 3 else [0.0, 1.0]

    collector, runner = make_collector(rewards, Admission(8, 2), GroupRules(max_refill=0))
    steps = steps_of(collector, runner, 4)
    assert [len(step.kept) for step in steps] == [1, 4, 4, 4]


def test_skipped_groups_are_not_replaced():
    collector, runner = make_collector(every_third_flat, Admission(12, 2), GroupRules(uniform="skip"))
    steps = steps_of(collector, runner, 4)
    assert [len(step.all) for step in steps] == [6] * 4
    assert all(group.prompt.index % 3 == 0 for step in steps for group in step.dropped)
    assert sum(len(step.dropped) for step in steps) > 0


def test_kept_uniform_groups_are_trained_but_unscored_ones_are_not():
    def rewards(prompt: Prompt) -> Sequence[float | None]:
        return [None, None] if prompt.index % 2 else [1.0, 1.0]

    collector, runner = make_collector(rewards, Admission(8, 2), GroupRules(uniform="keep"))
    (step,) = steps_of(collector, runner, 1)
    assert len(step.kept) == 4 and all(group.prompt.index % 2 == 0 for group in step.kept)
    assert {group.drop_reason for group in step.dropped} == {"too-few-scored"}


def test_zero_variance_kind_uses_the_raw_reward():
    """Shaping changes the reward of a solved prompt. The environment defines the reward of a solved prompt."""

    async def run_group(prompt: Prompt) -> RolloutGroup:
        group = make_group(prompt, [-3.0, -3.0])
        for rollout in group.rollouts:
            rollout.raw_reward = 1.0
        return group

    collector = Collector(run_group, make_stream(), Admission(4, 2), GroupRules(max_refill=0))
    step = asyncio.run(collector.collect(0, asyncio.Event()))
    assert {group.drop_reason for group in step.dropped} == {"uniform-good"}


def test_user_filter_receives_only_mixed_groups():
    seen: list[RolloutGroup] = []

    def keep(group: RolloutGroup) -> bool:
        seen.append(group)
        return group.prompt.index % 2 == 0

    collector, runner = make_collector(every_third_flat, Admission(8, 2), GroupRules(keep=keep, max_refill=20))
    (step,) = steps_of(collector, runner, 1)
    assert all(group.prompt.index % 2 == 0 and group.prompt.index % 3 for group in step.kept)
    assert all(len(set(group.rewards)) > 1 for group in seen)
    reasons = Counter(group.drop_reason for group in step.dropped)
    assert set(reasons) == {"filtered", "uniform-bad"}


def test_replacing_zero_variance_groups_is_reported() -> None:
    """Every third group has equal rewards. Without replacement nothing is reported."""
    reports: list[tuple[int, float]] = []

    async def collect(rules: GroupRules) -> CollectedGroups:
        collector, _ = make_collector(every_third_flat, Admission(24, 2), rules)
        report = lambda needed, share: reports.append((needed, share))  # noqa: E731
        step = await collector.collect(0, asyncio.Event(), refilling=report)
        await collector.cancel()
        return step

    step = asyncio.run(collect(GroupRules(max_refill=20)))
    needed = [needed for needed, _ in reports]
    assert needed == sorted(needed, reverse=True) and 1 <= needed[-1] <= needed[0] <= 12 and reports
    assert all(0 < share < 1 for _, share in reports) and len(step.kept) == 12
    dropped, settled = len(step.dropped), len(step.all)
    assert abs(reports[-1][1] - dropped / settled) < 0.2
    reports.clear()
    asyncio.run(collect(GroupRules(uniform="skip")))
    assert reports == []


def test_stale_groups_are_dropped_before_training():
    """O = 3, but a maximum age of one version: groups sampled too far ahead are sampled again."""
    admission = Admission(4, 2, async_level=3, max_off_policy_steps=1)
    collector, runner = make_collector(mixed, admission)
    steps = steps_of(collector, runner, 5)
    for version, step in enumerate(steps):
        assert len(step.kept) == 2
        assert all(version - group.version <= 1 for group in step.kept)
        assert all(group.drop_reason == "stale" and version - group.version > 1 for group in step.dropped)
    assert sum(len(step.dropped) for step in steps) > 0


def test_staleness_uses_the_oldest_token():
    async def run_group(prompt: Prompt) -> RolloutGroup:
        group = make_group(prompt, [0.0, 1.0], version=5)
        if len(out) == 0:
            group.rollouts[1].turns.insert(0, make_turn(version=3))
        out.append(prompt)
        return group

    out: list[Prompt] = []
    admission = Admission(4, 2, interval=2, accepted=5 * 4)
    collector = Collector(run_group, make_stream(), admission, GroupRules())
    step = asyncio.run(collector.collect(5, asyncio.Event()))
    assert [group.drop_reason for group in step.dropped] == ["stale"]
    assert step.dropped[0].prompt is out[0] and len(step.kept) == 2


def test_wait_past_its_deadline_names_waiter_and_target():
    async def never(prompt: Prompt) -> RolloutGroup:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    collector = Collector(never, make_stream(), Admission(8, 2), GroupRules(deadline_s=0.05))
    with pytest.raises(DeadlineError) as error:
        asyncio.run(collector.collect(0, asyncio.Event()))
    first = make_stream().next()
    assert "the loop waited" in str(error.value) and "4 groups" in str(error.value)
    assert first.group_id in str(error.value) and "orch.deadline_s" in str(error.value)


def test_stop_request_ends_the_wait_at_once():
    async def never(prompt: Prompt) -> RolloutGroup:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    async def run() -> dict:
        stop = asyncio.Event()
        collector = Collector(never, make_stream(), Admission(8, 2), GroupRules())
        asyncio.get_running_loop().call_later(0.02, stop.set)
        with pytest.raises(StopRequested):
            await asyncio.wait_for(collector.collect(0, stop), TIMEOUT_S)
        state = collector.state()
        await collector.cancel()
        return state

    stream = make_stream()
    assert asyncio.run(run())["again"] == [stream.next() for _ in range(4)]


@pytest.mark.parametrize(("interval", "level"), [(1, 0), (2, 0), (0, 0), (1, 1), (3, 2)])
def test_state_survives_json_and_nothing_is_lost_or_doubled(interval: int, level: int):
    """Stop after three steps with groups ready and prompts running, and continue in a new collector from JSON alone."""

    async def begin() -> tuple[bytes, dict, list[CollectedGroups]]:
        collector, runner = make_collector(every_third_flat, Admission(8, 2, interval, level), seed=3)
        steps = []
        for version in range(3):
            if collector.admission.syncs_at(version):
                runner.version = version
            steps.append(await collector.collect(version, asyncio.Event()))
            await asyncio.sleep(0)
        state = msgspec.json.encode(collector.state())
        cursor = collector._stream.state()
        await collector.cancel()
        return state, cursor, steps

    state, cursor, before = asyncio.run(begin())
    collector, runner = make_collector(every_third_flat, Admission(8, 2, interval, level), seed=4)
    decoded = msgspec.json.decode(state)
    collector._stream.load_state(cursor)
    collector.load_state(decoded)
    runner.version = 0 if interval == 0 else 3
    again = [msgspec.convert(prompt, Prompt).group_id for prompt in decoded["again"]]
    after = steps_of(collector, runner, 4, first=3)
    assert [p.group_id for p in runner.dispatched][: len(again)] == again, (
        "prompts that were running are sampled first, in order"
    )
    trained = [group_id for step in [*before, *after] for group_id in ids(step.kept)]
    assert max(Counter(trained).values()) == 1
    assert [len(step.kept) for step in [*before, *after]] == [4] * 7
    accounted = Counter(group_id for step in [*before, *after] for group_id in ids(step.all))
    left = msgspec.to_builtins(collector.state())
    stream = make_stream()
    drawn = [stream.next().group_id for _ in range(sum(cursor["positions"].values()))]
    pending = {msgspec.convert(p, Prompt).group_id for p in left["again"]}
    pending |= {msgspec.convert(g["prompt"], Prompt).group_id for g in left["ready"]}
    assert all(accounted[group_id] + (group_id in pending) == 1 for group_id in drawn)


def test_ready_groups_round_trip_whole():
    """Every field that a step needs later: tokens, log-probs, spans, rewards, kept ids."""

    async def run_group(prompt: Prompt) -> RolloutGroup:
        group = make_group(prompt, [0.25, 1.0], version=0)
        for rollout in group.rollouts:
            rollout.turns[0].completion.kept_ids = [[3, 9], [4]]
            rollout.parts = {"style": 0.5}
        return group

    async def run() -> tuple[Collector, bytes]:
        collector = Collector(run_group, make_stream(), Admission(4, 2, async_level=1), GroupRules())
        await collector.collect(0, asyncio.Event())
        return collector, msgspec.json.encode(collector.state())

    collector, state = asyncio.run(run())
    ready = [group for _, group in collector._ready]
    assert ready, "a group is ready beyond the step"
    other, _ = make_collector(mixed, Admission(4, 2, async_level=1))
    other.load_state(msgspec.json.decode(state))
    assert [group for _, group in other._ready] == ready
    assert other.admission.accepted == collector.admission.accepted


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 4),
    interval=st.integers(0, 3),
    level=st.integers(0, 2),
    uniform=st.sampled_from(["refill", "skip", "keep"]),
    max_refill=st.integers(0, 2),
    flat=st.integers(0, 9),
    seed=st.integers(0, 2**16),
)
def test_every_dispatched_group_is_settled_exactly_once(
    groups: int,
    interval: int,
    level: int,
    uniform: Literal["refill", "skip", "keep"],
    max_refill: int,
    flat: int,
    seed: int,
):
    """Any mode, share of zero-variance groups and order: each group is in exactly one step, or running or ready."""
    admission = Admission(groups * 2, 2, interval, level)
    rules = GroupRules(uniform, max_refill, deadline_s=TIMEOUT_S)
    collector, runner = make_collector(
        lambda prompt: [0.0, 0.0] if prompt.index % 10 < flat else [0.0, 1.0], admission, rules, seed
    )
    steps = steps_of(collector, runner, 8)
    settled = Counter(group_id for step in steps for group_id in ids(step.all))
    state = collector.state()
    left = Counter([*(p.group_id for p in state["again"]), *ids(state["ready"])])
    dispatched = Counter(p.group_id for p in runner.dispatched)
    assert (settled + left).total() + sum(step.surplus for step in steps) == dispatched.total()
    assert max((settled + left).values()) == 1 and (settled + left).keys() <= dispatched.keys()
    assert admission.synchronous or settled + left == dispatched, "only synchronous training has surplus groups"
    horizon = admission.window_start(7) + max(interval, 1) + level
    assert admission.accepted + admission.running <= horizon * admission.batch
    for version, step in enumerate(steps):
        assert len(step.kept) <= groups
        assert not any(admission.is_stale(version, group.version) for group in step.kept)
        if uniform == "keep" or flat == 0:
            assert len(step.kept) == groups
        elif uniform == "refill" and len(step.kept) < groups:
            assert len(step.dropped) >= max_refill * groups, "a short step has used up its replacements"


@settings(max_examples=80, deadline=None)
@given(
    groups=st.integers(1, 6),
    max_refill=st.integers(0, 4),
    share=st.floats(0, 1),
    lockstep=st.booleans(),
    seed=st.integers(0, 2**16),
    restart=st.integers(0, 5),
)
def test_replacements_ahead_change_neither_the_steps_nor_the_cursor(
    groups: int, max_refill: int, share: float, lockstep: bool, seed: int, restart: int
):
    """Any share of useful groups, order of completion and resume: the result of groups that run one after another."""
    chooser = random.Random(seed)
    useful = [chooser.random() < share for _ in range(1000)]
    rewards = lambda prompt: [0.0, 1.0] if useful[prompt.index] else [1.0, 1.0]  # noqa: E731
    stream, expected = make_stream(), []
    for _ in range(5):
        kept, dropped = [], []
        while len(kept) < groups and len(kept) + len(dropped) < groups * (1 + max_refill):
            prompt = stream.next()
            (kept if useful[prompt.index] else dropped).append(prompt.group_id)
        expected.append((kept, dropped, stream.state()))

    async def run() -> list[tuple[list[str], list[str], dict]]:
        rules = GroupRules(max_refill=max_refill, lockstep=lockstep)
        collector, runner = make_collector(rewards, Admission(groups * 2, 2, last_step=5), rules, seed)
        found = []
        for version in range(5):
            if version == restart:  # during the early dispatch, from the content of a checkpoint
                collector.begin(version)
                cursor, state = collector._stream.state(), msgspec.json.encode(collector.state())
                await collector.cancel()
                collector, runner = make_collector(rewards, Admission(groups * 2, 2, last_step=5), rules, seed + 1)
                collector._stream.load_state(cursor)
                collector.load_state(msgspec.json.decode(state))
                runner.version = version
            step = await collector.collect(version, asyncio.Event())
            found.append((ids(step.kept), ids(step.dropped), collector._stream.state()))
            assert collector.admission.running == 0 and not collector._running
            runner.version = version + 1
            collector.begin(version + 1)
        await collector.cancel()
        return found

    assert asyncio.run(run()) == expected


def test_replacements_are_dispatched_before_they_are_needed():
    """With one useful group in three, a step of 8 groups needs few rounds, and surplus groups are cancelled."""

    class Rounds:
        """All running groups end together, so each round is one wait for the engine."""

        def __init__(self) -> None:
            self.out: list[tuple[Prompt, asyncio.Future[RolloutGroup]]] = []
            self.cancelled = 0

        async def __call__(self, prompt: Prompt) -> RolloutGroup:
            future = asyncio.get_running_loop().create_future()
            self.out.append((prompt, future))
            try:
                return await future
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    async def run() -> tuple[list[int], int, int]:
        runner = Rounds()
        collector = Collector(runner, make_stream(), Admission(16, 2), GroupRules(max_refill=20))
        rounds, surplus = [], 0
        for version in range(6):
            collecting, waits = asyncio.ensure_future(collector.collect(version, asyncio.Event())), 0
            while not collecting.done():
                for _ in range(10):
                    await asyncio.sleep(0)
                # the oldest groups first, as in an engine with 8 slots
                running, runner.out = runner.out[:8], runner.out[8:]
                waits += bool(running)
                for prompt, future in running:
                    if not future.done():
                        future.set_result(make_group(prompt, [0.0, 1.0 * (prompt.index % 3 == 0)], version))
            runner.out.clear()
            step = await collecting
            assert len(step.kept) == 8
            rounds.append(waits - len(step.all) / 8)
            surplus += step.surplus
        return rounds, surplus, runner.cancelled

    rounds, surplus, cancelled = asyncio.run(run())
    assert sum(rounds[1:]) < 1.5 * len(rounds[1:]), "hardly more rounds of the engine than its groups need"
    assert surplus >= cancelled > 0


def test_group_of_one_is_kept_for_batch_statistics():
    """It has nothing to compare with. Only a rollout without a reward is dropped."""

    def rewards(prompt: Prompt) -> Sequence[float | None]:
        return [None] if prompt.index % 2 else [1.0]

    collector, runner = make_collector(rewards, Admission(4, 1), GroupRules(uniform="keep"))
    (step,) = steps_of(collector, runner, 1)
    assert len(step.kept) == 4 and all(group.rewards == [1.0] for group in step.kept)
    assert {group.drop_reason for group in step.dropped} <= {"too-few-scored"}


def test_waiting_cost_does_not_depend_on_groups_in_flight():
    """Groups finish one by one, and the collector handles one at a time: ten times as many groups cost ten times as
    much.
    """

    def cpu_s_a_group(groups: int) -> float:
        out: list[asyncio.Future[RolloutGroup]] = []

        async def run_group(prompt: Prompt) -> RolloutGroup:
            out.append(asyncio.get_running_loop().create_future())
            return await out[-1]

        async def run() -> float:
            collector = Collector(run_group, make_stream(10_000), Admission(2 * groups, 2), GroupRules())
            collecting = asyncio.ensure_future(collector.collect(0, asyncio.Event()))
            while len(out) < groups:
                await asyncio.sleep(0)
            before = time.process_time()
            for future in out:
                future.set_result(make_group(make_prompt(), [0.0, 1.0]))
                for _ in range(6):  # iterations in which the collector wakes, settles the group and waits again
                    await asyncio.sleep(0)
            assert len((await collecting).kept) == groups
            return (time.process_time() - before) / groups

        return asyncio.run(run())

    cpu_s_a_group(100)
    assert cpu_s_a_group(3000) < 6 * cpu_s_a_group(300)  # checking all groups each time: over ten
