"""A trainer in another process, here in another task: its calls, and how a lost trainer is restored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.orch import OrchConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import DeadlineError, Interrupted, StoppedByPolicy
from shoal.core.metrics import Tally
from shoal.core.ranks import SingleProcess
from shoal.core.types import RolloutGroup
from shoal.runs.checkpoints import Checkpoint
from shoal.signals.advantages import AdvantageNormalizer
from shoal.split.calls import FolderAnswerer, FolderCaller, pack_groups, unpack_groups
from shoal.split.orchestrator import RemoteFiles, RemoteTrainer, RemoteWeights, Resources
from shoal.split.rendezvous import Rendezvous
from shoal.split.trainer_process import TrainerState, TrainingService

from ..core.groups import make_group, make_prompt
from ..core.unigram import UnigramPolicy, make_learner, on_device


def groups_of(step: int) -> list[RolloutGroup]:
    return [make_group(make_prompt(step * 10 + i), [0.0, 1.0 + i]) for i in range(2)]


@dataclass
class Files:
    policy: UnigramPolicy

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "theta.npy", self.policy.theta)

    def load(self, folder: Path) -> None:
        self.policy.theta = np.load(folder / "theta.npy")

    def export(self, folder: Path) -> None:
        self.save(folder)


@dataclass
class Published:
    versions: list[int] = field(default_factory=list)

    async def publish(self, version: int) -> Mapping[str, Any]:
        self.versions.append(version)
        return {"version": version}


class Nothing:
    async def close(self) -> None: ...


@dataclass
class Trainer:
    """One incarnation: its policy starts from the initial state, like that of a new process."""

    folder: Path
    weights: Published = field(default_factory=Published)
    made: int = 0
    policy: UnigramPolicy = field(default_factory=UnigramPolicy)
    learned: int = 0

    async def make(self, steps: int) -> TrainerState:
        self.made += 1
        self.policy = UnigramPolicy()
        learner = make_learner(self.policy, AdvantageNormalizer())
        return TrainerState(steps, learner, Files(self.policy), self.weights, on_device, Nothing(), {"made": self.made})

    async def serve(self) -> None:
        section = TrainConfig(model="m", output_dir=str(self.folder), deadline_s=20.0)
        meeting = Rendezvous("train", section, lambda _: None)

        def session() -> str | None:
            meeting.look()
            return meeting.incarnation_of("orch")

        answerer = FolderAnswerer(self.folder, meeting.presence.incarnation, session)
        service = TrainingService(self.make, SingleProcess(), self.folder / "samples")
        try:
            await service.run(answerer, meeting)
        finally:
            meeting.close()


@dataclass
class World:
    folder: Path
    remote: RemoteTrainer
    meeting: Rendezvous
    checkpoint: Checkpoint | None = None
    stopping: bool = False
    told: list[str] = field(default_factory=list)
    trainer: Trainer | None = None
    _task: asyncio.Task[None] | None = None

    async def start_trainer(self) -> Trainer:
        self.trainer = Trainer(self.folder)
        self._task = asyncio.create_task(self.trainer.serve())
        before = self.meeting.incarnation_of("train")
        while self.meeting.incarnation_of("train") in (before, None):
            self.meeting.look()
            await asyncio.sleep(0.02)
        return self.trainer

    async def kill_trainer(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def learn(self, step: int) -> list[RolloutGroup]:
        groups = groups_of(step)
        await self.remote.learn(groups, Tally())
        return groups

    async def save(self, step: int) -> None:
        folder = self.folder / "checkpoints" / f"step_{step:06d}"
        await RemoteFiles(self.remote).save(folder)
        self.checkpoint = Checkpoint(step, folder, {})


@asynccontextmanager
async def world(folder: Path, deadline_s: float = 20.0) -> AsyncIterator[World]:
    section = OrchConfig.model_validate({"env": "reverse-text", "output_dir": str(folder), "deadline_s": deadline_s})
    meeting = Rendezvous("orch", section, lambda _: None)
    meeting.look()
    caller = FolderCaller(folder, meeting.presence.incarnation)
    kept = folder / "samples" / meeting.presence.incarnation
    made: World
    parts = Resources(
        meeting,
        caller,
        kept,
        lambda: made.checkpoint,
        lambda: made.checkpoint.step if made.checkpoint is not None else None,
        lambda: made.stopping,
        lambda _, text: made.told.append(text),
    )
    made = World(folder, RemoteTrainer(parts, steps=9), meeting)
    try:
        await made.start_trainer()
        await made.remote.start()
        yield made
    finally:
        await made.kill_trainer()
        await caller.close()
        meeting.close()


async def theta_after(steps: int) -> np.ndarray:
    """The same steps without a separate process."""
    policy = UnigramPolicy()
    learner = make_learner(policy, AdvantageNormalizer())
    for step in range(1, steps + 1):
        await learner.learn(groups_of(step), Tally())
    return policy.theta


def run(folder: Path, check: Callable[[World], Any], **options: Any) -> None:
    async def whole() -> None:
        async with world(folder, **options) as made:
            await asyncio.wait_for(check(made), 40)

    asyncio.run(whole())


def test_remote_step_equals_local_step(tmp_path: Path):
    async def here() -> tuple[Any, list[RolloutGroup], dict[str, float]]:
        tally, groups = Tally(), groups_of(1)
        return await make_learner(UnigramPolicy(), AdvantageNormalizer()).learn(groups, tally), groups, tally.reduce()

    learned, groups, metrics = asyncio.run(here())

    async def check(made: World) -> None:
        tally, mine = Tally(), groups_of(1)
        found = await made.remote.learn(mine, tally)
        assert found.trained_rollouts == learned.trained_rollouts and found.trained_tokens == learned.trained_tokens
        assert found.moved == learned.moved is True
        assert tally.reduce() == metrics
        for name, values in learned.policy_logprobs.items():
            assert found.policy_logprobs[name].dtype == values.dtype
            assert (found.policy_logprobs[name] == values).all()
        assert [r.advantage for g in mine for r in g.rollouts] == [r.advantage for g in groups for r in g.rollouts]

    run(tmp_path, check)


def test_sent_groups_omit_text_and_keep_numbers():
    (group,) = groups_of(1)[:1]
    group.rollouts[0].messages = [{"role": "user", "content": "\ud800 half a character"}]
    group.rollouts[0].turns[0].completion.logprobs = [-1 / 3, -1e-300]
    (found,) = unpack_groups(pack_groups([group]))
    assert found.rollouts[0].messages == [] and found.prompt.messages == []
    assert found.rollouts[0].turns[0].completion.logprobs == [-1 / 3, -1e-300]
    assert found.rollouts[0].rollout_id == group.rollouts[0].rollout_id
    assert group.rollouts[0].messages, "the group itself is unchanged"


def test_lost_trainer_repeats_the_steps_since_the_checkpoint(tmp_path: Path):
    async def check(made: World) -> None:
        for step in (1, 2):
            await made.learn(step)
        await made.save(2)
        for step in (3, 4):
            await made.learn(step)
        kept = sorted(path.name for path in made.remote.parts.folder.glob("learn_*"))
        assert kept == ["learn_000003.msgpack", "learn_000004.msgpack"], "calls covered by the checkpoint are removed"
        await made.kill_trainer()
        second = await made.start_trainer()
        assert (await RemoteWeights(made.remote).publish(4))["version"] == 4
        assert second.weights.versions == [4]
        await made.learn(5)
        assert (second.policy.theta == await theta_after(5)).all()
        assert made.told == ["grpo-train was restarted; it goes back to step 2 and repeats 2 steps"]

    run(tmp_path, check)


def test_trainer_lost_before_any_checkpoint_starts_over(tmp_path: Path):
    async def check(made: World) -> None:
        for step in (1, 2):
            await made.learn(step)
        await made.kill_trainer()
        second = await made.start_trainer()
        await made.learn(3)
        assert (second.policy.theta == await theta_after(3)).all()

    run(tmp_path, check)


def test_new_orchestrator_starts_at_its_step(tmp_path: Path):
    """The trainer lives on and starts over: from the beginning, then from a checkpoint."""

    async def check(made: World) -> None:
        await made.learn(1)
        await made.save(1)
        await made.learn(2)
        trainer = made.trainer
        assert trainer is not None
        made.remote.step, made.remote._kept = 0, []
        await made.remote.start()
        assert trainer.made == 2 and (trainer.policy.theta == 0).all(), "it was created again"
        await RemoteFiles(made.remote).load(tmp_path / "checkpoints" / "step_000001")
        assert made.remote.step == 1 and (trainer.policy.theta == await theta_after(1)).all()

    run(tmp_path, check)


def test_unpersisted_steps_end_the_run(tmp_path: Path):
    async def check(made: World) -> None:
        for step in (1, 2):
            await made.learn(step)
        made.remote._kept.pop(0)
        await made.kill_trainer()
        await made.start_trainer()
        with pytest.raises(StoppedByPolicy, match="step 1 is not kept; continue with --resume"):
            await made.learn(3)

    run(tmp_path, check)


def test_absent_trainer_ends_the_run_by_name(tmp_path: Path):
    async def check(made: World) -> None:
        await made.kill_trainer()
        with pytest.raises(DeadlineError, match=r"grpo-orch waited 1 s for grpo-train to train a step"):
            await made.learn(1)

    run(tmp_path, check, deadline_s=1.0)


def test_interruption_does_not_wait_for_absent_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.split.rendezvous.PATIENCE_S", 0.7)

    async def check(made: World) -> None:
        await made.kill_trainer()
        made.stopping = True
        with pytest.raises(Interrupted, match="grpo-train was away"):
            await made.learn(1)

    run(tmp_path, check)


def test_remote_error_is_raised_locally(tmp_path: Path):
    async def check(made: World) -> None:
        with pytest.raises(StoppedByPolicy, match="grpo-train: FileNotFoundError"):
            await RemoteFiles(made.remote).load(tmp_path / "checkpoints" / "step_000007")

    run(tmp_path, check)
