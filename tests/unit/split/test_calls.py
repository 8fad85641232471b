"""One suite for both transports of calls, between real ends in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.errors import EXIT_BUG, ConfigError, StoppedByPolicy, StorageError
from shoal.runs.files import set_fault_hook
from shoal.runs.secrets import CALLS
from shoal.split.calls import (
    LENGTH,
    Answer,
    Answerer,
    Call,
    Caller,
    FolderAnswerer,
    FolderCaller,
    Payload,
    PayloadInfo,
    PayloadNotReady,
    TcpAnswerer,
    TcpCaller,
    failed,
    raise_failed,
    read_bulk,
    write_bulk,
    write_frame,
)

SESSION, TRAINER = "orch-1", "train-1"
Ends = tuple[Caller, Answerer]


def never_mind() -> None: ...


@asynccontextmanager
async def ends(kind: str, folder: Path) -> AsyncIterator[Ends]:
    if kind == "filesystem":
        pair: Ends = (FolderCaller(folder, SESSION), FolderAnswerer(folder, TRAINER, lambda: SESSION))
    else:
        answerer = await TcpAnswerer.listen(folder, TRAINER, "127.0.0.1", 0)
        pair = (TcpCaller(folder, lambda: answerer.address), answerer)
    try:
        yield pair
    finally:
        await pair[0].close()
        await pair[1].close()


async def serve(answerer: Answerer, folder: Path, done: list[int]) -> None:
    while True:
        call = await answerer.next()
        if call is None:
            continue
        done.append(call.number)
        size = len(read_bulk(call, folder / "samples")) if call.bulk or call.file else 0
        await answerer.answer(call, Answer(call.number, {"method": call.method, "bytes": size}))


def run(kind: str, folder: Path, check: Callable[[Ends, list[int]], Awaitable[Any]]) -> None:
    async def both() -> None:
        done: list[int] = []
        async with ends(kind, folder) as pair:
            serving = asyncio.create_task(serve(pair[1], folder, done))
            try:
                await asyncio.wait_for(check(pair, done), 20)
            finally:
                serving.cancel()

    asyncio.run(both())


def call(number: int, method: str = "learn", to: str = TRAINER) -> Call:
    return Call(number, SESSION, to, method, {"step": number})


@pytest.mark.parametrize("kind", ["filesystem", "tcp"])
def test_calls_are_answered_in_order_with_their_payload(tmp_path: Path, kind: str):
    async def check(pair: Ends, done: list[int]) -> None:
        (tmp_path / "samples" / SESSION).mkdir(parents=True, exist_ok=True)
        bulk = write_bulk(tmp_path / "samples" / SESSION / "learn_000001.msgpack", b"x" * 100_000)
        for number in (1, 2, 3):
            answer = await pair[0].ask(call(number), bulk, never_mind)
            assert answer == Answer(number, {"method": "learn", "bytes": 100_000})
        assert (await pair[0].ask(call(4, "publish"), None, never_mind)).value == {"method": "publish", "bytes": 0}
        assert done == [1, 2, 3, 4]
        assert bulk.path.exists(), "a payload is kept until a checkpoint covers it"

    run(kind, tmp_path, check)


@pytest.mark.parametrize("kind", ["filesystem", "tcp"])
def test_call_to_another_incarnation_is_not_executed(tmp_path: Path, kind: str):
    class GivenUp(Exception): ...

    async def check(pair: Ends, done: list[int]) -> None:
        looks = 0

        def watch() -> None:
            nonlocal looks
            looks += 1
            if looks > 20:
                raise GivenUp

        with pytest.raises(GivenUp):
            await pair[0].ask(call(1, to="killed"), None, watch)
        assert (await pair[0].ask(call(2), None, never_mind)).number == 2
        assert done == [2]

    run(kind, tmp_path, check)


def test_repeated_call_is_executed_once(tmp_path: Path):
    """The connection breaks while the call runs. The answer arrives over the next connection."""

    async def both() -> None:
        answerer = await TcpAnswerer.listen(tmp_path, TRAINER, "127.0.0.1", 0)
        caller = TcpCaller(tmp_path, lambda: answerer.address)
        asking = asyncio.create_task(caller.ask(call(1), None, never_mind))
        taken = None
        while taken is None:
            taken = await answerer.next()
        assert answerer._writer is not None
        answerer._writer.close()
        await asyncio.sleep(0.6)  # it has connected and repeated the request
        await answerer.answer(taken, Answer(1, {"done": True}))
        again = await answerer.next()  # the repeated request is answered from memory
        assert again is None
        assert (await asyncio.wait_for(asking, 10)).value == {"done": True}
        await caller.close()
        await answerer.close()

    asyncio.run(both())


async def connection(answerer: TcpAnswerer, folder: Path) -> asyncio.StreamWriter:
    host, _, port = answerer.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    await write_frame(writer, (folder / CALLS).read_bytes())
    return writer


async def executed(answerer: Answerer) -> list[tuple[str, int]]:
    """All executed calls, until no more arrive."""
    done = []
    while (taken := await answerer.next()) is not None:
        done.append((taken.session, taken.number))
        await answerer.answer(taken, Answer(taken.number))
    return done


def test_late_duplicate_and_reordered_calls_are_executed_at_most_once(tmp_path: Path):
    """A step that is trained twice would change the run, whatever the connections did to its call."""

    async def both() -> None:
        answerer = await TcpAnswerer.listen(tmp_path, TRAINER, "127.0.0.1", 0)
        first = await connection(answerer, tmp_path)
        for number in (1, 2, 2, 1, 3, 2):
            await write_frame(first, msgspec.msgpack.encode(call(number)))
        assert await executed(answerer) == [(SESSION, 1), (SESSION, 2), (SESSION, 3)]
        second = await connection(answerer, tmp_path)  # the orchestrator was restarted
        await write_frame(second, msgspec.msgpack.encode(Call(1, "orch-2", TRAINER, "load")))
        assert await executed(answerer) == [("orch-2", 1)]
        with contextlib.suppress(OSError):  # the messages of the killed one arrive now
            await write_frame(first, msgspec.msgpack.encode(call(4)))
        assert await executed(answerer) == []
        await write_frame(second, msgspec.msgpack.encode(Call(2, "orch-2", "another trainer", "learn")))
        await write_frame(second, msgspec.msgpack.encode(Call(3, "orch-2", TRAINER, "learn")))
        assert await executed(answerer) == [("orch-2", 3)]
        for writer in (first, second):
            writer.close()
        await answerer.close()

    asyncio.run(both())


def test_vanished_caller_does_not_block_others(tmp_path: Path):
    """Its connection stays open and reads nothing. The answer is larger than the system's buffers."""

    async def both() -> None:
        answerer = await TcpAnswerer.listen(tmp_path, TRAINER, "127.0.0.1", 0)
        first = await connection(answerer, tmp_path)
        await write_frame(first, msgspec.msgpack.encode(call(1)))
        asked = await answerer.next()
        assert asked is not None
        first.transport.pause_reading()  # type: ignore[attr-defined]
        answering = asyncio.create_task(answerer.answer(asked, Answer(1, {"text": "x" * (1 << 26)})))
        await asyncio.sleep(0.2)
        assert not answering.done()
        second = await connection(answerer, tmp_path)
        await write_frame(second, msgspec.msgpack.encode(Call(1, "orch-2", TRAINER, "load")))
        await asyncio.wait_for(answering, 5)
        assert await executed(answerer) == [("orch-2", 1)]
        for writer in (first, second):
            writer.close()
        await answerer.close()

    asyncio.run(both())


def test_late_or_repeated_folder_calls_are_not_executed_again(tmp_path: Path):
    async def both() -> None:
        sessions = [SESSION]
        answerer = FolderAnswerer(tmp_path, TRAINER, lambda: sessions[-1])

        def put(asked: Call) -> None:
            folder = tmp_path / "samples" / asked.session
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"call_{asked.number:06d}.msgpack").write_bytes(msgspec.msgpack.encode(asked))

        for number in (2, 1, 3):  # they are present at once, in reverse order
            put(call(number))
        assert await executed(answerer) == [(SESSION, 1), (SESSION, 2), (SESSION, 3)]
        for number in (2, 3):  # again
            put(call(number))
        assert await executed(answerer) == []
        sessions.append("orch-2")
        put(call(4))  # of the previous one
        put(Call(1, "orch-2", TRAINER, "load"))
        assert await executed(answerer) == [("orch-2", 1)]

    asyncio.run(both())


def test_unreadable_answer_raises_storage_error(tmp_path: Path):
    def fail(place: str) -> None:
        if place == "read:answer_000001.msgpack":
            raise OSError(errno.EIO, "Input/output error")

    async def check(pair: Ends, done: list[int]) -> None:
        with pytest.raises(StorageError, match=r"could not read .*answer_000001.* I/O error; check the disk"):
            await pair[0].ask(call(1), None, never_mind)
        assert done == [1]

    set_fault_hook(fail)
    try:
        run("filesystem", tmp_path, check)
    finally:
        set_fault_hook(None)


def test_receiver_requires_the_token(tmp_path: Path):
    async def check(pair: Ends, done: list[int]) -> None:
        address = pair[1].address
        host, _, port = address.rpartition(":")
        for shown in (b"wrong", b"", LENGTH.pack(1 << 40)):
            reader, writer = await asyncio.open_connection(host, int(port))
            if len(shown) == LENGTH.size:
                writer.write(shown)  # a length that is never waited for
            else:
                await write_frame(writer, shown)
            assert await asyncio.wait_for(reader.read(), 5) == b"", "the connection is closed"
            writer.close()
        assert stat.S_IMODE((tmp_path / CALLS).stat().st_mode) == 0o600
        assert (await pair[0].ask(call(1), None, never_mind)).number == 1
        assert done == [1]

    run("tcp", tmp_path, check)


def test_taken_port_is_reported_with_its_key(tmp_path: Path):
    async def both() -> None:
        first = await TcpAnswerer.listen(tmp_path, TRAINER, "127.0.0.1", 0)
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(
            ConfigError,
            match=rf"127.0.0.1:{port}: Address already in use; choose another train\.rollout_transport\.port",
        ):
            await TcpAnswerer.listen(tmp_path, TRAINER, "127.0.0.1", port)
        await first.close()

    asyncio.run(both())


def test_folders_of_earlier_sessions_are_removed(tmp_path: Path):
    old = tmp_path / "samples" / "orch-0"
    old.mkdir(parents=True)
    (old / "call_000001.msgpack").write_bytes(b"")
    FolderCaller(tmp_path, SESSION)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == [SESSION]


@pytest.mark.parametrize(
    ("raised", "told", "code"),
    [
        (ConfigError("a"), ConfigError, 2),
        (StoppedByPolicy("a"), StoppedByPolicy, 3),
        (StorageError("a"), StorageError, 4),
        (ZeroDivisionError("a"), StoppedByPolicy, EXIT_BUG),
    ],
)
def test_remote_failure_raises_the_same_error(raised: Exception, told: type[Exception], code: int):
    answer = failed(5, raised)
    assert (answer.number, answer.code) == (5, code)
    with pytest.raises(told, match=r"grpo-train: .*a"):
        raise_failed(answer, "grpo-train")


@pytest.mark.parametrize(
    ("session", "file"),
    [(SESSION, "../../secret"), (SESSION, ".."), ("..", "secret"), (".", "x"), ("", "x"), ("/", "x")],
)
def test_payload_path_is_limited_to_the_call_folder(tmp_path: Path, session: str, file: str):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "samples" / SESSION).mkdir(parents=True)
    (tmp_path / "samples" / "x").write_text("x")
    asked = Call(1, session, TRAINER, "learn", file=PayloadInfo(file, 1, ""))
    with pytest.raises(ConfigError, match="without its payload"):
        read_bulk(asked, tmp_path / "samples")


def written(folder: Path, content: bytes = b"twelve bytes") -> tuple[Payload, Call]:
    (folder / "samples" / SESSION).mkdir(parents=True)
    bulk = write_bulk(folder / "samples" / SESSION / "learn_000001.msgpack", content)
    return bulk, Call(1, SESSION, TRAINER, "learn", file=bulk.announced)


def test_incomplete_payload_may_still_arrive(tmp_path: Path):
    bulk, asked = written(tmp_path)
    assert read_bulk(asked, tmp_path / "samples") == b"twelve bytes"
    bulk.path.write_bytes(b"twelve")
    with pytest.raises(
        PayloadNotReady, match=r"learn_000001.msgpack, the payload of call 1 \(learn\), has 6 of 12 bytes"
    ):
        read_bulk(asked, tmp_path / "samples")
    bulk.path.unlink()
    with pytest.raises(PayloadNotReady, match=r"learn_000001.msgpack, the payload of call 1 \(learn\), is not there"):
        read_bulk(asked, tmp_path / "samples")


@pytest.mark.parametrize("content", [b"twelve bytez", b"twelve bytes and more"])
def test_changed_payload_is_damaged(tmp_path: Path, content: bytes):
    bulk, asked = written(tmp_path)
    bulk.path.write_bytes(content)
    damaged = rf"is damaged: its {len(content)} bytes are not those that were written"
    for carried in (None, content, content[:5]):
        asked.bulk = carried  # over a connection nothing arrives later, so a short payload is damaged too
        expected = damaged if carried != content[:5] else "is damaged: its 5 bytes"
        with pytest.raises(StorageError, match=expected) as caught:
            read_bulk(asked, tmp_path / "samples")
        assert not isinstance(caught.value, PayloadNotReady)


def test_unreadable_payload_fails_at_once(tmp_path: Path):
    bulk, asked = written(tmp_path)
    bulk.path.unlink()
    bulk.path.mkdir()
    with pytest.raises(StorageError, match="a folder is in the place of a file") as caught:
        read_bulk(asked, tmp_path / "samples")
    assert not isinstance(caught.value, PayloadNotReady)


def test_call_of_another_session_is_ignored(tmp_path: Path):
    """Its answer would be written to the path in that name."""
    answerer = FolderAnswerer(tmp_path, TRAINER, lambda: SESSION)
    folder = tmp_path / "samples" / SESSION
    folder.mkdir(parents=True)
    for number, session in ((1, "../.."), (2, SESSION)):
        encoded = msgspec.msgpack.encode(Call(number, session, TRAINER, "publish"))
        (folder / f"call_{number:06d}.msgpack").write_bytes(encoded)
    taken = asyncio.run(answerer.next())
    assert taken is not None and taken.number == 2
