"""The trainer's service and a call without its payload: awaited, reported once, and with a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from shoal.config.train import TrainConfig
from shoal.core.errors import EXIT_STORAGE, EXIT_USAGE
from shoal.core.ranks import SingleProcess
from shoal.split import trainer_process as services
from shoal.split.calls import Answer, Call, FolderAnswerer, write_bulk
from shoal.split.rendezvous import Rendezvous
from shoal.split.trainer_process import TrainerState, TrainingService

SESSION = "orch-1"
GROUPS = b"groups"


class CountingAnswerer(FolderAnswerer):
    looks = 0

    async def next(self) -> Call | None:
        self.looks += 1
        return await super().next()


@dataclass
class Bench:
    """A folder with one `learn` call, and the service that reads it."""

    output_dir: Path
    answerer: CountingAnswerer
    told: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.output_dir / "samples" / SESSION

    async def answer(self) -> Answer:
        path = self.folder / "answer_000001.msgpack"
        async with asyncio.timeout(20):
            while not path.exists():
                await asyncio.sleep(0.02)
        return msgspec.msgpack.decode(path.read_bytes(), type=Answer)


def served(output_dir: Path, work: Callable[[Bench], Awaitable[None]]) -> None:
    async def never(steps: int) -> TrainerState:
        raise AssertionError("nothing was loaded")

    async def main() -> None:
        section = TrainConfig(model="m", output_dir=str(output_dir), deadline_s=20.0)
        bench = Bench(output_dir, None)  # type: ignore[arg-type]
        meeting = Rendezvous("train", section, bench.told.append)
        bench.answerer = CountingAnswerer(output_dir, meeting.presence.incarnation, lambda: SESSION)
        bench.folder.mkdir(parents=True)
        bulk = write_bulk(bench.folder / "learn_000001.msgpack", GROUPS)
        bulk.path.unlink()
        call = Call(1, SESSION, meeting.presence.incarnation, "learn", file=bulk.announced)
        (bench.folder / "call_000001.msgpack").write_bytes(msgspec.msgpack.encode(call))
        service = TrainingService(never, SingleProcess(), output_dir / "samples")
        serving = asyncio.create_task(service.run(bench.answerer, meeting))
        try:
            await work(bench)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            meeting.close()

    asyncio.run(main())


def test_missing_payload_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(services, "PAYLOAD_S", 1.0)

    async def work(bench: Bench) -> None:
        answer = await bench.answer()
        assert answer.code == EXIT_STORAGE
        named = "learn_000001.msgpack, the payload of call 1 (learn),"
        assert answer.error == f"{named} is not there, and did not arrive within 1 s"
        assert bench.answerer.looks <= 8, "it looks four times a second, not continuously"
        (said,) = (text for text in bench.told if "learn_000001" in text)
        assert said.startswith("waiting for learn_000001.msgpack, the payload of call 1 (learn) of grpo-orch")

    served(tmp_path, work)


def test_late_payload_is_accepted(tmp_path: Path):
    async def work(bench: Bench) -> None:
        await asyncio.sleep(0.6)
        (bench.folder / "learn_000001.msgpack").write_bytes(GROUPS)
        answer = await bench.answer()
        assert answer.code == EXIT_USAGE and answer.error is not None and "before `load`" in answer.error

    served(tmp_path, work)


def test_damaged_payload_fails_at_once_and_short_payload_is_awaited(tmp_path: Path):
    async def work(bench: Bench) -> None:
        (bench.folder / "learn_000001.msgpack").write_bytes(GROUPS[:3])  # more of it may arrive
        await asyncio.sleep(0.6)
        assert not (bench.folder / "answer_000001.msgpack").exists()
        began = time.monotonic()
        (bench.folder / "learn_000001.msgpack").write_bytes(b"gruops")
        answer = await bench.answer()
        assert time.monotonic() - began < 5, "errors that waiting cannot fix end at once"
        assert answer.code == EXIT_STORAGE and answer.error is not None
        assert answer.error.startswith("learn_000001.msgpack, the payload of call 1 (learn), is damaged: its 6 bytes")

    served(tmp_path, work)
