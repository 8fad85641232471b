"""Lost, repeated, reordered and changed lines of journal and metrics are restored from the checkpoint, or reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import StorageError
from shoal.runs.history import HISTORY
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import RunDir, is_used

BINDING = {"model": "tiny", "seed": 1}
STEPS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Six steps with a checkpoint after step 5."""
    with RunDir.create(tmp_path / "run", "", BINDING, "go --resume") as run_dir:
        run_dir.append_metrics(0, {"eval/sums/mean": 0.5})
        for step in range(1, STEPS + 1):
            run_dir.append_metrics(step, {"reward/mean": step / 2})
            run_dir.append_journal(step, {"version": step, "rollout_ids": [f"sums/{step}/0/0/{i}" for i in range(2)]})
            if step == STEPS - 1:
                with run_dir.checkpoint(step) as folder:
                    (folder / "weights").write_text("w")
    return run_dir.path


def resume(path: Path) -> list[str]:
    """As the commands do. Returns the reports."""
    with RunDir.resume(path) as run_dir:
        run_dir.check_binding(BINDING)
        checkpoint = run_dir.newest_good_checkpoint()
        assert checkpoint is not None
        run_dir.cut_to(checkpoint.step)
        return run_dir.damage + run_dir.restore_history(checkpoint)


def test_steps_that_are_recorded_while_a_checkpoint_is_written_are_not_part_of_it(tmp_path: Path):
    with RunDir.create(tmp_path / "run", "", BINDING, "go --resume") as run_dir:

        def record(step: int) -> None:
            run_dir.append_metrics(step, {"reward/mean": step / 2})
            run_dir.append_journal(step, {"version": step, "rollout_ids": [f"sums/{step}/0/0/0"]})

        record(1)
        with run_dir.checkpoint(1) as folder:
            (folder / "weights").write_text("w")
            record(2)
    assert resume(run_dir.path) == []
    for name in ("journal.jsonl", "metrics.jsonl"):
        assert [record["step"] for record in read_lines(run_dir.path / name)] == [1]


def test_checkpoint_of_an_earlier_version_with_records_of_later_steps(path: Path):
    """They are computed again, so they must not be restored."""
    (folder,) = (path / "checkpoints").glob("step_*")
    for name in ("journal.jsonl", "metrics.jsonl"):
        shutil.copyfile(path / name, folder / HISTORY / name)
    seal_again(folder)
    assert resume(path) == []
    assert [record["step"] for record in read_lines(path / "journal.jsonl")] == list(range(1, STEPS))


def seal_again(folder: Path, *dropped: str) -> None:
    """Write the manifest of a changed folder."""
    from shoal.runs.checkpoints import CheckpointStore

    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    about = {key: manifest[key] for key in ("version", "created_at", "step", "run_id", "binding") if key not in dropped}
    CheckpointStore(folder.parent, manifest["run_id"])._seal(folder, about)


def without_copy(path: Path) -> None:
    """Like a checkpoint of an earlier version: no copy of the files, and no binding in the manifest."""
    (folder,) = (path / "checkpoints").glob("step_*")
    shutil.rmtree(folder / HISTORY)
    seal_again(folder, "binding")


def lose(lines: list[bytes]) -> None:
    del lines[2]


def repeat(lines: list[bytes]) -> None:
    lines.insert(3, lines[2])


def reorder(lines: list[bytes]) -> None:
    lines[1], lines[3] = lines[3], lines[1]


def change(lines: list[bytes]) -> None:
    lines[2] = lines[2].replace(b"sums/", b"other/").replace(b"mean", b"std")


def garble(lines: list[bytes]) -> None:
    lines[2] = b"\x00\x00\x00 not JSON\n"


def wrong_step(lines: list[bytes]) -> None:
    lines[2] = b'{"step":"3"}\n'


def empty(lines: list[bytes]) -> None:
    lines.clear()


DAMAGE = [lose, repeat, reorder, change, garble, wrong_step, empty]


def damage(file: Path, how: Callable[[list[bytes]], None]) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    how(lines)
    file.write_bytes(b"".join(lines))


def test_undamaged_run_has_no_findings(path: Path):
    assert resume(path) == []


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_damaged_lines_are_restored_from_the_checkpoint(path: Path, name: str, how: Callable[[list[bytes]], None]):
    wanted = [line for line in read_lines(path / name) if line["step"] < STEPS]
    damage(path / name, how)
    (problem,) = resume(path)
    assert problem.startswith(name) and "restored" in problem
    assert list(read_lines(path / name)) == wanted
    assert resume(path) == []


def test_removed_journal_is_restored(path: Path):
    (path / "journal.jsonl").unlink()
    assert len(resume(path)) == 1
    assert [line["step"] for line in read_lines(path / "journal.jsonl")] == list(range(1, STEPS))


def test_evaluation_after_the_checkpoint_is_not_damage(path: Path):
    with RunDir.resume(path) as run_dir:
        run_dir.amend_metrics(STEPS - 1, {"eval/sums/mean": 0.75})
    assert resume(path) == []


@pytest.mark.parametrize("how", [repeat, reorder])
def test_without_a_copy_repeated_and_reordered_lines_are_repaired(path: Path, how: Callable[[list[bytes]], None]):
    without_copy(path)
    assert resume(path) == []
    wanted = list(read_lines(path / "journal.jsonl"))
    damage(path / "journal.jsonl", how)
    assert len(resume(path)) == 1
    assert list(read_lines(path / "journal.jsonl")) == wanted


@pytest.mark.parametrize("how", [lose, garble, empty, wrong_step])
def test_without_a_copy_lost_lines_are_reported(path: Path, how: Callable[[list[bytes]], None]):
    without_copy(path)
    damage(path / "journal.jsonl", how)
    (problem,) = resume(path)
    assert "journal.jsonl: no line for step" in problem


def test_without_a_copy_wrong_lines_are_reported(path: Path):
    without_copy(path)

    def wrong(lines: list[bytes]) -> None:
        lines[1] = lines[1].replace(b"sums/2", b"sums/1").replace(b'"version":2', b'"version":9')

    damage(path / "journal.jsonl", wrong)
    version, twice = resume(path)
    assert "version of step 2" in version and "sums/1/0/0/0" in twice


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", None], ids=repr)
def test_damaged_status_does_not_block_a_resume(path: Path, content: bytes | None):
    run_id = json.loads((path / "status.json").read_text())["run_id"]
    (path / "status.json").unlink()
    if content is not None:
        (path / "status.json").write_bytes(content)
    assert is_used(path), "a new run must not start in this folder"
    with RunDir.resume(path) as run_dir:
        assert (run_dir.status["run_id"], run_dir.binding) == (run_id, BINDING)
    (problem,) = resume(path)
    assert "status.json" in problem


def test_damaged_status_and_a_checkpoint_of_an_earlier_version(path: Path):
    without_copy(path)
    (path / "status.json").write_text("{")
    status, settings = resume(path)
    assert "status.json" in status and "not compared" in settings


def test_damaged_status_without_a_checkpoint_is_an_error(path: Path):
    shutil.rmtree(path / "checkpoints" / f"step_{STEPS - 1:06d}")
    (path / "status.json").write_text("{")
    with pytest.raises(StorageError, match="status file"):
        RunDir.resume(path)
