"""Calls as files of a shared folder: samples/<session>/call_000012.msgpack and the answer beside it.

Every file appears whole, by a rename. The caller removes what was answered; a session's folder goes with its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.errors import EngineError
from shoal.observability.atomic import open_to_read, remove_quietly, storage, write_atomic
from shoal.transport.calls import Answer, Bulk, Call

FOLDER = "samples"
PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05
ROUND_S = 0.25  # how long `next` looks before it lets its caller do other things


class FolderCaller:
    def __init__(self, output_dir: Path | str, session: str) -> None:
        self.folder = Path(output_dir) / FOLDER / session
        with storage(f"create {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.parent.iterdir():
            if old.name != session:  # the run is locked, so whoever wrote there is gone
                remove_quietly(old)

    async def ask(self, call: Call, bulk: Bulk | None, watch: Callable[[], None]) -> Answer:
        call.file = bulk.announced if bulk is not None else None
        asked, answered = _paths(self.folder, call.number)
        write_atomic(asked, msgspec.msgpack.encode(call), durable=False)
        pause = PAUSE_S
        try:
            while True:
                if answered.exists():
                    with storage(f"read {answered}"), open_to_read(answered) as file:
                        return msgspec.msgpack.decode(file.read(), type=Answer)
                watch()
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, pause * 1.2)
        finally:
            remove_quietly(asked)
            remove_quietly(answered)

    async def close(self) -> None:
        remove_quietly(self.folder)


class FolderAnswerer:
    """`session` names the caller that is listened to; it changes when that one is restarted."""

    address = ""

    def __init__(self, output_dir: Path | str, incarnation: str, session: Callable[[], str | None]) -> None:
        self.folder = Path(output_dir) / FOLDER
        self._incarnation = incarnation
        self._session = session
        self._done: tuple[str, int] = ("", 0)

    async def next(self) -> Call | None:
        pause, waited = PAUSE_S, 0.0
        while waited < ROUND_S:
            call = self._find(self._session())
            if call is not None:
                return call
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(LONGEST_PAUSE_S, pause * 1.2)
        return None

    def _find(self, session: str | None) -> Call | None:
        if session is None:
            return None
        done = self._done[1] if self._done[0] == session else 0
        try:
            names = sorted(path for path in (self.folder / session).iterdir() if path.name.startswith("call_"))
        except OSError:
            return None
        for path in names:
            if int(path.stem.removeprefix("call_")) <= done:
                continue
            try:
                call = msgspec.msgpack.decode(path.read_bytes(), type=Call)
            except OSError:
                continue  # taken back meanwhile
            except msgspec.MsgspecError as error:
                raise EngineError(f"{path} is not a call of this Shoal: {error}") from error
            if call.to == self._incarnation and call.session == session:  # its answer is written by that name
                return call
        return None

    async def answer(self, call: Call, answer: Answer) -> None:
        self._done = (call.session, call.number)
        folder = self.folder / call.session
        if folder.is_dir():  # else the caller is gone, and whoever follows asks anew
            write_atomic(_paths(folder, call.number)[1], msgspec.msgpack.encode(answer), durable=False)

    async def close(self) -> None:
        return


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"call_{number:06d}.msgpack", folder / f"answer_{number:06d}.msgpack"
