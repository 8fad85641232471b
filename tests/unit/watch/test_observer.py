"""The observer of the loop: a step that replaces zero-variance groups is visible in the console and on the page."""

from __future__ import annotations

import io
from pathlib import Path

from shoal.runs.events import EventLog
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import RunDir
from shoal.watch.console import PlainConsole
from shoal.watch.observer import RunObserver
from shoal.watch.sinks import Sinks
from shoal.watch.watchdog import Watchdog


def test_refilling_is_shown_at_once_and_becomes_an_event_when_it_takes_long(tmp_path: Path) -> None:
    clock = [100.0]
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        events, console = EventLog(run_dir), PlainConsole(io.StringIO())
        observer = RunObserver(console, events, Watchdog(run_dir.logs, events), Sinks(run_dir), lambda: clock[0])
        observer.begin_step(7)
        for seconds, needed in ((1, 16), (9, 14), (12, 12), (15, 6), (23, 1)):
            clock[0] = 100.0 + seconds
            observer.refilling(needed, 0.6)
            assert (
                f"waiting for {needed} more" in console._describe_operation() and "60%" in console._describe_operation()
            )
        console.close()
    emitted = [(event["kind"], event["step"], event["level"]) for event in read_lines(tmp_path / "run/events.jsonl")]
    assert emitted == [("refill", 7, "notice")] * 2, "one after 10 s, one 10 s later"
