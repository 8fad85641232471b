"""Calls over a TCP connection: the trainer listens, the orchestrator connects and sends the token of the run.

A frame is a length and msgpack. The token is in the shared folder, readable only by its owner. An invalid frame closes
the connection. An answered call that is sent again gets the same answer and is not executed again.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.remote.client import retry
from shoal.runs.files import storage
from shoal.runs.secrets import CALLS, write_token
from shoal.split.calls import Answer, Call, Payload

MAX_FRAME_BYTES = 4 << 30
MAX_HELLO_BYTES = 1 << 10
HELLO_S = 10.0
WATCH_S = 0.05
ROUND_S = 0.25
LENGTH = struct.Struct("!Q")
Address = Callable[[], str | None]


class TcpCaller:
    """`address` returns where the trainer listens, which changes when it is restarted."""

    def __init__(self, folder: Path, address: Address) -> None:
        self._folder = folder
        self._address = address
        self._connection: tuple[str, asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, call: Call, bulk: Payload | None, watch: Callable[[], None]) -> Answer:
        if bulk is not None:
            with storage(f"read {bulk.path}"):
                call.bulk, call.file = bulk.path.read_bytes(), bulk.announced
        frame = msgspec.msgpack.encode(call)
        return await retry((OSError, EOFError))(self._watched_attempt, frame, call.number, watch)

    async def _watched_attempt(self, frame: bytes, number: int, watch: Callable[[], None]) -> Answer:
        attempt = asyncio.ensure_future(self._attempt(frame, number))
        try:
            while not attempt.done():
                watch()
                await asyncio.wait({attempt}, timeout=WATCH_S)
            return attempt.result()
        except (OSError, EOFError):
            await self._drop()
            watch()
            raise
        finally:
            if not attempt.done():
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
                await self._drop()  # part of a frame may have been sent

    async def _attempt(self, frame: bytes, number: int) -> Answer:
        reader, writer = await self._connected()
        await write_frame(writer, frame)
        while True:
            answer = msgspec.msgpack.decode(await read_frame(reader), type=Answer)
            if answer.number == number:
                return answer

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address()
        if address is None:
            raise ConnectionError("grpo-train has not published its address")
        if self._connection is not None and self._connection[0] == address:
            return self._connection[1], self._connection[2]
        await self._drop()
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), HELLO_S)
        await write_frame(writer, (self._folder / CALLS).read_bytes())
        self._connection = (address, reader, writer)
        return reader, writer

    async def _drop(self) -> None:
        if self._connection is not None:
            _, _, writer = self._connection
            self._connection = None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        await self._drop()


class TcpAnswerer:
    """Created by `listen`. The newest connection with a valid token is the caller."""

    def __init__(self, incarnation: str, token: str) -> None:
        self._incarnation = incarnation
        self._token = token
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._last: tuple[str, int, bytes] | None = None  # session, number, answer
        self._server: asyncio.Server | None = None
        self.address = ""

    @classmethod
    async def listen(cls, folder: Path, incarnation: str, host: str, port: int) -> TcpAnswerer:
        answerer = cls(incarnation, write_token(folder / CALLS))
        try:
            answerer._server = await asyncio.start_server(answerer._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"train.rollout_transport: cannot listen on {host}:{port}: {_why(error)}; choose another "
                "train.rollout_transport.port"
            ) from error
        bound = answerer._server.sockets[0].getsockname()[1]
        answerer.address = f"{host}:{bound}"
        return answerer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            token = await asyncio.wait_for(read_frame(reader, MAX_HELLO_BYTES), HELLO_S)
            if not hmac.compare_digest(token, self._token.encode()):
                return
            if self._writer is not None:
                self._writer.transport.abort()  # a pending write may wait for a reader that is gone
            self._writer = writer
            while not self._calls.empty():  # the caller sends unanswered calls again
                self._calls.get_nowait()
            while True:
                call = msgspec.msgpack.decode(await read_frame(reader), type=Call)
                if self._writer is not writer:
                    return  # a newer connection replaced this one
                if call.to == self._incarnation:
                    self._calls.put_nowait(call)
        except (OSError, EOFError, TimeoutError, EngineError, msgspec.MsgspecError):
            return  # a caller connects again
        finally:
            writer.close()

    async def next(self) -> Call | None:
        while True:
            try:
                call = await asyncio.wait_for(self._calls.get(), ROUND_S)
            except TimeoutError:
                return None
            if self._last is None or self._last[0] != call.session or self._last[1] < call.number:
                return call
            if self._last[1] == call.number:  # sent again over another connection while it was computed
                await self._send(self._last[2])

    async def answer(self, call: Call, answer: Answer) -> None:
        encoded = msgspec.msgpack.encode(answer)
        self._last = (call.session, call.number, encoded)
        await self._send(encoded)

    async def _send(self, encoded: bytes) -> None:
        if self._writer is not None:
            with suppress(OSError):  # the caller connects and sends the call again
                await write_frame(self._writer, encoded)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(LENGTH.pack(len(data)))
    writer.write(data)
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > limit:
        raise EngineError(f"a frame of {length} bytes is more than the {limit} allowed")
    return await reader.readexactly(length)


def _why(error: OSError) -> str:
    """The error of the system without the address that asyncio adds."""
    return os.strerror(error.errno) if error.errno else str(error)
