"""Checksums of gigabytes, on all cores: the SHA-256 of the SHA-256s of the blocks that a content consists of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shoal.observability.atomic import open_to_read

BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 20  # at once: what was read is still in the cache when it is hashed
THREADS = min(16, os.cpu_count() or 1)  # hashing and reading release the interpreter lock


def digest_files(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(THREADS) as pool:
        return [_of_file(path, pool) for path in paths]


def digest_buffers(buffers: Sequence[memoryview]) -> list[str]:
    """Of contents in memory, in bytes."""
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = [
            [pool.submit(_of_block, buffer[start : start + BLOCK_BYTES]) for start in _starts(len(buffer))]
            for buffer in buffers
        ]
        return [_joined(futures) for futures in blocks]


def _of_file(path: Path, pool: ThreadPoolExecutor) -> str:
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _joined([pool.submit(_of_part, file.fileno(), start) for start in _starts(size)])


def _starts(size: int) -> range:
    return range(0, size, BLOCK_BYTES)


def _of_block(block: memoryview) -> bytes:
    return hashlib.sha256(block).digest()


def _of_part(descriptor: int, start: int) -> bytes:
    """Of one block of a file, which may have become shorter meanwhile."""
    block, end = hashlib.sha256(), start + BLOCK_BYTES
    while start < end and (part := os.pread(descriptor, min(READ_BYTES, end - start), start)):
        block.update(part)
        start += len(part)
    return block.digest()


def _joined(blocks: Iterable[Future[bytes]]) -> str:
    return hashlib.sha256(b"".join(block.result() for block in blocks)).hexdigest()
