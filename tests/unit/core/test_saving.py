"""Checkpoints written while the run continues: one at a time, with the state of their step, awaited at the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import StorageError
from shoal.core.state import LoopSettings, SaveCadence

from .world import Plan, World, eval_every, events_of, journal_of, metrics_of

SIX = LoopSettings(6, SaveCadence(1), save_total_limit=9)


class Behind(World):
    """A world whose checkpoints are copied, and written by a thread when `allow` is set."""

    def __init__(self, path: Path, plan: Plan, resume: bool = False) -> None:
        super().__init__(path, plan, resume)
        self.allow = threading.Event()
        self.allow.set()
        self.in_flight = self.most_in_flight = 0
        self.failure: Exception | None = None
        self.loop.parts = replace(self.loop.parts, snapshot=self.snapshot)
        self.loop._saving._parts = self.loop.parts

    def snapshot(self) -> Callable[[Path], None]:
        theta = self.policy.theta.copy()

        def write(folder: Path) -> None:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            assert self.allow.wait(20)
            if self.failure is not None:
                raise self.failure
            (folder / "theta.json").write_text(json.dumps(theta.tolist()))
            self.in_flight -= 1

        return write


def test_run_continues_while_a_checkpoint_is_written(tmp_path: Path):
    """Step 2 is in the journal before the checkpoint of step 1 is on disk. The checkpoint of step 2 waits for it."""
    world = Behind(tmp_path, Plan(settings=SIX))
    world.allow.clear()
    journal, seen = world.run_dir.append_journal, []

    def append(step: int, record: dict[str, Any]) -> None:
        journal(step, record)
        seen.append((step, world.run_dir.checkpoints.steps()))
        if step == 2:
            world.allow.set()

    world.run_dir.append_journal = append  # type: ignore[method-assign]
    assert world.run() == "finished"
    assert seen[:2] == [(1, []), (2, [])] and (3, [1]) in [(step, steps[:1]) for step, steps in seen]
    assert world.run_dir.checkpoints.steps() == [1, 2, 3, 4, 5, 6], "the last one is awaited"
    assert world.most_in_flight == 1
    assert all(world.run_dir.checkpoints.verify(step)["step"] == step for step in range(1, 7))


def test_checkpoint_contains_the_state_of_its_step(tmp_path: Path):
    """Resumed from any of them, the run equals one that writes its checkpoints synchronously."""
    plain = World(tmp_path / "plain", Plan(settings=SIX))
    plain.run()
    plain.close()
    behind = Behind(tmp_path / "behind", Plan(settings=SIX))
    behind.run()
    for step in (5, 2):
        behind.run_dir.cut_to(step)
        behind.close()
        behind = Behind(tmp_path / "behind", Plan(settings=SIX), resume=True)
        assert behind.run() == "finished"
        assert metrics_of(tmp_path / "behind") == metrics_of(tmp_path / "plain")
        assert journal_of(tmp_path / "behind") == journal_of(tmp_path / "plain")
    behind.close()


def test_failed_write_ends_the_run_at_the_next_step_boundary(tmp_path: Path):
    world = Behind(tmp_path, Plan(settings=SIX))
    world.failure = StorageError("the disk is full")
    with pytest.raises(StorageError, match="full"):
        world.run()
    assert 1 <= len(journal_of(tmp_path)) <= 2 and world.run_dir.checkpoints.steps() == []
    world.close()


def test_failed_write_of_the_last_step_is_not_lost(tmp_path: Path):
    world = Behind(tmp_path, Plan(settings=LoopSettings(2, SaveCadence(2))))
    world.failure = StorageError("the disk is full")
    with pytest.raises(StorageError, match="full"):
        world.run()
    world.close()


def test_best_step_is_marked_after_its_checkpoint(tmp_path: Path):
    plan = Plan(eval_rewards=float, settings=eval_every(2, LoopSettings(4, SaveCadence(2)), keep_best=True))
    world = Behind(tmp_path, plan)
    marks: list[tuple[int, bool]] = []
    mark = world.run_dir.mark_best
    world.run_dir.mark_best = lambda step, value=None: (  # type: ignore[method-assign]
        marks.append((step, step in world.run_dir.checkpoints.steps())),
        mark(step, value),
    )[1]
    assert world.run() == "finished"
    assert marks == [(2, True), (4, True)] and world.run_dir.checkpoints.best() == 4
    world.close()


def test_error_elsewhere_waits_for_the_write(tmp_path: Path):
    """The run directory is closed only after the thread has written into it."""
    world = Behind(tmp_path, Plan(settings=SIX))
    world.allow.clear()

    async def fail() -> None:
        world.loop._boundary = world.loop.state()
        await world.loop._saving.save(1, world.loop._boundary)
        asyncio.get_running_loop().call_later(0.05, world.allow.set)
        await world.loop.end_saving()

    asyncio.run(fail())
    assert world.run_dir.checkpoints.steps() == [1]
    assert events_of(tmp_path, "checkpoint") == []
    world.close()
