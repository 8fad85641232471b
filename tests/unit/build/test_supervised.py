"""Supervised steps: records, saving and ends."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import pytest

from shoal.build.sft import SupervisedRecorder
from shoal.build.signals import stop_signals
from shoal.core.errors import StoppedByPolicy
from shoal.core.state import SaveCadence
from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir, read_metrics, read_status
from shoal.watch.console import PlainConsole
from shoal.watch.observer import Sinks

STEP = {"sft/loss": 1.0, "tokens/completion": 8.0, "optim/lr": 0.1, "optim/skipped": 0.0, "optim/grad_norm": 1.0}
SKIPPED = {**STEP, "optim/skipped": 1.0}


class OneFile:
    def save(self, folder: Path) -> None:
        (folder / "weights").write_bytes(b"1")

    def load(self, folder: Path) -> None:
        raise AssertionError("not called")

    def export(self, folder: Path) -> None:
        raise AssertionError("not called")


@pytest.fixture
def run_dir(tmp_path: Path):
    with RunDir.create(tmp_path / "run", "", {}) as made:
        yield made


def recorder(run_dir: RunDir, save: SaveCadence, stop: list[int] | None = None) -> SupervisedRecorder:
    console = PlainConsole(io.StringIO())
    events = EventLog(run_dir, console)
    return SupervisedRecorder(
        run_dir, events, console, Sinks(run_dir), OneFile(), save, 9, 5, "go on", [] if stop is None else stop
    )


def test_every_step_is_recorded_and_some_are_saved(run_dir: RunDir):
    record = recorder(run_dir, SaveCadence(4))
    assert [record(step, STEP) for step in range(1, 10)] == [False] * 9
    assert [line["step"] for line in read_metrics(run_dir.path)] == list(range(1, 10))
    assert run_dir.checkpoints.steps() == [4, 8, 9]
    status = read_status(run_dir.path)
    assert (status["step"], status["next_command"], status["resumable"]) == (9, "go on", True)


def test_seconds_are_a_cadence_too(run_dir: RunDir):
    record = recorder(run_dir, SaveCadence(None, 1e-9))
    record(1, STEP)
    record(2, STEP)
    assert run_dir.checkpoints.steps() == [1, 2]


def test_signal_saves_and_stops(run_dir: RunDir):
    with stop_signals() as stop:
        record = recorder(run_dir, SaveCadence(100), stop)
        assert not record(1, STEP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert record(2, STEP) and stop == [143]
    assert run_dir.checkpoints.steps() == [2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the previous handler is restored"


def test_three_skipped_steps_in_a_row_end_it_with_a_checkpoint(run_dir: RunDir):
    record = recorder(run_dir, SaveCadence(100))
    for step, metrics in enumerate((SKIPPED, SKIPPED, STEP, SKIPPED, SKIPPED), start=1):
        record(step, metrics)
    with pytest.raises(StoppedByPolicy, match="non-finite"):
        record(6, SKIPPED)
    assert run_dir.checkpoints.steps() == [6]
