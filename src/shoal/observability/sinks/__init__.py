"""Where metrics go besides the run directory: experiment trackers by name, each in a thread of its own.

build.py calls `check_sinks` before anything loads and `open_sinks` at start. A tracker that fails or hangs is counted.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shoal.errors import ConfigError
from shoal.observability.sinks.threaded import ThreadedSink
from shoal.observability.sinks.trackers import TRACKERS, TrackerRun

__all__ = ["Sinks", "ThreadedSink", "TrackerRun", "check_sinks", "open_sinks"]


class MetricStore(Protocol):
    """Where metrics always go; a RunDir, usually."""

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Sinks:
    """The run directory first and surely, then every tracker if and when it can."""

    def __init__(self, store: MetricStore, trackers: Sequence[ThreadedSink] = ()) -> None:
        self._store = store
        self.trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._store.append_metrics(step, metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self, timeout_s: float = 10.0) -> dict[str, dict[str, int]]:
        """Flush what can be flushed in time; returns by tracker what was sent, failed and dropped."""
        for tracker in self.trackers:
            tracker.finish()
        for tracker in self.trackers:
            tracker.join(timeout_s)
        return {tracker.name: tracker.counts() for tracker in self.trackers}


def check_sinks(names: Sequence[str]) -> None:
    """Refuse unknown trackers and those whose package is not installed, without importing any."""
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(TRACKERS)}"
            raise ConfigError(f"report_to: unknown tracker {name!r}; {hint}")
        tracker = TRACKERS[name]
        if importlib.util.find_spec(tracker.package) is None:
            raise ConfigError(f"report_to: {name} needs the package {tracker.package}; {tracker.install}")


def open_sinks(
    names: Sequence[str],
    store: MetricStore,
    run: TrackerRun,
    on_problem: Callable[[str, str, Mapping[str, Any]], None] | None = None,
) -> Sinks:
    """`on_problem(kind, message, data)` fits EventLog.warn; it is called at the first failure of each tracker."""
    check_sinks(names)
    threaded = []
    for name in names:
        tracker = TRACKERS[name]
        threaded.append(ThreadedSink(name, lambda tracker=tracker: tracker.open(run), on_problem=on_problem))
    return Sinks(store, threaded)
