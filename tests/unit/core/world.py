"""A complete loop in memory: letters as prompts, eight logits as the policy, a real run directory."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.train import NoiseConfig
from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules
from shoal.core.evaluate import EvalSettings, Evaluator
from shoal.core.loop import Loop
from shoal.core.state import EvalCadence, LoopSettings, Parts, SaveCadence
from shoal.core.types import Completion, Prompt, Request, RolloutGroup, SamplingParams
from shoal.rollout.weight_channels import InProcessWeights
from shoal.runs.events import EventLog
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import RunDir
from shoal.signals.advantages import AdvantageNormalizer
from shoal.watch.console import make_console
from shoal.watch.observer import Phases, RunObserver, Sinks
from shoal.watch.watchdog import Watchdog

from .groups import Letters, fits, make_group, make_stream, make_turn
from .unigram import UnigramPolicy, make_learner, on_device, reinforce

Rewards = Callable[[Prompt], Sequence[float | None]]


@dataclass
class Served:
    """The engine as the loop sees it: records the loaded versions and their noise."""

    path = activity = opening = ""
    version: int = 0
    loads: list[tuple[int, float]] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        raise AssertionError("groups of this world are made without an engine")

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        self.version = version
        self.loads.append((version, float((manifest or {}).get("sigma", 0.0))))
        return f"weights-{version}"

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    async def rest(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        return {"ok": True}

    async def close(self) -> None: ...


@dataclass
class ThetaFile:
    policy: UnigramPolicy

    def save(self, folder: Path) -> None:
        (folder / "theta.json").write_text(json.dumps(self.policy.theta.tolist()))

    def load(self, folder: Path) -> None:
        self.policy.theta = np.array(json.loads((folder / "theta.json").read_text()))

    def export(self, folder: Path) -> None:
        self.save(folder)


@dataclass
class Plan:
    """The settings of a world. Everything has a default."""

    rewards: Rewards = lambda prompt: [0.0, 1.0]
    eval_rewards: Callable[[int], float] | None = None  # evaluation number → mean reward
    eval_hangs_at: int | None = None
    eval_interrupted_at: int | None = None
    group_waits: Callable[[Prompt], None] | None = None  # called when a group starts
    objective: Any = reinforce
    learn: dict[str, Any] = field(default_factory=dict)  # changed settings of the learner
    admission: Admission = field(default_factory=lambda: Admission(4, 2))
    rules: GroupRules = field(default_factory=GroupRules)
    settings: LoopSettings = field(default_factory=lambda: LoopSettings(4, SaveCadence(2)))


class World:
    def __init__(self, path: Path, plan: Plan, resume: bool = False) -> None:
        self.plan = plan
        self.policy = UnigramPolicy()
        self.engine = Served()
        self.evaluations = 0
        self.run_dir = RunDir.resume(path) if resume else RunDir.create(path, "train: {}\n", {})
        self.events = EventLog(self.run_dir)
        watchdog, console = Watchdog(self.run_dir.logs, self.events), make_console(io.StringIO())
        self.observer = RunObserver(console, self.events, watchdog, Sinks(self.run_dir))
        stream = make_stream(50)
        admission = replace(plan.admission)
        evaluator = None
        if plan.eval_rewards is not None:
            held_out = {"letters": Letters(1, size_eval=2)}
            evaluator = Evaluator(self._eval_group, held_out, fits, EvalSettings(2, 1, SamplingParams(), 0.2))
        parts = Parts(
            engine=self.engine,
            weights=InProcessWeights(),
            collector=Collector(self._group, stream, admission, plan.rules),
            stream=stream,
            learner=make_learner(
                self.policy, AdvantageNormalizer(std="none"), plan.objective, **{"token_budget": 100, **plan.learn}
            ),
            files=ThetaFile(self.policy),
            evaluator=evaluator,
            store=self.run_dir,
            observer=self.observer,
            phases=Phases(),
            on_device=on_device,
            token_text=str,
        )
        self.loop = Loop(parts, plan.settings)

    async def _group(self, prompt: Prompt) -> RolloutGroup:
        if self.plan.group_waits is not None:
            self.plan.group_waits(prompt)
        for _ in range(1 + prompt.index * 7 % 5):
            await asyncio.sleep(0)
        group = make_group(prompt, self.plan.rewards(prompt), self.engine.version)
        for rollout in group.rollouts:
            rollout.turns = [make_turn([1 + (prompt.index + rollout.index) % 7], self.engine.version)]
        return group

    async def _eval_group(self, prompt: Prompt, size: int, sampling: SamplingParams) -> RolloutGroup:
        if prompt.index == 0:
            self.evaluations += 1
        if self.evaluations == self.plan.eval_interrupted_at:
            self.loop.interrupt()
            await asyncio.sleep(3600 if self.loop.progress.step == 0 else 0.05)
        if self.evaluations == self.plan.eval_hangs_at:
            await asyncio.sleep(3600)
        assert self.plan.eval_rewards is not None
        return make_group(prompt, [self.plan.eval_rewards(self.evaluations)] * size, self.engine.version)

    def run(self) -> str:
        """From the newest good checkpoint to the end. The run directory is always closed."""

        async def go() -> str:
            checkpoint = self.run_dir.newest_good_checkpoint()
            self.run_dir.cut_to(checkpoint.step if checkpoint is not None else -1)
            if checkpoint is not None:
                await self.loop.restore(checkpoint.path)
            try:
                return await self.loop.run()
            finally:
                await self.loop.parts.collector.cancel()

        try:
            return asyncio.run(go())
        finally:
            self.observer.console.close()

    def save(self) -> None:
        asyncio.run(self.loop.save())

    def close(self) -> None:
        self.run_dir.close()


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """Metrics without times."""
    timed = ("time/", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_lines(path / "metrics.jsonl")]


def journal_of(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path / "journal.jsonl"))


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(path / "events.jsonl") if event["kind"] == kind]


def eval_every(steps: int, settings: LoopSettings, **changes: Any) -> LoopSettings:
    return replace(settings, evaluation=EvalCadence(steps), **changes)


def noise_schedule(start: float, end: float, stages: int, total_steps: int) -> Callable[[int], float]:
    return partial(NoiseConfig(sigma_start=start, sigma_end=end, num_stages=stages).sigma_at, total_steps=total_steps)
