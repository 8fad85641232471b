"""How a run ends is in status.json, whatever it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.build.ends import record_end
from shoal.errors import HardwareError
from shoal.observability.run_dir import RunDir, is_used, read_status


def refuse() -> tuple[str, int]:
    raise HardwareError("no such device")


def test_a_run_refused_at_its_start_frees_the_folder(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}) as run_dir, pytest.raises(HardwareError):
        record_end(run_dir, "go on", refuse)
    assert not is_used(tmp_path)


def test_a_run_refused_later_is_not_left_running(tmp_path: Path):
    with RunDir.create(tmp_path, "", {}) as run_dir:
        run_dir.write_status("running", step=3, reason="resumed", resumable=True)
        with pytest.raises(HardwareError):
            record_end(run_dir, "go on", refuse)
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["next_command"]) == ("failed", 3, "go on")
    assert "no such device" in status["reason"]
