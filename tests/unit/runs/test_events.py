"""Events of a run, log warnings of other packages as events, and log files."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.runs.events import EventLog, forward_log_warnings, setup_logging, stop_logging
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import RunDir
from shoal.watch.console import PlainConsole


class Store:
    def __init__(self, error: Exception | None = None) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.error = error

    def append_event(self, record: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)


def test_log_warnings_of_the_engine_and_the_trainer_are_events() -> None:
    store = Store()
    with forward_log_warnings(EventLog(store)):
        logging.getLogger("shoal.engine.engine").warning("decoding without graphs: %s", "why")
        logging.getLogger("shoal.trainer.supervised").info("information only")
        logging.getLogger("shoal.split.weight_broadcast").warning("not forwarded")
    logging.getLogger("shoal.engine.engine").warning("after the block")
    assert [(r["kind"], r["level"], r["message"]) for r in store.records] == [
        ("slower", "warning", "decoding without graphs: why")
    ]


def test_full_disk_does_not_raise_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with forward_log_warnings(EventLog(Store(OSError("full")))):
        logging.getLogger("shoal.engine.engine").warning("decoding without graphs")


def test_events_are_recorded_and_warnings_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        events = EventLog(run_dir, console)
        events.emit("start", "training starts")
        events.step = 4
        events.warn("non-finite", "gradient is not finite, step skipped", data={"in_a_row": 1})
    console.close()
    first, second = read_lines(tmp_path / "run/events.jsonl")
    assert (first["step"], first["kind"], first["level"]) == (0, "start", "notice")
    assert (second["step"], second["level"], second["data"]) == (4, "warning", {"in_a_row": 1})
    assert stream.getvalue() == "warning: gradient is not finite, step skipped\n"
    assert events.counts == {"start": 1, "non-finite": 1}


def test_logs_go_to_the_file_and_not_to_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = setup_logging(tmp_path / "logs", "orch")
    logging.getLogger("some.library").warning("careful \ud800")
    logging.getLogger("shoal.loop").info("step %d", 3)
    warnings.warn("deprecated thing", UserWarning, stacklevel=1)
    stop_logging(handler)
    logging.getLogger("shoal.loop").info("after")
    text = (tmp_path / "logs/orch.log").read_text()
    assert "some.library" in text and "step 3" in text and "deprecated thing" in text and "after" not in text
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    with pytest.raises(ValueError, match="not a valid name"):
        setup_logging(tmp_path, "../evil")
