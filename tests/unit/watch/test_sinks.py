"""Metric sinks: a tracker that fails, hangs or is missing neither stops nor slows a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, StorageError
from shoal.runs.run_dir import RunDir, read_metrics
from shoal.watch import observer as sinks_module
from shoal.watch.observer import Sinks, ThreadedSink, check_sinks, open_sinks
from shoal.watch.trackers import TRACKERS, Tracker, TrackerRun


class Collecting:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def log_completions(self, step: int, rows: Sequence[Any]) -> None:
        return

    def close(self) -> None:
        self.closed = True


class Failing(Collecting):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracker is gone")


class Hanging(Collecting):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.release.wait()


def test_good_failing_and_hanging_sinks_side_by_side(tmp_path: Path) -> None:
    good, hanging, problems = Collecting(), Hanging(), []

    def report(kind: str, message: str, data: Mapping[str, Any]) -> None:
        problems.append((kind, data["sink"], data["problem"]))

    trackers = [
        ThreadedSink("good", lambda: good, capacity=1000, on_problem=report),
        ThreadedSink("failing", Failing, capacity=1000, on_problem=report),
        ThreadedSink("hanging", lambda: hanging, capacity=5, on_problem=report),
    ]
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        sinks = Sinks(run_dir, trackers)
        started = time.monotonic()
        for step in range(1, 101):
            sinks.log(step, {"reward/mean": step / 100})
        assert time.monotonic() - started < 2
        counts = sinks.close(timeout_s=0.5)
    hanging.release.set()
    assert len(read_metrics(tmp_path / "run")) == 100
    assert [step for step, _ in good.rows] == list(range(1, 101)) and good.closed
    assert counts["good"] == {"sent": 100, "failed": 0, "dropped": 0, "unsent": 0}
    assert counts["failing"] == {"sent": 0, "failed": 100, "dropped": 0, "unsent": 0}
    assert counts["hanging"]["dropped"] >= 94 and counts["hanging"]["sent"] == 0
    assert sorted(problems) == [
        ("sink", "failing", "failed"),
        ("sink", "hanging", "slow"),
        ("sink", "hanging", "unsent"),
    ]


def test_sink_fails_to_open_and_its_problem_cannot_be_reported() -> None:
    def build() -> Collecting:
        raise RuntimeError("no login")

    def report(*_: object) -> None:
        raise StorageError("disk full")

    sink = ThreadedSink("x", build, on_problem=report)
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert sink.counts()["failed"] == 4 and sink.counts()["sent"] == 0


def test_hanging_tracker_start_delays_nothing() -> None:
    gate = threading.Event()

    def build() -> Collecting:
        gate.wait()
        return Collecting()

    problems: list[str] = []
    started = time.monotonic()
    sink = ThreadedSink("x", build, capacity=1, on_problem=lambda _, message, __: problems.append(message))
    sink.log(1, {})
    sink.log(2, {})
    sink.finish()
    sink.leave(0.05)
    assert time.monotonic() - started < 1
    assert "did not receive any metrics" in problems[-1]
    assert sink.counts() == {"sent": 0, "failed": 0, "dropped": 1, "unsent": 1}
    gate.set()


def test_unknown_and_missing_trackers_are_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean wandb"):
        check_sinks(["wandbb"])
    absent = Tracker("a_package_that_is_not_there", "pip install 'shoal[absent]'", lambda run: Collecting())
    monkeypatch.setitem(TRACKERS, "absent", absent)
    with pytest.raises(ConfigError, match=r"needs the package .*; pip install 'shoal\[absent\]'"):
        check_sinks(["absent"])


def test_open_sinks_passes_the_run_to_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Collecting]] = []

    def build(run: TrackerRun) -> Collecting:
        made.append((run.title, Collecting()))
        return made[-1][1]

    monkeypatch.setitem(sinks_module.TRACKERS, "local", Tracker("json", "", build))
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        sinks = open_sinks(["local"], run_dir, TrackerRun(run_dir.path))
        sinks.log(1, {"reward/mean": 1.0})
        assert sinks.close() == {"local": {"sent": 1, "failed": 0, "dropped": 0, "unsent": 0}}
    assert made[0][0] == "run" and made[0][1].rows == [(1, {"reward/mean": 1.0})]
