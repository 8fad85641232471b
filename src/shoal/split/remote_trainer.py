"""The trainer in another process as the loop uses it: a learner, policy files and a weight channel that send calls.

A restarted trainer first gets its state back: it loads the newest checkpoint and repeats the `learn` calls since then,
which are kept until a checkpoint covers them. Then the pending call is sent again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import EngineError, Interrupted, StoppedByPolicy
from shoal.core.learn import StepResult
from shoal.core.metrics import Tally
from shoal.core.types import RolloutGroup
from shoal.runs.checkpoints import Checkpoint
from shoal.runs.files import remove_quietly
from shoal.split.calls import Answer, Call, Caller, Payload, pack_groups, raise_failed, unpack_learned, write_bulk
from shoal.split.rendezvous import Rendezvous
from shoal.watch.text import count

TRAIN = "train"


class Restarted(Exception):
    """The trainer was restarted."""


@dataclass(frozen=True)
class ReplayableLearn:
    """The `learn` call of a step, to be repeated if the trainer loses its state."""

    step: int
    bulk: Payload
    trained: tuple[str, ...]


@dataclass
class Resources:
    """What RemoteTrainer needs from the orchestrator."""

    meeting: Rendezvous
    caller: Caller
    folder: Path  # of kept calls
    newest_checkpoint: Callable[[], Checkpoint | None]  # read and verified, which is slow
    covered_step: Callable[[], int | None]  # step of the newest checkpoint known to this process
    stopping: Callable[[], bool]  # whether the run is stopping
    tell: Callable[[str, str], None]  # kind and text of an event


@dataclass
class RemoteTrainer:
    parts: Resources
    steps: int
    step: int = 0  # learned so far
    _incarnation: str | None = None
    _number: int = 0
    _kept: list[ReplayableLearn] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        """Start at step 0; `load` may continue from a checkpoint."""
        self._incarnation = self._present()
        await self.ask("load", {"folder": None, "steps": self.steps})

    async def ask(self, method: str, head: dict[str, Any], bulk: Payload | None = None) -> Mapping[str, Any]:
        while True:
            try:
                return await self._request(method, head, bulk)
            except Restarted:
                await self._restore()

    async def _request(self, method: str, head: dict[str, Any], bulk: Payload | None) -> Mapping[str, Any]:
        """One call to the current incarnation. Raises Restarted if it is replaced."""
        self._number += 1
        assert self._incarnation is not None
        meeting = self.parts.meeting
        call = Call(self._number, meeting.presence.incarnation, self._incarnation, method, head)
        since = time.monotonic()

        def watch() -> None:
            meeting.watch(TRAIN, WORDS[method], since)
            if self._present() != self._incarnation:
                raise Restarted
            if self.parts.stopping() and not meeting.peers.is_alive(TRAIN):
                raise Interrupted(
                    "interrupted while grpo-train was away; continue from the newest checkpoint with --resume"
                )

        answer: Answer = await self.parts.caller.ask(call, bulk, watch)
        raise_failed(answer, "grpo-train")
        if method == "load":
            self.about = dict(answer.value)
        return answer.value

    def _present(self) -> str:
        incarnation = self.parts.meeting.incarnation_of(TRAIN)
        if incarnation is None:
            raise EngineError("grpo-train is gone")
        return incarnation

    async def _restore(self) -> None:
        """Restore the state in a new incarnation, which may be replaced meanwhile too."""
        while True:
            self._incarnation = self._present()
            checkpoint = self.parts.newest_checkpoint()
            step = checkpoint.step if checkpoint is not None else 0
            again = [kept for kept in self._kept if kept.step > step]
            if step + len(again) < self.step:
                raise StoppedByPolicy(
                    f"grpo-train was restarted and step {step + 1} is not kept; continue with --resume"
                )
            repeats = f" and repeats {count(len(again), 'step')}" if again else ""
            self.parts.tell("restart", f"grpo-train was restarted; it goes back to step {step}{repeats}")
            with suppress(Restarted):
                folder = str(checkpoint.path.resolve()) if checkpoint is not None else None
                await self._request("load", {"folder": folder, "steps": self.steps}, None)
                for kept in again:
                    await self._repeat(kept)
                return

    async def _repeat(self, kept: ReplayableLearn) -> None:
        value = await self._request("learn", {"step": kept.step}, kept.bulk)
        if tuple(value["trained_rollouts"]) != kept.trained:
            raise EngineError(f"grpo-train learned other rollouts when step {kept.step} was repeated")

    async def load(self, folder: Path) -> None:
        found = re.fullmatch(r"step_(\d+)", folder.name)
        if found is None:
            raise EngineError(f"{folder} is not a checkpoint")
        self.step = int(found[1])
        await self.ask("load", {"folder": str(folder.resolve()), "steps": self.steps})

    async def learn(
        self, groups: Sequence[RolloutGroup], tally: Tally, stop: asyncio.Event | None = None
    ) -> StepResult:
        """A call is always answered, so `stop` has no effect."""
        self._forget()
        step = self.step + 1
        bulk = write_bulk(self.parts.folder / f"learn_{step:06d}.msgpack", pack_groups(groups))
        value = await self.ask("learn", {"step": step}, bulk)
        learned = unpack_learned(value, tally, groups)
        self.step = step
        self._kept.append(ReplayableLearn(step, bulk, tuple(learned.trained_rollouts)))
        return learned

    def _forget(self) -> None:
        """Remove kept calls that a checkpoint covers."""
        covered = self.parts.covered_step() if self._kept else None
        for kept in [kept for kept in self._kept if covered is not None and kept.step <= covered]:
            remove_quietly(kept.bulk.path)
            self._kept.remove(kept)


# Methods as wait messages name them.
WORDS = {
    "load": "load the model",
    "learn": "train a step",
    "publish": "publish the weights",
    "save": "write its checkpoint",
    "export": "write the trained model",
}


class RemoteFiles:
    """The policy files of a checkpoint, written by the trainer into the orchestrator's folder."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def save(self, folder: Path) -> None:
        await self._trainer.ask("save", {"folder": str(folder.resolve())})

    async def load(self, folder: Path) -> None:
        await self._trainer.load(folder)

    async def export(self, folder: Path) -> None:
        await self._trainer.ask("export", {"folder": str(folder.resolve())})


class RemoteWeights:
    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def publish(self, version: int) -> Mapping[str, Any]:
        return await self._trainer.ask("publish", {"version": version})


async def run_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Replaces the device thread of the loop: the functions are coroutines that send calls."""
    return await function(*arguments)
