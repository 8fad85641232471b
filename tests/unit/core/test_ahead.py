"""Asynchronous sampling: work during an evaluation, the noise of rollouts, dropped groups, and the last step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules
from shoal.core.errors import DataError, DeadlineError
from shoal.core.state import EvalCadence, LoopSettings, SaveCadence
from shoal.core.types import Prompt, RolloutGroup, SamplingParams

from .groups import make_collector, make_group, make_stream, mixed
from .world import Plan, World, events_of, journal_of, metrics_of, noise_schedule

HALF_NOISY = noise_schedule(0.05, 0.05, stages=2, total_steps=6)  # versions 3, 4 and 5 sample with noise


class Watched(World):
    """Records the noise of each rollout, and the rollouts that run during each evaluation."""

    def __init__(self, path: Path, plan: Plan) -> None:
        super().__init__(path, plan)
        self.met: set[tuple[int, float]] = set()  # versions that sampled rollouts, with their noise
        self.out = 0
        self.out_in_evaluations: list[int] = []

    async def _group(self, prompt: Prompt) -> RolloutGroup:
        self.out += 1
        for _ in range(3 + prompt.index % 5):
            self.met.add(self.engine.loads[-1])
            await asyncio.sleep(0.001)
        self.out -= 1
        return await super()._group(prompt)

    async def _eval_group(self, prompt: Prompt, size: int, sampling: SamplingParams) -> RolloutGroup:
        self.out_in_evaluations.append(self.out)
        await asyncio.sleep(0.004)
        return await super()._eval_group(prompt, size, sampling)


def watched(path: Path, level: int, noise: Callable[[int], float] | None) -> Watched:
    settings = LoopSettings(6, SaveCadence(9), EvalCadence(2, at_start=False), sigma_at=noise)
    world = Watched(path, Plan(eval_rewards=float, admission=Admission(4, 2, 1, level, 4, 6), settings=settings))
    assert world.run() == "finished"
    return world


@pytest.mark.parametrize("level", [1, 3])
def test_noise_free_evaluation_does_not_block_sampling(tmp_path: Path, level: int):
    world = watched(tmp_path, level, None)
    during = world.out_in_evaluations  # two prompts each, after steps 2, 4 and 6
    # Later, all groups up to the last step may have finished.
    assert len(during) == 6 and max(during[:2]) > 0, "groups were running during the evaluation"
    assert during[4:] == [0, 0], "after the last step nothing is sampled"


@pytest.mark.parametrize("level", [0, 1, 2])  # at 3, the last groups finish before the noise is applied
def test_rollouts_in_flight_keep_the_noise_of_their_version(tmp_path: Path, level: int):
    """An evaluation removes the noise, so rollouts in flight finish before it starts."""
    world = watched(tmp_path, level, HALF_NOISY)
    assert world.met == {(version, HALF_NOISY(version + 1)) for version, _ in world.met}
    assert {sigma for _, sigma in world.met} == {0.0, 0.05}, "rollouts were sampled with and without noise"
    assert (4, 0.0) in world.engine.loads and (4, 0.05) in world.engine.loads, "the evaluation had no noise"
    assert world.out_in_evaluations[2:4] == [0, 0], "version 4 is noisy, so its evaluation used the sampler alone"


@pytest.mark.parametrize("lockstep", [False, True])
def test_step_is_recorded_while_the_next_is_sampled(tmp_path: Path, lockstep: bool):
    """The first two groups of a step are sampled before the previous step is on disk, with its weights."""
    out: list[tuple[int, int]] = []
    world = World(tmp_path, Plan(group_waits=lambda prompt: out.append((prompt.index, world.engine.version))))
    begun: list[int] = []

    def write_and_count(step: int, lines: Any) -> Path:
        begun.append(len(world.loop.parts.collector._running))
        return ordinary(step, lines)

    ordinary, world.run_dir.write_rollouts = world.run_dir.write_rollouts, write_and_count  # type: ignore[method-assign]
    world.loop.parts.collector._rules = GroupRules(lockstep=lockstep)
    assert world.run() == "finished"
    # After the second step a checkpoint is written first, which uses the device. After the fourth there is no step.
    assert begun == ([0] * 4 if lockstep else [2, 0, 2, 0])
    assert [version for _, version in out] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (Plan(rewards=lambda _: [1.0, 1.0], settings=LoopSettings(9, SaveCadence(100))), 5),  # solved
        (Plan(eval_rewards=lambda n: -n, settings=LoopSettings(9, SaveCadence(100), EvalCadence(1), stop_after=2)), 2),
    ],
    ids=("solved", "no better"),
)
def test_no_prompts_are_drawn_after_the_last_step(tmp_path: Path, plan: Plan, steps: int):
    begun: list[int] = []
    world = World(tmp_path, plan)
    begin = world.loop.parts.collector.begin
    world.loop.parts.collector.begin = lambda version: (begun.append(version), begin(version))[1]  # type: ignore[method-assign]
    world.run()
    assert len(journal_of(tmp_path)) == steps and begun == list(range(1, steps))


def test_early_failure_of_a_prompt_keeps_earlier_steps(tmp_path: Path):
    """The third step's first prompt raises while the second step is recorded: the record is completed, then the error
    is raised.
    """
    world = World(tmp_path, Plan(settings=LoopSettings(4, SaveCadence(100))))
    stream, drawn = world.loop.parts.stream, []
    ordinary = stream.next

    def failing(step: int) -> Prompt:
        drawn.append(None)
        if len(drawn) > 4:
            raise DataError("letters: there is no fifth")
        return ordinary(step)

    stream.next = failing  # type: ignore[method-assign]
    with pytest.raises(DataError, match="no fifth"):
        world.run()
    assert [record["step"] for record in journal_of(tmp_path)] == [1, 2]


def test_draining_has_a_deadline_and_loses_nothing():
    async def run(slow_s: float, deadline_s: float) -> Collector:
        async def run_group(prompt: Prompt) -> RolloutGroup:
            started.append(prompt)
            await asyncio.sleep(slow_s if len(started) > 2 else 0.0)
            return make_group(prompt, [0.0, 1.0])

        started: list[Prompt] = []
        collector = Collector(
            run_group, make_stream(), Admission(4, 2, async_level=1), GroupRules(deadline_s=deadline_s)
        )
        first = await collector.collect(0, asyncio.Event())
        try:
            await collector.drain()
            second = await collector.collect(1, asyncio.Event())
            assert len(first.kept) == len(second.kept) == 2
        finally:
            await collector.cancel()
        return collector

    asyncio.run(run(0.02, 5.0))
    with pytest.raises(DeadlineError, match=r"none finished; raise orch.deadline_s"):
        asyncio.run(run(60.0, 0.05))


@pytest.mark.parametrize(("interval", "level"), [(1, 0), (1, 1), (1, 4), (3, 0), (2, 2), (0, 1)])
def test_no_groups_are_sampled_beyond_the_last_step(interval: int, level: int):
    """Five steps of two groups: ten groups are sampled at any level, and every step is full."""
    collector, runner = make_collector(mixed, Admission(4, 2, interval, level, last_step=5))

    async def run() -> list[int]:
        kept = []
        for version in range(5):
            if collector.admission.syncs_at(version):
                runner.version = version
            kept.append(len((await collector.collect(version, asyncio.Event())).kept))
        return kept

    assert asyncio.run(run()) == [2] * 5
    assert len(runner.dispatched) == 10


def test_stale_groups_are_named(tmp_path: Path):
    """Windows of three with a maximum age of one version: groups of the third step of a window are stale."""
    plan = Plan(admission=Admission(4, 2, 3, 0, 1), settings=LoopSettings(3, SaveCadence(9)))
    world = World(tmp_path, plan)
    world.run()
    (event,) = events_of(tmp_path, "stale")
    dropped = [name for name, reason in journal_of(tmp_path)[2]["dropped"].items() if reason == "stale"]
    assert event["step"] == 3 and sorted(event["data"]["groups"]) == sorted(dropped) and dropped
    assert f"{len(dropped)} stale groups" in event["message"]
    assert metrics_of(tmp_path)[2]["group/stale"] == len(dropped)


def test_late_group_is_dropped_on_arrival(tmp_path: Path):
    """Level 1, and the first group needs three steps: it is stale when it finishes, and is not trained."""
    gate = asyncio.Event()
    slow: list[str] = []

    class Slow(World):
        async def _group(self, prompt: Prompt) -> RolloutGroup:
            drawn_by = self.engine.version
            if not slow:
                slow.append(prompt.group_id)
                await gate.wait()
            elif self.engine.version >= 3:
                gate.set()
                await asyncio.sleep(0.01)
            return _drawn_by(await super()._group(prompt), drawn_by)

    world = Slow(tmp_path, Plan(admission=Admission(4, 2, 1, 1, last_step=6), settings=LoopSettings(6, SaveCadence(9))))
    assert world.run() == "finished"
    journal = journal_of(tmp_path)
    assert [record["dropped"].get(slow[0]) for record in journal].count("stale") == 1
    assert not any(rollout_id.startswith(f"{slow[0]}/") for record in journal for rollout_id in record["rollout_ids"])
    assert all(line["staleness/max"] <= 1 and line["batch/used"] == 4 for line in metrics_of(tmp_path))


def _drawn_by(group: RolloutGroup, version: int) -> RolloutGroup:
    for rollout in group.rollouts:
        spans: Sequence = rollout.turns[0].completion.spans
        rollout.turns[0].completion.spans = [type(spans[0])(0, 1, version)]
    return group
