"""Weight versions in transfer: as folders, and over torch.distributed with gloo."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from shoal.core.errors import ConfigError, StorageError
from shoal.rollout.weight_channels import FolderWeightChannel
from shoal.runs import weight_files as manifests
from shoal.runs.files import set_fault_hook
from shoal.runs.secrets import WEIGHTS, write_token
from shoal.split.weight_broadcast import (
    MAX_TRANSFERS,
    POLL_S,
    BroadcastAddress,
    BroadcastWeightChannel,
    BroadcastWeights,
)


def folder_channel(folder: Path) -> FolderWeightChannel:
    async def export(target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"numbers")

    return FolderWeightChannel(folder, "full", export, noise_seed=7)


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "weights").iterdir())


def test_version_is_a_folder_with_a_manifest(tmp_path: Path):
    manifest = asyncio.run(folder_channel(tmp_path).publish(7))
    assert manifest["path"] == str((tmp_path / "weights" / "v000007").resolve())
    assert (manifest["version"], manifest["kind"], manifest["noise_seed"]) == (7, "full", 7)
    assert manifests.verify(manifest) == manifests.version_hash(manifest)
    assert json.loads((tmp_path / "weights" / "v000007" / "manifest.json").read_text()) == manifest
    (tmp_path / "weights" / "v000007" / "model.safetensors").write_bytes(b"numbars")
    with pytest.raises(StorageError, match="checksum"):
        manifests.verify(manifest)


def test_newest_two_are_kept_in_the_order_they_were_published(tmp_path: Path):
    async def publish() -> None:
        channel = folder_channel(tmp_path)
        for version in (4, 5, 6):
            await channel.publish(version)
        assert versions(tmp_path) == ["v000005", "v000006"]
        await channel.publish(4)  # the run returned to a checkpoint
        assert versions(tmp_path) == ["v000004", "v000006"]

    asyncio.run(publish())
    later = folder_channel(tmp_path)  # another trainer: an engine may still read the files of the previous one
    asyncio.run(later.publish(5))
    assert versions(tmp_path) == ["v000004", "v000005"]


def test_newest_checkpoint_is_found_without_a_clock(tmp_path: Path):
    """The clock was set back by a day between two versions: the later version is still kept."""

    async def publish() -> None:
        channel = folder_channel(tmp_path)
        for version in (4, 5):
            await channel.publish(version)

    asyncio.run(publish())
    yesterday = (tmp_path / "weights" / "v000004").stat().st_mtime - 86_400
    os.utime(tmp_path / "weights" / "v000005", (yesterday, yesterday))
    asyncio.run(folder_channel(tmp_path).publish(6))
    assert versions(tmp_path) == ["v000005", "v000006"]


def test_interrupted_version_is_absent(tmp_path: Path):
    async def export(target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"num")
        raise StorageError("could not save: the disk is full")

    channel = FolderWeightChannel(tmp_path, "full", export)
    with pytest.raises(StorageError, match="disk is full"):
        asyncio.run(channel.publish(1))
    assert versions(tmp_path) == []


TENSORS = {
    "a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(2.5)
}  # fmt: skip


async def snapshot() -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    return dict(TENSORS), {"r": 4}


def broadcast_channel(folder: Path, port: int = 0) -> BroadcastWeightChannel:
    return BroadcastWeightChannel(
        BroadcastAddress("127.0.0.1", port, write_token(folder / WEIGHTS)), snapshot, noise_seed=3
    )


async def fetched(folder: Path, manifest: Any) -> BroadcastWeights:
    return await asyncio.to_thread(BroadcastWeights, folder / WEIGHTS, manifest)


def stranger(manifest: Any) -> TCPStore:
    """The store as seen by any client of the port."""
    host, _, port = manifest["address"].rpartition(":")
    return TCPStore(host, int(port), 2, False, timedelta(seconds=10), wait_for_workers=False)


def wanted(folder: Path, number: int, version: int) -> str:
    """The request of an engine with the token."""
    said, token = f"{number} {version}", (folder / WEIGHTS).read_bytes()
    return f"{version} {hmac.new(token, said.encode(), 'sha256').hexdigest()}"


def test_version_can_be_fetched_repeatedly(tmp_path: Path):
    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        assert (manifest["kind"], manifest["backend"], manifest["world"]) == ("lora", "gloo", 2)
        for _ in range(2):  # the second one was restarted
            found = await fetched(tmp_path, json.loads(json.dumps(manifest)))
            assert found.hash == manifests.version_hash(manifest) and found.adapter == {"r": 4}
            assert found.shapes == {"a.weight": (3, 4), "b": (5,), "c": ()}
            for name, tensor in TENSORS.items():
                assert found.tensor(name).dtype == tensor.dtype and torch.equal(found.tensor(name), tensor)
        channel.close()

    asyncio.run(fetch())


def test_changed_or_missing_tensors_are_refused(tmp_path: Path):
    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = dict(await channel.publish(5))
        with pytest.raises(StorageError, match="does not offer version 4"):
            await fetched(tmp_path, {**manifest, "version": 4})
        wrong = [{**entry, "digest": "0" * 64} if entry["name"] == "b" else entry for entry in manifest["tensors"]]
        with pytest.raises(StorageError, match="b of version 5 arrived changed"):
            await fetched(tmp_path, {**manifest, "tensors": wrong})
        port = int(manifest["address"].rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"train\.weight_broadcast\.port"):
            broadcast_channel(tmp_path / "other", port)
        channel.close()
        broadcast_channel(tmp_path, port).close()

    asyncio.run(fetch())


@pytest.mark.parametrize("sent", range(1, 1 + len(TENSORS)))
def test_interrupted_broadcast_is_rejected(sent: int, tmp_path: Path):
    """The sender's connection breaks: the engine gets an error soon, and fetches the complete version the next time."""
    passed = itertools.count(1)

    def cut(place: str) -> None:
        if place == "broadcast:sent" and next(passed) == sent:
            raise ConnectionResetError("cut")

    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        set_fault_hook(cut)
        if sent < len(TENSORS):
            with pytest.raises(StorageError, match="version 5 could not be fetched"):
                await asyncio.wait_for(fetched(tmp_path, manifest), 10)
        else:  # all had arrived by then
            assert (await fetched(tmp_path, manifest)).hash == manifests.version_hash(manifest)
        assert (await fetched(tmp_path, manifest)).hash == manifests.version_hash(manifest)
        channel.close()

    try:
        asyncio.run(fetch())
    finally:
        set_fault_hook(None)


def test_sender_requires_the_token(tmp_path: Path):
    """Neither to a client without a token, nor to one that repeats the proof of another request."""

    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        write_token(tmp_path / "stranger" / WEIGHTS)
        for folder in (tmp_path / "nobody", tmp_path / "stranger"):
            with pytest.raises(StorageError, match=rf"has another token than {folder}"):
                await fetched(folder, manifest)
        await fetched(tmp_path, manifest)
        store = stranger(manifest)
        number = store.add("asked", 1)
        store.set(f"{number}/wanted", wanted(tmp_path, 3, 5))  # of the version that was sent
        assert (number, store.get(f"{number}/state")) == (4, b"denied")
        channel.close()

    asyncio.run(fetch())


def test_proof_is_valid_once(tmp_path: Path):
    """The proof does not stay in the store, and turning the counter back does not make it valid again."""

    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        await fetched(tmp_path, manifest)
        store = stranger(manifest)
        assert store.check(["1/state"]) and not store.check(["1/wanted"])
        for key in store.list_keys():
            if key.startswith("1/"):
                store.delete_key(key)
        store.set("1/wanted", wanted(tmp_path, 1, 5))  # is on its way
        store.add("asked", -1)
        await asyncio.sleep(10 * POLL_S)
        store.add("asked", 1)
        await asyncio.sleep(10 * POLL_S)
        assert not store.check(["1/state"]) and store.check(["1/wanted"]), "nobody read it"
        await fetched(tmp_path, manifest)
        channel.close()

    asyncio.run(fetch())


def test_silent_requester_does_not_block_others(tmp_path: Path):
    """It keeps one slot and no other. With every slot used, the next client is rejected at once and retries."""

    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        store = stranger(manifest)
        store.add("asked", 1)
        await asyncio.sleep(10 * POLL_S)
        await asyncio.wait_for(fetched(tmp_path, manifest), 10)
        store.add("asked", MAX_TRANSFERS + 1)  # 15 more are awaited, two are not
        assert [store.get(f"{number}/state") for number in (18, 19)] == [b"busy", b"busy"]
        waiting = asyncio.create_task(fetched(tmp_path, manifest))
        assert await asyncio.to_thread(store.get, "20/state") == b"busy" and not waiting.done()
        store.set("1/wanted", "5 nothing")
        assert store.get("1/state") == b"denied"
        await asyncio.wait_for(waiting, 10)
        for number in range(3, 18):
            store.set(f"{number}/wanted", "5 nothing")
        channel.close()

    asyncio.run(fetch())


@pytest.mark.parametrize("count", ["many", "", "9" * 30])
def test_invalid_count_is_repaired(count: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        await fetched(tmp_path, manifest)
        store = stranger(manifest)
        store.set("asked", count)
        await asyncio.sleep(10 * POLL_S)
        assert store.get("asked") == b"1" and "counting continues from 1" in caplog.text
        await asyncio.wait_for(fetched(tmp_path, manifest), 10)
        channel.close()

    asyncio.run(fetch())


def test_counter_jump_does_not_answer_each_request(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def fetch() -> None:
        channel = broadcast_channel(tmp_path)
        manifest = await channel.publish(5)
        store = stranger(manifest)
        store.add("asked", 10**12)
        assert await asyncio.to_thread(store.get, f"{10**12}/state") == b"busy"
        assert f"requests 1 to {10**12 - 1024} are not answered" in caplog.text
        for number in range(10**12 - 1023, 10**12 - 1023 + MAX_TRANSFERS):
            store.set(f"{number}/wanted", "5 nothing")
        await asyncio.wait_for(fetched(tmp_path, manifest), 10)
        channel.close()

    asyncio.run(fetch())


def test_loopback_server_is_not_reachable_from_outside(tmp_path: Path):
    """By default, torch's store listens on every address of the machine."""
    channel = broadcast_channel(tmp_path)
    manifest = asyncio.run(channel.publish(5))
    port = f"{int(manifest['address'].rpartition(':')[2]):04X}"
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
    channel.close()
    assert listening == [f"0100007F:{port}"]  # 127.0.0.1
