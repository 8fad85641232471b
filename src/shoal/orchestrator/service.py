"""The trainer of the split layout: a state machine that executes numbered calls, one after the other.

Its state is a checkpoint and the `learn` calls since, so a killed one is brought back by repeating them. With several
training processes the first receives and hands every call to the others; all of them execute it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.errors import ConfigError, LostRanksError, ShoalError, StorageError
from shoal.observability.atomic import fault, remove_quietly, storage
from shoal.observability.metrics import Tally
from shoal.observability.run_dir import SHARDS
from shoal.orchestrator.learn import Learner
from shoal.orchestrator.meeting import Ended, Meeting
from shoal.orchestrator.parts import Files
from shoal.orchestrator.ranks import all_or_none
from shoal.orchestrator.wire import pack_learned, unpack_groups
from shoal.protocols import Ranks, WeightChannel
from shoal.transport.calls import Answer, Answerer, Call, NotYet, failed, read_bulk

log = logging.getLogger(__name__)
PAYLOAD_S, PAYLOAD_PAUSE_S = 30.0, 0.25


class Closable(Protocol):
    async def close(self) -> None: ...


class Shards(Protocol):
    """Weights that are shared out over the ranks. Both are done by all of them at once."""

    def gather(self, moved: int) -> None:
        """Have the whole weights where they are written from; `moved` says whether they are the same as last time."""
        ...

    def save(self, folder: Path) -> None: ...


@dataclass
class Trainee:
    """Everything the calls are about, made for a run of so many steps."""

    steps: int
    learner: Learner
    files: Files
    weights: WeightChannel | None  # the first rank's alone
    on_device: Callable[..., Awaitable[Any]]
    sampler: Closable  # what is to be closed with it
    about: dict[str, Any]  # told to the orchestrator
    shards: Shards | None = None
    moved: int = 0  # how often the weights were changed since it was made


Make = Callable[[int], Awaitable[Trainee]]


@dataclass
class _Missing:
    """Calls whose payload may still come, as it may on a network's file system. Told once, and not for ever."""

    tell: Callable[[str], None]
    since: dict[tuple[str, int], float] = field(default_factory=dict)

    def wait(self, call: Call, why: NotYet) -> None:
        """Raises once it has been waited for long enough."""
        now, what = time.monotonic(), (call.session, call.number)
        assert call.file is not None
        if what not in self.since:
            said = f"waiting for {call.file.name}, which call {call.number} ({call.method}) of grpo-orch names"
            log.warning("%s: %s", said, why)
            self.tell(f"{said}, for {PAYLOAD_S:g} s at most")
        if now - self.since.setdefault(what, now) > PAYLOAD_S:
            raise StorageError(f"{why}, and did not come within {PAYLOAD_S:g} s")


class TrainingService:
    def __init__(self, make: Make, ranks: Ranks, folder: Path | None = None) -> None:
        self._make = make
        self._ranks = ranks
        self._folder = folder  # where the payload of calls lies
        self._trainee: Trainee | None = None
        self.calls = 0

    async def run(self, answerer: Answerer | None, meeting: Meeting | None) -> None:
        """Answer until the run ends, which `meeting` raises. Only the first rank has an answerer."""
        while True:
            call = await self._receive(answerer, meeting)
            answer = await self._answer(call)
            if answerer is not None:
                await answerer.answer(call, answer)
                fault(f"service:answered:{call.method}")

    async def _receive(self, answerer: Answerer | None, meeting: Meeting | None) -> Call:
        """The next call, on every rank. The others wait for as long as the first one shows signs of life."""
        received: list[Call] = []

        async def listen() -> None:
            assert answerer is not None and meeting is not None
            received.append(await self._next_call(answerer, meeting))

        await unless_ended(self._ranks, listen)
        parts = await self._ranks.exchange(msgspec.msgpack.encode(received[0]) if received else b"")
        return msgspec.msgpack.decode(parts[0], type=Call)

    async def _next_call(self, answerer: Answerer, meeting: Meeting) -> Call:
        since, missing = time.monotonic(), _Missing(meeting.tell)
        while True:
            call = await answerer.next()
            if call is not None:
                try:
                    if self._has_payload(call, missing):
                        return call
                except ShoalError as error:  # no other rank has heard of the call, and none needs to
                    await answerer.answer(call, failed(call.number, error))
                    continue
                await asyncio.sleep(PAYLOAD_PAUSE_S)  # the channel has it still, and would give it again at once
            if meeting.peers.is_alive("orch"):
                since = time.monotonic()  # it is doing something else
            meeting.watch("orch", "come back", since)

    def _has_payload(self, call: Call, missing: _Missing) -> bool:
        """Read what belongs to the call. Raises what waiting does not mend."""
        try:
            call.bulk = read_bulk(call, self._folder) if call.method == "learn" else None
        except NotYet as error:
            missing.wait(call, error)
            return False
        return True

    async def _answer(self, call: Call) -> Answer:
        self.calls += 1
        log.info("call %d: %s %s", call.number, call.method, call.head)
        handler: Callable[[Call], Awaitable[dict[str, Any]]] | None = getattr(self, f"_{call.method}", None)
        if handler is None or call.method not in METHODS:
            return failed(call.number, ConfigError(f"there is no call {call.method!r}; are all processes one version?"))
        learns = call.method == "learn"  # in which the ranks meet all the way
        try:
            return Answer(call.number, await (handler(call) if learns else all_or_none(self._ranks, handler(call))))
        except Exception as error:
            # Ranks without each other are no trainer, and the next one is brought back. One that fails while it learns
            # leaves the others in the middle of it: that it is gone is how they notice.
            if isinstance(error, LostRanksError) if self._ranks.rank == 0 else learns:
                raise
            if not isinstance(error, ShoalError):
                log.exception("call %d failed", call.number)
            return failed(call.number, error)

    def _made(self) -> Trainee:
        if self._trainee is None:
            raise ConfigError("the trainer was asked before it was told where to start")
        return self._trainee

    async def _load(self, call: Call) -> dict[str, Any]:
        """Start from a checkpoint, or from the beginning."""
        folder, steps = call.head.get("folder"), int(call.head["steps"])
        await self._have(steps, fresh=folder is None)
        trainee = self._made()
        if folder is not None:
            trainee.moved += 1
            await trainee.on_device(trainee.files.load, Path(folder))
        return trainee.about

    async def _have(self, steps: int, *, fresh: bool) -> None:
        now = self._trainee
        if now is not None and (now.steps != steps or (fresh and now.moved > 0)):
            await now.sampler.close()
            self._trainee = now = None  # first: two of them may not fit on the device
        if self._trainee is None:
            self._trainee = await self._make(steps)

    async def _learn(self, call: Call) -> dict[str, Any]:
        assert call.bulk is not None  # read before the call is taken
        trainee, tally = self._made(), Tally()
        trainee.moved += 1
        groups = unpack_groups(call.bulk)
        fault("service:learn")
        learned = await trainee.learner.learn(groups, tally)
        fault("service:learned")
        return pack_learned(learned, tally, groups)

    async def _publish(self, call: Call) -> dict[str, Any]:
        trainee, version = await self._whole(), int(call.head["version"])

        async def publish() -> Mapping[str, Any]:
            assert trainee.weights is not None
            return await trainee.weights.publish(version)

        return dict(await self._ranks.on_main(publish))

    async def _whole(self) -> Trainee:
        """The trainee, with its weights in one place if they were not."""
        trainee = self._made()
        if trainee.shards is not None:
            await trainee.on_device(trainee.shards.gather, trainee.moved)
        return trainee

    async def _save(self, call: Call) -> dict[str, Any]:
        shards, folder = self._made().shards, Path(str(call.head["folder"])) / SHARDS
        if shards is not None:

            async def make_room() -> None:
                with storage(f"save {folder}"):
                    remove_quietly(folder)  # of a trainer that was killed while it wrote
                    folder.mkdir()

            await self._ranks.on_main(make_room)
            await self._made().on_device(shards.save, folder)
        return await self._write(self._made().files.save, call)

    async def _export(self, call: Call) -> dict[str, Any]:
        return await self._write(self._made().files.export, call)

    async def _write(self, write: Callable[[Path], None], call: Call) -> dict[str, Any]:
        trainee, folder = await self._whole(), Path(str(call.head["folder"]))
        fault(f"service:{call.method}")
        await self._ranks.on_main(lambda: trainee.on_device(write, folder))
        return {}

    async def close(self) -> None:
        if self._trainee is not None:
            await self._trainee.sampler.close()


async def unless_ended(ranks: Ranks, work: Callable[[], Awaitable[None]] | None = None) -> None:
    """Work of the first rank, during which the run may end, in order: then it does so for all of them."""
    ended: list[Ended] = []

    async def listen() -> bool:
        assert work is not None
        try:
            await work()
        except Ended as error:
            ended.append(error)
        return bool(ended)

    if await ranks.on_main(listen):
        raise ended[0] if ended else Ended("the first process ended")


METHODS = ("load", "learn", "publish", "save", "export")
