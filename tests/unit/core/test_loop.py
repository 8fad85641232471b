"""Rules of the loop: the records of a step, when and why a run stops, and the weights that the sampler serves."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.admission import Admission
from shoal.core.collect import GroupRules
from shoal.core.errors import EXIT_STOPPED, DeadlineError, Interrupted, StoppedByPolicy, UserCodeError
from shoal.core.state import EvalCadence, LoopSettings, SaveCadence
from shoal.core.types import Prompt
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import read_metrics, rollouts_path
from shoal.watch.console import make_console

from .unigram import reinforce
from .world import Plan, World, events_of, journal_of, metrics_of, noise_schedule

NO_REFILL = GroupRules(max_refill=0)


def nan_at(*calls: int):
    """An objective whose gradient is nan at the given calls, counted from 1."""
    made = [0]

    def objective(logprobs, row):
        made[0] += 1
        return reinforce(logprobs, row) * (np.nan if made[0] in calls or not calls else 1.0)

    return objective


def rewards_by_draw(*kinds: Sequence[float]):
    """The first drawn prompt has the first kind of rewards, and so on. The last kind repeats."""
    drawn: list[Prompt] = []

    def rewards(prompt: Prompt) -> Sequence[float]:
        drawn.append(prompt)
        return kinds[min(len(drawn), len(kinds)) - 1]

    return rewards


def test_step_leaves_metrics_a_journal_record_and_rollouts(tmp_path: Path):
    world = World(tmp_path, Plan())
    assert world.run() == "finished"
    metrics, journal = metrics_of(tmp_path), journal_of(tmp_path)
    assert [line["step"] for line in metrics] == [line["step"] for line in journal] == [1, 2, 3, 4]
    assert [record["version"] for record in journal] == [1, 2, 3, 4]
    assert [record["weights"] for record in journal] == [f"weights-{version}" for version in (1, 2, 3, 4)]
    assert [record["cursor"] for record in journal] == [{"letters": 2 * step} for step in (1, 2, 3, 4)]
    trained = [rollout_id for record in journal for rollout_id in record["rollout_ids"]]
    assert len(trained) == len(set(trained)) == 16
    for step in range(1, 5):
        lines = list(read_lines(rollouts_path(tmp_path, step)))
        assert {line["rollout_id"] for line in lines} == set(journal[step - 1]["rollout_ids"])
    assert all(line["batch/used"] == 4 and line["staleness/max"] == 0 for line in metrics)
    assert world.engine.loads == [(version, 0.0) for version in range(5)]


def test_start_up_time_is_not_in_the_first_step(tmp_path: Path):
    """Other processes load their models while the loop is ready."""
    world = World(tmp_path, Plan())
    time.sleep(1.0)
    world.run()
    assert read_metrics(tmp_path)[0]["time/step"] < 1.0


def test_three_nonfinite_steps_in_a_row_stop_the_run(tmp_path: Path):
    world = World(tmp_path, Plan(objective=nan_at(), settings=LoopSettings(10, SaveCadence(10))))
    with pytest.raises(StoppedByPolicy, match="3 steps in a row with non-finite") as stopped:
        world.run()
    assert stopped.value.exit_code == EXIT_STOPPED
    assert [line["optim/skipped"] for line in metrics_of(tmp_path)] == [1, 1, 1]
    assert [event["step"] for event in events_of(tmp_path, "non-finite")] == [1, 2, 3]
    assert not world.policy.theta.any()
    world.save()
    checkpoint = world.run_dir.newest_good_checkpoint()
    assert checkpoint is not None and checkpoint.step == 3, "the state of the last step is saved"


def test_one_nonfinite_step_is_skipped_and_counted(tmp_path: Path):
    world = World(tmp_path, Plan(objective=nan_at(1, 2, 4, 5), settings=LoopSettings(6, SaveCadence(10))))
    assert world.run() == "finished"
    assert [line["optim/skipped"] for line in metrics_of(tmp_path)] == [1, 1, 0, 1, 1, 0]
    assert world.loop.progress.non_finite == 0 and np.isfinite(world.policy.theta).all()


def test_five_steps_of_solved_prompts_end_the_run_as_solved(tmp_path: Path):
    world = World(
        tmp_path, Plan(rewards=lambda _: [1.0, 1.0], rules=NO_REFILL, settings=LoopSettings(9, SaveCadence(9)))
    )
    assert world.run() == "solved"
    assert [record["rollout_ids"] for record in journal_of(tmp_path)] == [[]] * 5
    assert all(set(record["dropped"].values()) == {"uniform-good"} for record in journal_of(tmp_path))
    assert [event["step"] for event in events_of(tmp_path, "flat")] == [1, 2, 3, 4, 5]
    assert [line["group/all_good_frac"] for line in metrics_of(tmp_path)] == [1.0] * 5
    checkpoint = world.run_dir.newest_good_checkpoint()
    assert checkpoint is not None and checkpoint.step == 5, "a run with more steps can continue from here"


def test_reward_that_fails_on_every_rollout_ends_the_run_after_step_1(tmp_path: Path):
    plan = Plan(rewards=lambda _: [None, None], rules=NO_REFILL, settings=LoopSettings(9, SaveCadence(9)))
    world = World(tmp_path, plan)
    with pytest.raises(StoppedByPolicy, match="every rollout of step 1"):
        world.run()
    assert [record["rollout_ids"] for record in journal_of(tmp_path)] == [[]]


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ([[0.0, 0.0]], "all bad"),
        ([[0.0, 0.0]] * 8 + [[1.0, 1.0]], "all bad"),  # only the last of the five is solved
    ],
)
def test_five_zero_variance_steps_stop_the_run(tmp_path: Path, kinds: list[list[float]], says: str):
    plan = Plan(rewards=rewards_by_draw(*kinds), rules=NO_REFILL, settings=LoopSettings(9, SaveCadence(9)))
    world = World(tmp_path, plan)
    with pytest.raises(StoppedByPolicy, match=f"5 steps in a row that trained nothing.*{says}"):
        world.run()
    assert len(journal_of(tmp_path)) == 5


@pytest.mark.parametrize(("rewards", "ends"), [([1.0, 1.0], "solved"), ([0.0, 0.0], "all bad")])
def test_kept_zero_variance_groups_count_as_flat_steps(tmp_path: Path, rewards: list[float], ends: str):
    """Every gradient is zero then, for any number of packed rollouts."""
    plan = Plan(rewards=lambda _: rewards, rules=GroupRules(uniform="keep"), settings=LoopSettings(9, SaveCadence(9)))
    world = World(tmp_path, plan)
    if ends == "solved":
        assert world.run() == "solved"
    else:
        with pytest.raises(StoppedByPolicy, match=f"5 steps in a row that trained nothing.*{ends}"):
            world.run()
    assert [len(record["rollout_ids"]) for record in journal_of(tmp_path)] == [4] * 5
    said = [event["message"] for event in events_of(tmp_path, "flat")]
    assert len(said) == 5 and said[0].startswith("step 1 trained nothing; all groups: zero-variance group")


def test_trained_step_resets_the_zero_variance_count(tmp_path: Path):
    flat, mixed = [0.0, 0.0], [0.0, 1.0]
    kinds = [flat] * 8 + [mixed] * 2 + [flat] * 8 + [mixed]  # two groups per step: steps 5 and 10 train
    plan = Plan(rewards=rewards_by_draw(*kinds), rules=NO_REFILL, settings=LoopSettings(11, SaveCadence(9)))
    world = World(tmp_path, plan)
    assert world.run() == "finished"
    trained = [bool(record["rollout_ids"]) for record in journal_of(tmp_path)]
    assert trained == [False] * 4 + [True] + [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("interval", "level", "served", "ages"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6], [0] * 6),
        (2, 0, [0, 2, 4, 6], [0, 1] * 3),
        (3, 0, [0, 3, 6], [0, 1, 2] * 2),
        (0, 0, [0], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_sampler_gets_a_version_at_the_start_of_each_window(
    tmp_path: Path, interval: int, level: int, served: list[int], ages: list[int]
):
    plan = Plan(admission=Admission(4, 2, interval, level), settings=LoopSettings(6, SaveCadence(9)))
    world = World(tmp_path, plan)
    assert world.run() == "finished"
    assert [version for version, _ in world.engine.loads] == served
    assert [line["staleness/max"] for line in metrics_of(tmp_path)] == ages
    trained = [rollout_id for record in journal_of(tmp_path) for rollout_id in record["rollout_ids"]]
    assert len(trained) == len(set(trained)) == 24


def test_noise_reaches_the_sampler_and_the_metrics(tmp_path: Path):
    noise = noise_schedule(0.05, 0.0005, stages=3, total_steps=6)
    world = World(tmp_path, Plan(settings=LoopSettings(6, SaveCadence(9), sigma_at=noise)))
    world.run()
    sigmas = [0.0, 0.0, 0.05, 0.05, pytest.approx(0.0005), pytest.approx(0.0005)]
    assert [line["noise/sigma"] for line in metrics_of(tmp_path)] == sigmas
    assert [sigma for _, sigma in world.engine.loads] == [*sigmas, 0.0], (
        "version v samples step v + 1; the last version samples nothing"
    )


def test_noise_is_constant_within_a_sync_window(tmp_path: Path):
    noise = noise_schedule(0.05, 0.0005, stages=3, total_steps=6)
    settings = LoopSettings(6, SaveCadence(9), EvalCadence(5, at_start=False), sigma_at=noise)
    world = World(tmp_path, Plan(eval_rewards=float, admission=Admission(4, 2, interval=4), settings=settings))
    world.run()
    late = pytest.approx(0.0005)
    assert [line["noise/sigma"] for line in metrics_of(tmp_path)] == [0.0, 0.0, 0.0, 0.0, late, late]
    assert world.engine.loads == [(0, 0.0), (4, late), (4, 0.0), (4, late), (4, 0.0), (4, late)]


def test_evaluation_is_without_noise(tmp_path: Path):
    noise = noise_schedule(0.05, 0.0005, stages=2, total_steps=4)
    settings = LoopSettings(4, SaveCadence(9), EvalCadence(3, at_start=False), sigma_at=noise)
    world = World(tmp_path, Plan(eval_rewards=float, settings=settings))
    world.run()
    assert world.engine.loads == [(0, 0.0), (1, 0.0), (2, 0.05), (3, 0.05), (3, 0.0), (3, 0.05), (4, 0.0)]


def test_evaluations_are_recorded_with_their_step_and_the_best_is_kept(tmp_path: Path):
    settings = LoopSettings(6, SaveCadence(100), EvalCadence(2), save_total_limit=1, keep_best=True)
    world = World(tmp_path, Plan(eval_rewards=[0.0, 0.3, 0.7, 0.5, 0.6].__getitem__, settings=settings))
    world.run()
    held_out = {line["step"]: line["eval/letters/mean"] for line in metrics_of(tmp_path) if "eval/letters/mean" in line}
    assert held_out == {0: 0.3, 2: 0.7, 4: 0.5, 6: 0.6}
    assert world.run_dir.checkpoints.best() == 2
    assert world.run_dir.checkpoints.steps() == [2, 6]


def test_evaluations_without_a_better_one_end_the_run(tmp_path: Path):
    settings = LoopSettings(50, SaveCadence(100), EvalCadence(2), stop_after=2)
    world = World(tmp_path, Plan(eval_rewards=[0.0, 0.3, 0.7, 0.5, 0.7, 0.9].__getitem__, settings=settings))
    assert world.run() == "finished"
    assert world.loop.progress.step == 6
    assert [event["step"] for event in events_of(tmp_path, "early-stop")] == [6]
    checkpoint = world.run_dir.newest_good_checkpoint()
    assert checkpoint is not None and checkpoint.step == 6


def interrupted_world(path: Path, plan: Plan, at_draw: int) -> World:
    """A world with a stop request while its draw `at_draw` is running."""
    drawn: list[Prompt] = []

    def wait(prompt: Prompt) -> None:
        drawn.append(prompt)
        if len(drawn) == at_draw:
            world.loop.interrupt()

    plan.group_waits = wait
    world = World(path, plan)
    return world


@pytest.mark.parametrize(("interval", "level"), [(1, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize("at_draw", [1, 2, 3, 4, 6, 7])
def test_interrupted_run_continues(tmp_path: Path, interval: int, level: int, at_draw: int):
    """Saved at the end of the last step. Nothing is lost or trained twice; synchronous runs are unchanged."""

    def plan() -> Plan:
        settings = LoopSettings(5, SaveCadence(100), EvalCadence(2))
        return Plan(eval_rewards=float, admission=Admission(4, 2, interval, level), settings=settings)

    whole = World(tmp_path / "whole", plan())
    whole.run()
    first = interrupted_world(tmp_path / "cut", plan(), at_draw)
    with pytest.raises(Interrupted) as stopped:
        first.run()
    assert stopped.value.exit_code == 130
    saved = first.run_dir.newest_good_checkpoint()
    assert saved is not None and saved.step == first.loop.progress.step == len(journal_of(tmp_path / "cut"))
    first.close()
    second = World(tmp_path / "cut", plan(), resume=True)
    second.evaluations = first.evaluations
    assert second.run() == "finished"
    journal = journal_of(tmp_path / "cut")
    assert [record["step"] for record in journal] == [1, 2, 3, 4, 5]
    trained = [rollout_id for record in journal for rollout_id in record["rollout_ids"]]
    assert len(trained) == len(set(trained)) == 20
    assert [line["step"] for line in metrics_of(tmp_path / "cut")] == [0, 1, 2, 3, 4, 5]
    if interval == 1 and level == 0:
        assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
        assert journal == journal_of(tmp_path / "whole")
        assert second.policy.theta.tolist() == whole.policy.theta.tolist()


@pytest.mark.parametrize(("at", "saved"), [(1, None), (2, 3), (3, 6)])
def test_stop_during_an_evaluation(tmp_path: Path, at: int, saved: int | None):
    """At steps 0, 3 and 6: the first evaluation is cancelled, later ones finish with their step."""

    def plan(interrupted_at: int | None) -> Plan:
        settings = LoopSettings(7, SaveCadence(2), EvalCadence(3))
        return Plan(eval_rewards=lambda _: 0.5, eval_interrupted_at=interrupted_at, settings=settings)

    whole = World(tmp_path / "whole", plan(None))
    whole.run()
    first = World(tmp_path / "cut", plan(at))
    with pytest.raises(Interrupted, match=f"after step {saved} is saved" if saved else "no checkpoint yet"):
        first.run()
    newest = first.run_dir.newest_good_checkpoint()
    assert (newest.step if newest is not None else None) == saved
    first.close()
    second = World(tmp_path / "cut", plan(None), resume=True)
    assert second.run() == "finished"
    assert second.policy.theta.tolist() == whole.policy.theta.tolist()
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    assert journal_of(tmp_path / "cut") == journal_of(tmp_path / "whole")


def test_failure_between_minibatches_writes_no_checkpoint(tmp_path: Path):
    """The user's loss raises in the second half of step 3: the weights changed, and nothing is recorded."""
    calls = [0]

    def objective(logprobs, row):
        calls[0] += 1
        if calls[0] == 6:
            raise UserCodeError("mine:loss raised KeyError: 3")
        return reinforce(logprobs, row)

    def plan(loss) -> Plan:
        return Plan(objective=loss, learn={"minibatches": 2}, settings=LoopSettings(4, SaveCadence(2)))

    whole = World(tmp_path / "whole", plan(reinforce))
    whole.run()
    first = World(tmp_path / "cut", plan(objective))
    with pytest.raises(UserCodeError):
        first.run()
    first.save()
    assert first.run_dir.checkpoints.steps() == [2]
    first.close()
    second = World(tmp_path / "cut", plan(reinforce), resume=True)
    second.run()
    assert second.policy.theta.tolist() == whole.policy.theta.tolist()
    assert journal_of(tmp_path / "cut") == journal_of(tmp_path / "whole")


def test_failure_after_the_optimizer_step_writes_no_checkpoint(tmp_path: Path):
    """The evaluation of step 3 hangs: the weights changed but the step is not recorded, so it is computed again."""

    def plan(hangs: int | None) -> Plan:
        settings = LoopSettings(4, SaveCadence(2), EvalCadence(3, at_start=False))
        return Plan(eval_rewards=lambda _: 0.5, eval_hangs_at=hangs, settings=settings)

    whole = World(tmp_path / "whole", plan(None))
    whole.run()
    first = World(tmp_path / "cut", plan(1))
    with pytest.raises(DeadlineError):
        first.run()
    first.save()  # as the command does before it ends
    first.close()
    second = World(tmp_path / "cut", plan(None), resume=True)
    assert second.run() == "finished"
    assert second.policy.theta.tolist() == whole.policy.theta.tolist()
    assert journal_of(tmp_path / "cut") == journal_of(tmp_path / "whole")


def test_sync_and_a_checkpoint_have_deadlines(tmp_path: Path):
    """Each error names the key of the limit."""
    settings = LoopSettings(2, SaveCadence(1), sync_deadline_s=0.05, save_deadline_s=0.05)
    world = World(tmp_path / "sync", Plan(settings=settings))

    async def hang(version: int, manifest: Any = None) -> str:
        await asyncio.sleep(3600)
        return ""

    world.engine.load = hang  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match=r"the weight sync took longer than 0.05 s; raise orch.sync_deadline_s"):
        world.run()
    world.close()
    world = World(tmp_path / "save", Plan(settings=settings))

    async def slow(function: Any, *arguments: Any) -> Any:
        await asyncio.sleep(3600 if getattr(function, "__name__", "") == "save" else 0)
        return function(*arguments)

    world.loop.parts.on_device = slow
    with pytest.raises(DeadlineError, match=r"the checkpoint took longer than 0.05 s; raise train.save_deadline_s"):
        world.run()
    assert not list((tmp_path / "save" / "checkpoints").glob("step_*"))
    world.close()


def test_without_a_cadence_only_an_interruption_saves(tmp_path: Path):
    world = World(tmp_path, Plan(settings=LoopSettings(3, SaveCadence(0))))
    assert world.run() == "finished"
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    world.close()


def test_completions_are_shown_under_the_line_of_their_step(tmp_path: Path):
    out = io.StringIO()
    world = World(tmp_path, Plan(settings=LoopSettings(4, SaveCadence(0), show_completions=1)))
    world.observer.console = make_console(out, every=2)
    world.run()
    lines = [line.split()[0] for line in out.getvalue().splitlines()]
    assert lines == ["step", "reward"] * 3  # steps 1, 2 and 4, one completion each
    world.close()
