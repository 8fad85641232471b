"""The loop's collaborators, settings and progress, and the checkpoints of its state. `build` makes the first two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.collect import Collector
from shoal.core.deadlines import within
from shoal.core.evaluate import Evaluator
from shoal.core.learn import Learner, OnDevice
from shoal.core.prompts import PromptStream
from shoal.core.protocols import Files, Observer, Phases, Ranks, Replay, RolloutEngine, RunStore, WeightChannel
from shoal.core.ranks import SingleProcess


@dataclass
class Parts:
    """The loop's collaborators."""

    engine: RolloutEngine
    weights: WeightChannel
    collector: Collector
    stream: PromptStream
    learner: Learner
    files: Files
    evaluator: Evaluator | None
    store: RunStore
    observer: Observer
    phases: Phases
    on_device: OnDevice
    token_text: Callable[[int], str]
    ranks: Ranks = field(default_factory=SingleProcess)
    replay: Replay | None = None
    save_shards: Callable[[Path], None] | None = None  # for sharded weights: all ranks call it before `files.save`
    # Copies what `files.save` writes and returns the writer: checkpoints are written while the run continues.
    snapshot: Callable[[], Callable[[Path], None]] | None = None


@dataclass
class SaveCadence:
    """Save every `steps` steps or every `seconds` seconds. Default: every 10 steps. 0 steps = never."""

    steps: int | None = None
    seconds: float | None = None
    _last: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        if self.seconds is not None:
            return time.monotonic() - self._last >= self.seconds
        every = 10 if self.steps is None else self.steps
        return every > 0 and step % every == 0

    @property
    def off(self) -> bool:
        return self.seconds is None and self.steps == 0

    def saved(self) -> None:
        self._last = time.monotonic()


@dataclass
class EvalCadence:
    """Evaluate every `interval` steps, or every `seconds` seconds if given, and always after the last step."""

    interval: int
    at_start: bool = True
    seconds: float | None = None
    _last: float = field(default_factory=time.monotonic)

    def due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after step `step`; step 0 is before the first step."""
        if step == 0:
            return self.at_start
        if step == last_step:
            return True
        if self.seconds is None:
            return step % self.interval == 0
        if time.monotonic() - self._last < self.seconds:
            return False
        self._last = time.monotonic()
        return True


@dataclass(frozen=True)
class LoopSettings:
    """When the loop stops, saves and evaluates."""

    max_steps: int
    save: SaveCadence
    evaluation: EvalCadence | None = None
    save_total_limit: int | None = 2
    keep_best: bool = False
    stop_after: int | None = None  # end after this many evaluations without an improvement
    sigma_at: Callable[[int], float] | None = None  # QeRL noise of a step
    next_command: str | None = None
    show_completions: int = 0  # number printed with each step
    sync_deadline_s: float = 600.0
    save_deadline_s: float = 600.0


@dataclass
class Progress:
    """The loop's own state between steps. Checkpoints contain it under these names."""

    step: int = 0  # completed steps, equal to the weight version
    evaluated_start: bool = False
    scored: bool = False  # some rollout had a reward
    non_finite: int = 0  # steps in a row with non-finite gradients
    flat: int = 0  # steps in a row that trained nothing
    flat_reasons: list[str] = field(default_factory=list)  # drop reasons of the groups in those steps
    best: float | None = None
    best_step: int = 0
    since_best: int = 0  # evaluations since the best one
    owes_evaluation: bool = False  # a signal cut short the evaluation of this step


class Saving:
    """Writes checkpoints: the shards of all ranks, the policy's files and the loop's state.

    With `Parts.snapshot` the run stops only for the copy, and a thread writes it. At most one write is in flight.
    """

    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self._parts = parts
        self._settings = settings
        self.saved_step: int | None = None  # of the newest checkpoint
        self._writing: asyncio.Task[None] | None = None
        self._best: tuple[int, float] | None = None  # to be marked after the write in flight

    async def save(self, step: int, boundary: Mapping[str, Any]) -> None:
        """Write a checkpoint, at most one per step.

        An empty boundary means that the run failed within a step. The resumed run computes that step again.
        """
        parts = self._parts
        if self.saved_step == step or not boundary:
            return
        parts.observer.doing(f"saving the checkpoint of step {step}")
        with parts.phases("save"):
            await self.finish()
            if parts.snapshot is not None:
                copy, limit = parts.on_device(parts.snapshot), self._settings.save_deadline_s
                write = await within(limit, copy, "copying the checkpoint", "train.save_deadline_s")
                state = msgspec.to_builtins(boundary)  # now: training changes the groups that are ready
                self._writing = asyncio.create_task(self._write_behind(step, state, write), name="checkpoint")
            else:
                if parts.save_shards is not None:
                    await self._write_shards(parts.save_shards)
                await parts.ranks.on_main(lambda: self._write_checkpoint(step, boundary))
        self.saved_step = step
        self._settings.save.saved()

    async def finish(self, wait: bool = True) -> None:
        """Raise the error of the write in flight. Without `wait`, only if the write has ended already."""
        if self._writing is not None and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            await writing

    async def _write_behind(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> None:
        def write_all() -> None:
            with self._parts.store.checkpoint(step, state) as folder:
                write(folder)

        limit = self._settings.save_deadline_s
        await within(limit, asyncio.to_thread(write_all), "writing the checkpoint", "train.save_deadline_s")
        if self._best is not None:
            self._parts.store.mark_best(*self._best)
            self._best = None
        self._report_saved(step)

    async def _write_shards(self, save_shards: Callable[[Path], None]) -> None:
        """Every rank writes its shards to a temporary folder. `take_shards` moves them into the checkpoint."""

        async def make_folder() -> str:
            return str(self._parts.store.make_shards_folder().resolve())

        shards = self._parts.on_device(save_shards, Path(await self._parts.ranks.on_main(make_folder)))
        await within(self._settings.save_deadline_s, shards, "writing the shards", "train.save_deadline_s")

    async def _write_checkpoint(self, step: int, boundary: Mapping[str, Any]) -> None:
        parts, settings = self._parts, self._settings
        with parts.store.checkpoint(step, boundary) as folder:
            if parts.save_shards is not None:
                parts.store.take_shards(folder)
            files, limit = parts.on_device(parts.files.save, folder), settings.save_deadline_s
            await within(limit, files, "writing the checkpoint", "train.save_deadline_s")
        self._report_saved(step)

    def _report_saved(self, step: int) -> None:
        store, settings = self._parts.store, self._settings
        store.prune_checkpoints(settings.save_total_limit)
        store.write_status(
            "running", step=step, reason="checkpoint", resumable=True, next_command=settings.next_command
        )

    def mark_best(self, progress: Progress) -> None:
        """Mark the newest checkpoint as the best if its evaluation is the best so far."""
        best = progress.best
        if self._settings.keep_best and progress.best_step == progress.step and best is not None:
            if self._writing is not None:
                self._best = (progress.step, best)  # a mark without its checkpoint would mislead a resume
            else:
                self._parts.store.mark_best(progress.step, best)
