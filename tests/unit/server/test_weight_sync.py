"""Versions that arrive incomplete, or two at once: a server samples from one complete version or from none."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import EngineError, StorageError
from shoal.core.types import Request, SamplingParams
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.files import set_fault_hook
from shoal.runs.weight_files import describe, version_hash
from support.models import small_model
from support.servers import Server, save, serving

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
VERSIONS = (1, 2, 3)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Manifests by version. 0 is the initial version of a server."""
    folder = tmp_path_factory.mktemp("published")
    return {v: describe(save(small_model("qwen3", seed=3 + v), folder / f"v{v}"), v, "full") for v in (0, *VERSIONS)}


@pytest.fixture
def fail_at() -> Iterator[Callable[[str, int], None]]:
    """The device fails at the given pass of a place."""

    def at(place: str, times: int) -> None:
        passed = itertools.count(1)

        def hook(name: str) -> None:
            if name == place and next(passed) == times:
                raise OSError(errno.EIO, "Input/output error")

        set_fault_hook(hook)

    yield at
    set_fault_hook(None)


async def draw(engine: HttpRolloutEngine, name: str) -> tuple[set[int], list[int]]:
    """The versions that sampled the tokens, and the tokens."""
    completion = await engine.generate(Request(name, [20, 21, 22], GREEDY))
    return {span.version for span in completion.spans}, completion.token_ids


def synced(published: dict[int, dict[str, Any]], work: Callable[[Server, HttpRolloutEngine], Any]) -> None:
    async def main() -> None:
        async with serving(Path(published[0]["path"])) as server:
            engine = HttpRolloutEngine(server.address(deadline_s=10.0))
            try:
                await asyncio.wait_for(work(server, engine), 60)
            finally:
                await engine.close()

    asyncio.run(main())


def tensors_of(file: Path) -> list[tuple[str, int, int]]:
    """Names, and the offsets of their numbers in the file, from the header of a safetensors file."""
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:length])
    return [(name, *(length + at for at in about["data_offsets"])) for name, about in head.items() if name[0] != "_"]


def test_damaged_file_changes_no_tensor(published: dict[int, Any], tmp_path: Path):
    shutil.copytree(published[1]["path"], Path(published[0]["path"]).parent / "damaged", dirs_exist_ok=True)
    folder = Path(published[0]["path"]).parent / "damaged"
    file, manifest = folder / "model.safetensors", {**published[1], "path": str(folder)}
    good, tensors = file.read_bytes(), tensors_of(file)
    assert len(tensors) == 25

    async def work(server: Server, engine: HttpRolloutEngine) -> None:
        before = await draw(engine, "before")

        async def refused(content: bytes | None) -> None:
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(StorageError, match=r"weights .*model\.safetensors"):
                await engine.load(1, manifest)
            assert (engine.version, server.inference.engine.version) == (0, 0)

        await refused(None)
        for _, begin, end in tensors:
            await refused(good[:begin])
            middle = (begin + end) // 2
            await refused(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        assert await draw(engine, "after") == before
        file.write_bytes(good)
        assert await engine.load(1, manifest) == version_hash(manifest)
        assert await draw(engine, "new") != before

    synced(published, work)


@pytest.mark.parametrize("tensor", [1, 12, 24])
def test_device_failure_between_tensors_stops_sampling(
    tensor: int, published: dict[int, Any], fail_at: Callable[[str, int], None]
):
    """Everything was verified before, and half is in place: neither version is served, and the server reports it."""

    async def work(server: Server, engine: HttpRolloutEngine) -> None:
        await engine.describe()
        fail_at("weights:tensor", tensor)
        with pytest.raises(EngineError, match=r"only in part .*restart the server"):
            await engine.load(1, published[1])
        assert not (await engine.health())["ok"] and len(server.failures) == 1
        with pytest.raises(EngineError, match="failed earlier"):
            await draw(engine, "nothing")

    synced(published, work)


def test_concurrent_syncs_are_served_in_order(published: dict[int, Any]):
    """Late, repeated, in any order, and one damaged: sampling always uses complete versions."""
    proofs = {v: version_hash(published[v]) for v in VERSIONS}
    unknown = {**published[2], "version": 9, "files": {"gone.safetensors": {"bytes": 1, "digest": "0" * 64}}}

    async def work(server: Server, engine: HttpRolloutEngine) -> None:
        alone = {}
        for version in VERSIONS:
            await engine.load(version, published[version])
            alone[version] = await draw(engine, f"alone-{version}")
        assert [versions for versions, _ in alone.values()] == [{1}, {2}, {3}]

        async def load(version: int) -> None:
            status, reply = await server.ask("/shoal/load", published[version])
            assert (status, reply) == (200, {"version": version, "hash": proofs[version], "applied_sigma": 0.0})

        async def refuse() -> None:
            assert (await server.ask("/shoal/load", unknown))[0] == 409

        async def look() -> None:
            told = (await server.ask("/shoal/about"))[1]
            assert told["hash"] == proofs[told["version"]], "the proof of another version"

        async def complete(number: int) -> None:
            body = {"prompt": [20, 21, 22], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
            choice = (await server.ask("/v1/completions", body))[1]["choices"][0]
            versions = {version for _, _, version in choice["shoal"]["spans"]}
            assert versions <= set(VERSIONS)
            if len(versions) == 1:
                assert choice["token_ids"] == alone[versions.pop()][1], number

        loads = [load(version) for version in (3, 1, 2, 2, 3, 1, 2)]
        mixed = zip(loads, map(complete, range(7)), (look() for _ in range(7)), strict=True)
        await asyncio.gather(*itertools.chain(*mixed), refuse(), refuse())
        await look()

    synced(published, work)
