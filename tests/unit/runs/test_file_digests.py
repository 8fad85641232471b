"""Checksums of files and buffers, against the definition: SHA-256 of the SHA-256s of 8 MiB blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from shoal.runs import files

BLOCK = files.DIGEST_BLOCK_BYTES


def defined(content: bytes) -> str:
    blocks = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


@pytest.mark.parametrize("size", (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5))
def test_files_and_buffers_have_the_defined_digest(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"fish")
    expected = [defined(content), defined(b"fish")]
    assert files.digest_files([tmp_path / "a", tmp_path / "b"]) == expected
    assert files.digest_buffers([memoryview(content), memoryview(b"fish")]) == expected


@pytest.mark.parametrize("at", (0, BLOCK - 1, BLOCK, 2 * BLOCK))
def test_digest_detects_changed_bytes_and_moved_blocks(tmp_path: Path, at: int) -> None:
    content = bytearray(np.random.default_rng(0).bytes(2 * BLOCK + 1))
    before = defined(bytes(content))
    moved = bytes(content[BLOCK : 2 * BLOCK] + content[:BLOCK] + content[2 * BLOCK :])
    content[at] ^= 1
    (tmp_path / "changed").write_bytes(content)
    (tmp_path / "moved").write_bytes(moved)
    (tmp_path / "cut").write_bytes(moved[:-1])
    found = files.digest_files(sorted(tmp_path.iterdir()))
    assert len({before, *found}) == 4
