"""Checkpoints: the newest good one is found, damaged ones are skipped with a reason, no kill leaves a partial one."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import StorageError
from shoal.runs.checkpoints import _digest
from shoal.runs.files import set_fault_hook
from shoal.runs.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path):
    with RunDir.create(tmp_path / "run", "", {"seed": 1}) as made:
        yield made


def save(run_dir: RunDir, step: int) -> Path:
    with run_dir.checkpoint(step, version=step + 100) as folder:
        (folder / "model.safetensors").write_bytes(bytes([step]) * 1000)
        (folder / "adapter").mkdir()
        (folder / "adapter" / "config.json").write_text(json.dumps({"step": step}))
    return run_dir.path / f"checkpoints/step_{step:06d}"


def reopen(run_dir: RunDir) -> RunDir:
    run_dir.close()
    return RunDir.resume(run_dir.path)


def test_manifest_names_every_file(run_dir: RunDir) -> None:
    path = save(run_dir, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["step"], manifest["version"], manifest["format"]) == (3, 103, 2)
    history = ["history/journal.jsonl", "history/metrics.jsonl"]
    assert sorted(manifest["files"]) == ["adapter/config.json", *history, "model.safetensors"]
    assert manifest["files"]["model.safetensors"]["bytes"] == 1000
    found = run_dir.newest_good_checkpoint()
    assert found is not None
    step, where, skipped = found
    assert (step, where, skipped) == (3, path, [])


def test_no_checkpoint_yet(run_dir: RunDir) -> None:
    assert run_dir.newest_good_checkpoint() is None


def flip(path: Path) -> None:
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[500] ^= 1
    (path / "model.safetensors").write_bytes(raw)


def flip_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"version": 102', '"version": 103'))


def link(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "outside")
    (path / "model.safetensors").symlink_to(path.parent / "outside")


def future_format(path: Path) -> None:
    manifest = {**json.loads((path / "manifest.json").read_text()), "format": 3}
    (path / "manifest.json").write_text(json.dumps({**manifest, "digest": _digest(manifest)}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "has changed"),
    "truncated": (lambda p: (p / "model.safetensors").write_bytes(b"x"), "1 bytes instead of 1000"),
    "missing": (lambda p: (p / "adapter/config.json").unlink(), "missing adapter/config.json"),
    "extra": (lambda p: (p / "more").write_text(""), "not in its manifest: more"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no manifest"),
    "torn manifest": (lambda p: (p / "manifest.json").write_text("{"), "damaged manifest"),
    "flipped manifest": (flip_manifest, "damaged manifest"),
    "other format": (future_format, "has format 3, this Shoal reads 2"),
    "link": (link, "symbolic link"),
    "empty": (lambda p: (shutil.rmtree(p), p.mkdir()), "no manifest"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_skipped_with_a_reason(run_dir: RunDir, kind: str) -> None:
    save(run_dir, 1)
    path = save(run_dir, 2)
    damage, reason = DAMAGE[kind]
    damage(path)
    with reopen(run_dir) as resumed:
        found = resumed.newest_good_checkpoint()
        assert found is not None and found.step == 1
        assert len(found.skipped) == 1 and reason in found.skipped[0]


def test_checkpoint_of_another_run_is_skipped(run_dir: RunDir, tmp_path: Path) -> None:
    save(run_dir, 1)
    with RunDir.create(tmp_path / "other", "", {}) as other:
        shutil.copytree(save(other, 5), run_dir.path / "checkpoints/step_000005")
    shutil.copytree(run_dir.path / "checkpoints/step_000001", run_dir.path / "checkpoints/step_000004")
    found = run_dir.newest_good_checkpoint()
    assert found is not None and found.step == 1
    assert len(found.skipped) == 2 and all("another run or step" in reason for reason in found.skipped)


def test_all_checkpoints_damaged_is_an_error(run_dir: RunDir) -> None:
    flip(save(run_dir, 1))
    with pytest.raises(StorageError, match=r"no undamaged checkpoint.*changed"):
        run_dir.newest_good_checkpoint()


def test_cut_renames_later_checkpoints_and_the_step_can_be_saved_again(run_dir: RunDir) -> None:
    save(run_dir, 1)
    flip(save(run_dir, 2))
    run_dir.mark_best(2)
    run_dir.cut_to(1)
    assert run_dir.checkpoints.steps() == [1]
    assert run_dir.checkpoints.best() is None
    assert (run_dir.path / "checkpoints/rejected-step_000002").is_dir()
    save(run_dir, 2)
    found = run_dir.newest_good_checkpoint()
    assert found is not None and (found.step, found.skipped) == (2, [])


def test_failing_caller_leaves_no_files(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="boom"), run_dir.checkpoint(1) as folder:
        (folder / "half").write_text("x")
        raise ValueError("boom")
    assert list((run_dir.path / "checkpoints").iterdir()) == []


def test_full_disk_inside_the_block_is_a_storage_error(run_dir: RunDir) -> None:
    with pytest.raises(StorageError, match=r"could not save .*step_000001: the disk is full"), run_dir.checkpoint(1):
        raise OSError(28, "No space left on device")

    class SafetensorError(Exception):  # what safetensors raises for a full disk
        pass

    with pytest.raises(StorageError, match="IoError"), run_dir.checkpoint(1):
        raise SafetensorError("IoError: No space left on device")


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (1, 2, [2, 4]),
        (1, None, [4]),
        (9, None, [1, 2, 3, 4]),
    ],
)
def test_pruning_keeps_newest_and_best(run_dir: RunDir, limit, best, left) -> None:
    for step in (1, 2, 3, 4):
        save(run_dir, step)
    if best:
        run_dir.mark_best(best, 0.5)
    run_dir.prune_checkpoints(limit)
    assert run_dir.checkpoints.steps() == left


def test_pruning_never_removes_the_newest_good_one(run_dir: RunDir) -> None:
    for step in (1, 2, 3):
        save(run_dir, step)
    flip(run_dir.path / "checkpoints/step_000003")
    with reopen(run_dir) as resumed:
        resumed.prune_checkpoints(1)
        found = resumed.newest_good_checkpoint()
        assert found is not None and found.step == 2


def test_export_replaces_final_whole(run_dir: RunDir) -> None:
    for text in ("one", "two"):
        with run_dir.export() as folder:
            (folder / "model").write_text(text)
    assert (run_dir.path / "final/model").read_text() == "two"
    assert not [entry for entry in run_dir.path.iterdir() if entry.name.startswith(".")]


def cut_at(name: str) -> None:
    def hook(place: str) -> None:
        if place == name:
            raise KeyboardInterrupt(place)

    set_fault_hook(hook)


def test_interrupted_replacement_of_final_restores_the_old_one(run_dir: RunDir) -> None:
    with run_dir.export() as folder:
        (folder / "model").write_text("old")
    cut_at("replaced:final")
    try:
        with pytest.raises(KeyboardInterrupt), run_dir.export() as folder:
            (folder / "model").write_text("new")
    finally:
        set_fault_hook(None)
    assert not (run_dir.path / "final").exists()
    with reopen(run_dir):
        assert (run_dir.path / "final/model").read_text() == "old"


STAGED = """
import os, signal, sys
from shoal.runs.files import set_fault_hook
from shoal.runs.checkpoints import _digest
from shoal.runs.run_dir import RunDir
stage = sys.argv[2]
run_dir = RunDir.resume(sys.argv[1])
def hook(place):
    if place == stage:
        os.kill(os.getpid(), signal.SIGKILL)
set_fault_hook(hook)
with run_dir.checkpoint(2) as folder:
    (folder / "weights").write_bytes(b"2" * 5000)
run_dir.prune_checkpoints(1)
"""


@pytest.mark.parametrize(
    ("stage", "newest"),
    [
        ("checkpoint:files", 1),
        ("written:manifest.json", 1),
        ("checkpoint:manifest", 1),
        ("folder:synced", 1),
        ("prune:renamed", 2),
    ],
)
def test_kill_at_each_stage(run_dir: RunDir, stage: str, newest: int) -> None:
    save(run_dir, 1)
    run_dir.close()
    process = subprocess.run([sys.executable, "-c", STAGED, str(run_dir.path), stage], check=False)
    assert process.returncode == -signal.SIGKILL
    with RunDir.resume(run_dir.path) as resumed:
        found = resumed.newest_good_checkpoint()
        assert found is not None and (found.step, found.skipped) == (newest, [])
        assert resumed.checkpoints.steps() == [newest]  # an interrupted removal leaves nothing
        assert not [e for e in (run_dir.path / "checkpoints").iterdir() if e.name.startswith(".")]


LOOP = """
import sys
from shoal.runs.checkpoints import _digest
from shoal.runs.run_dir import RunDir
run_dir = RunDir.resume(sys.argv[1])
found = run_dir.newest_good_checkpoint()
step = found.step if found else 0
if found and found.skipped:
    print("SKIPPED", found.skipped, flush=True)
run_dir.cut_to(step)
while True:
    step += 1
    run_dir.append_metrics(step, {"reward/mean": 0.5})
    run_dir.append_journal(step, {"version": step})
    run_dir.write_rollouts(step, [{"rollout_id": str(i)} for i in range(20)])
    with run_dir.checkpoint(step) as folder:
        for name in "abc":
            (folder / name).write_bytes(f"{step}{name}".encode() * 20000)
    run_dir.prune_checkpoints(2)
    run_dir.write_status("running", step=step, reason="", resumable=True)
    print(step, flush=True)
"""


def test_kills_at_any_moment_leave_a_good_newest_checkpoint(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", "", {}).close()
    dice, last = random.Random(7), 0
    for _ in range(25):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()  # a step is saved: kill a working process, not one that is starting
        time.sleep(dice.random() * 0.03)
        process.kill()
        rest = process.stdout.read()
        process.wait()
        assert "SKIPPED" not in rest
        with RunDir.resume(tmp_path / "run") as run_dir:
            found = run_dir.newest_good_checkpoint()
            assert found is not None and found.skipped == []
            assert found.step > last
            last = found.step
            assert (found.path / "b").read_bytes() == f"{last}b".encode() * 20000
            run_dir.cut_to(last)
            steps = [record["step"] for record in map(json.loads, (tmp_path / "run/journal.jsonl").open())]
            assert steps == list(range(1, last + 1))
            rollouts = sorted((tmp_path / "run/rollouts").glob("step_*.jsonl"))
            assert [len(path.read_text().splitlines()) for path in rollouts] == [20] * last
