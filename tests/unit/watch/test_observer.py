"""The observer of the loop: while zero-variance groups are replaced, console and live page show it."""

from __future__ import annotations

import io
import time
from pathlib import Path

from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir, read_progress
from shoal.watch.console import PlainConsole
from shoal.watch.observer import RunObserver, Sinks
from shoal.watch.report.data import describe_run
from shoal.watch.watchdog import Watchdog


def test_refilling_is_shown_in_the_console_and_on_the_page(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        events, console = EventLog(run_dir), PlainConsole(io.StringIO(), heartbeat_s=0.1)
        observer = RunObserver(console, events, Watchdog(run_dir.logs, events), Sinks(run_dir))
        observer.begin_step(7)
        with observer.progress("rollouts of step 7", 16) as bar:
            bar.advance(4)
            observer.refilling(12, 0.6)
            assert "waiting for 12 more" in console._describe_operation() and "60%" in console._describe_operation()
            console.publish = run_dir.write_progress
            deadline = time.monotonic() + 20
            while (progress := read_progress(run_dir.path)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        console.publish = None
        console.close()
        assert "waiting for 12 more" in progress["doing"] and (progress["done"], progress["total"]) == (4, 16)
        assert describe_run(run_dir.path)["progress"] == progress
        run_dir.write_status("finished", step=7, reason="", resumable=False)
        assert "progress" not in describe_run(run_dir.path), "nothing is running"
