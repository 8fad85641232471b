"""The trainer as the loop sees it when it is another process: a learner, files and a weight channel that ask for it.

A trainer that was restarted is brought back first: newest checkpoint, then the `learn` calls since, which are kept
until a checkpoint covers them. The call that was being waited for is then asked again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import EngineError, Interrupted, StoppedByPolicy
from shoal.observability.atomic import remove_quietly
from shoal.observability.checkpoints import Checkpoint
from shoal.observability.metrics import Tally
from shoal.observability.text import count
from shoal.orchestrator.learn import Learned
from shoal.orchestrator.meeting import Meeting
from shoal.orchestrator.wire import pack_groups, unpack_learned
from shoal.transport.calls import Answer, Bulk, Call, Caller, raise_failed, write_bulk
from shoal.types import RolloutGroup

TRAIN = "train"


class Restarted(Exception):
    """Another incarnation of the trainer is there."""


@dataclass(frozen=True)
class Kept:
    """A step's `learn` call, to be repeated if the trainer loses its state."""

    step: int
    bulk: Bulk
    trained: tuple[str, ...]


@dataclass
class Resources:
    """What the remote trainer needs of the orchestrator around it."""

    meeting: Meeting
    caller: Caller
    folder: Path  # of kept calls
    newest_checkpoint: Callable[[], Checkpoint | None]  # read and verified, which takes its time
    covered_step: Callable[[], int | None]  # of the newest one, as far as this process knows
    stopping: Callable[[], bool]  # whether the run was asked to stop
    tell: Callable[[str, str], None]  # kind and text of an event


@dataclass
class RemoteTrainer:
    parts: Resources
    steps: int
    step: int = 0  # learned so far
    _incarnation: str | None = None
    _number: int = 0
    _kept: list[Kept] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        """From the beginning, until `load` says otherwise."""
        self._incarnation = self._present()
        await self.ask("load", {"folder": None, "steps": self.steps})

    async def ask(self, method: str, head: dict[str, Any], bulk: Bulk | None = None) -> Mapping[str, Any]:
        while True:
            try:
                return await self._request(method, head, bulk)
            except Restarted:
                await self._bring_back()

    async def _request(self, method: str, head: dict[str, Any], bulk: Bulk | None) -> Mapping[str, Any]:
        """One call to the incarnation we know."""
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
                raise Interrupted("interrupted while grpo-train was away; the newest checkpoint stands")

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

    async def _bring_back(self) -> None:
        """Give a new incarnation the state that the old one had. It may be killed as well meanwhile."""
        while True:
            self._incarnation = self._present()
            checkpoint = self.parts.newest_checkpoint()
            step = checkpoint.step if checkpoint is not None else 0
            again = [kept for kept in self._kept if kept.step > step]
            if step + len(again) < self.step:
                raise StoppedByPolicy(
                    f"grpo-train was restarted and step {step + 1} is not kept; continue with --resume"
                )
            learns = f" and learns {count(len(again), 'step')} again" if again else ""
            self.parts.tell("restart", f"grpo-train was restarted; it goes back to step {step}{learns}")
            with suppress(Restarted):
                folder = str(checkpoint.path.resolve()) if checkpoint is not None else None
                await self._request("load", {"folder": folder, "steps": self.steps}, None)
                for kept in again:
                    await self._repeat(kept)
                return

    async def _repeat(self, kept: Kept) -> None:
        value = await self._request("learn", {"step": kept.step}, kept.bulk)
        if tuple(value["trained_rollouts"]) != kept.trained:
            raise EngineError(f"grpo-train learned other rollouts when step {kept.step} was repeated")

    async def load(self, folder: Path) -> None:
        found = re.fullmatch(r"step_(\d+)", folder.name)
        if found is None:
            raise EngineError(f"{folder} is not a checkpoint")
        self.step = int(found[1])
        await self.ask("load", {"folder": str(folder.resolve()), "steps": self.steps})

    async def learn(self, groups: Sequence[RolloutGroup], tally: Tally) -> Learned:
        self._forget()
        step = self.step + 1
        bulk = write_bulk(self.parts.folder / f"learn_{step:06d}.msgpack", pack_groups(groups))
        value = await self.ask("learn", {"step": step}, bulk)
        learned = unpack_learned(value, tally, groups)
        self.step = step
        self._kept.append(Kept(step, bulk, tuple(learned.trained_rollouts)))
        return learned

    def _forget(self) -> None:
        """Calls that a checkpoint covers are not needed any more."""
        covered = self.parts.covered_step() if self._kept else None
        for kept in [kept for kept in self._kept if covered is not None and kept.step <= covered]:
            remove_quietly(kept.bulk.path)
            self._kept.remove(kept)


# What the trainer is asked to do, as a wait for it says.
WORDS = {
    "load": "load the model",
    "learn": "train a step",
    "publish": "publish the weights",
    "save": "write its checkpoint",
    "export": "write the trained model",
}


class RemoteFiles:
    """The policy's side of a checkpoint, written by the trainer into the folder the orchestrator made."""

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


async def here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Work of the loop that has no device thread: what it calls is a coroutine that asks elsewhere."""
    return await function(*arguments)
