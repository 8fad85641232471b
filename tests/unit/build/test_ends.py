"""status.json records how a run ended, for every outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.build.workspace import end_at_once, newest_checkpoint, record_end
from shoal.core.errors import HardwareError
from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir, is_used, read_status


def refuse() -> tuple[str, int]:
    raise HardwareError("no such device")


def test_run_refused_at_its_start_frees_the_folder(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}) as run_dir, pytest.raises(HardwareError):
        record_end(run_dir, "go on", refuse)
    assert not is_used(tmp_path)


def test_run_refused_later_is_not_left_running(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}) as run_dir:
        run_dir.write_status("running", step=3, reason="resumed", resumable=True)
        with pytest.raises(HardwareError):
            record_end(run_dir, "go on", refuse)
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["next_command"]) == ("failed", 3, "go on")
    assert "no such device" in status["reason"]


def test_second_signal_status_names_the_checkpoint(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}, "go on") as run_dir:
        said = "ended at once by a second signal; there is no checkpoint yet, so the run starts again from the "
        said += "beginning"
        assert end_at_once(run_dir, "go on") == f"{said}; to continue: go on"
        assert read_status(tmp_path)["reason"] == said
        for step in (2, 10):
            with run_dir.checkpoint(step) as folder:
                (folder / "weights").write_bytes(b"w")
        end_at_once(run_dir, "go on")
        status = read_status(tmp_path)
        assert status["reason"].endswith("from the checkpoint of step 10")
        assert (status["state"], status["resumable"], status["next_command"]) == ("interrupted", True, "go on")


def test_damaged_lines_omitted_by_a_resume_are_reported(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}, "go on") as run_dir:
        for step in (1, 2, 3):
            run_dir.append_journal(step, {})
            run_dir.append_metrics(step, {})
        with run_dir.checkpoint(3):
            pass
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal.jsonl").write_bytes(lines[0] + b"\xff\x00\n" + lines[2])
    with RunDir.resume(tmp_path) as run_dir:
        found = newest_checkpoint(run_dir, EventLog(run_dir))
        assert found is not None and found.step == 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {(event["kind"], event["level"]) for event in events} == {("damaged", "warning")}
    left_out, restored = [event["message"] for event in events]
    assert left_out == "journal.jsonl: 1 line could not be read and left out: [2]" and "restored" in restored
    assert (tmp_path / "journal.jsonl").read_bytes() == b"".join(lines)
