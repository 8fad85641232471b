"""Frames between the pool, the reward server and its workers: a length, a job number, a kind, then JSON text.

Only text and numbers cross; nothing received is ever run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("!IQB")
MAX_JOB_BYTES = 64 * 2**20
MAX_REPLY_BYTES = 2**20

JOB = 0  # pool → server → worker: score this
STARTED = 1  # worker → server: the work begins now, and so does its timeout
RESULT = 2  # worker → server → pool: what it came to
LAST_RESULT = 3  # the same, from a worker that must be replaced
READY = 4  # server → pool: workers can be forked


class Frame(NamedTuple):
    job: int
    kind: int
    body: bytes


class OversizedFrame(ValueError):
    """A frame announces more bytes than the reader accepts."""


def pack(job: int, kind: int, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), job, kind) + body


class FrameBuffer:
    """Bytes in, whole frames out."""

    def __init__(self, max_bytes: int) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, job, kind = HEADER.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise OversizedFrame(f"a frame of {length:,} bytes; the limit is {self._max_bytes:,}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(job, kind, body)
