"""Processes count as alive if their heartbeat changes: no clocks, and no files of killed processes."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.core.errors import RunLockedError
from shoal.runs.files import set_fault_hook
from shoal.split import rendezvous as presences
from shoal.split.rendezvous import HeartbeatFile, Peers, RunEnd, read_end, write_run_end

DiskFull = Callable[..., None]


@pytest.fixture
def disk_full() -> Iterator[DiskFull]:
    """The disk is full at the named places from then on."""

    def at(*places: str) -> None:
        def hook(place: str) -> None:
            if place in places:
                raise OSError(errno.ENOSPC, "No space left on device")

        set_fault_hook(hook)

    yield at
    set_fault_hook(None)


def left_by_a_killed_one(folder: Path, component: str, incarnation: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"component": component, "incarnation": incarnation, "beat": 7, "section": {"model": "m"}}
    (folder / f"{component}.json").write_text(json.dumps(about))


def wait_for(done, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_later_process_is_alive_at_once(tmp_path: Path):
    peers = Peers(tmp_path / "handshake", "orch")
    peers.look()
    assert peers.get("train") is None and peers.missing() == ["infer", "train"]
    trainer = HeartbeatFile(tmp_path, "train", {"model": "m"})
    peers.look()
    found = peers.get("train")
    assert found is not None and found.incarnation == trainer.incarnation and found.section == {"model": "m"}
    trainer.close()
    assert not (tmp_path / "handshake" / "train.json").exists()


def test_files_of_a_killed_process_do_not_count_as_alive(tmp_path: Path):
    left_by_a_killed_one(tmp_path / "handshake", "train", "old")
    peers = Peers(tmp_path / "handshake", "orch")
    for _ in range(3):
        peers.look()
    assert peers.get("train") is None
    trainer = HeartbeatFile(tmp_path, "train", {})  # its successor
    peers.look()
    assert peers.get("train") is not None
    trainer.close()


def test_earlier_process_is_recognised_by_its_heartbeat(tmp_path: Path):
    trainer = HeartbeatFile(tmp_path, "train", {})
    peers = Peers(tmp_path / "handshake", "orch")
    peers.look()
    assert peers.get("train") is None, "it may be a file of a dead process"

    def beats() -> bool:
        peers.look()
        return peers.is_alive("train")

    wait_for(beats)
    trainer.close()


def test_silence_is_counted_from_the_last_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(presences, "PATIENCE_S", 0.2)
    peers = Peers(tmp_path / "handshake", "orch")
    peers.look()
    trainer = HeartbeatFile(tmp_path, "train", {})
    peers.look()
    assert peers.is_alive("train")
    trainer.close(leave_word=True)
    wait_for(lambda: not peers.is_alive("train"))
    assert peers.get("train") is not None, "it existed; its data is still valid"
    assert peers.silent_s("train") >= 0.2


def test_second_process_of_a_component_is_refused(tmp_path: Path):
    first = HeartbeatFile(tmp_path, "train", {})
    with pytest.raises(RunLockedError, match=rf"a grpo-train is in {tmp_path} already: process \d+"):
        HeartbeatFile(tmp_path, "train", {})
    first.close()
    HeartbeatFile(tmp_path, "train", {}).close()


def test_published_facts_are_visible_at_once(tmp_path: Path):
    trainer = HeartbeatFile(tmp_path, "train", {})
    trainer.tell(calls="127.0.0.1:9")
    assert json.loads((tmp_path / "handshake" / "train.json").read_text())["calls"] == "127.0.0.1:9"
    trainer.close()


def test_run_end_applies_to_named_incarnations(tmp_path: Path):
    write_run_end(tmp_path, RunEnd("no more disk", 4, "grpo-orch", ("a", "b")))
    found = read_end(tmp_path, "a")
    assert found is not None and (found.reason, found.code, found.told_by) == ("no more disk", 4, "grpo-orch")
    assert read_end(tmp_path, "c") is None, "a later process starts another run"
    (tmp_path / "end.json").write_text("{")
    assert read_end(tmp_path, "a") is None


def test_full_disk_keeps_heartbeat_and_run_end(tmp_path: Path, disk_full: DiskFull):
    """No free block: both are written in place. Otherwise all would wait for the deadline of the others."""
    trainer = HeartbeatFile(tmp_path, "train", {"model": "m"})
    peers = Peers(tmp_path / "handshake", "orch")
    peers.look()
    disk_full("written:train.json", "written:end.json")
    found = peers._seen["train"]
    before = found.beat

    def beats() -> bool:
        peers.look()
        return found.beat > before + 1

    wait_for(beats)
    assert peers.is_alive("train") and found.section == {"model": "m"}
    write_run_end(trainer.folder, RunEnd("the disk is full", 4, "grpo-train", (trainer.incarnation,)))
    told = read_end(trainer.folder, trainer.incarnation)
    assert told is not None and (told.reason, told.code) == ("the disk is full", 4)
    trainer.close()
