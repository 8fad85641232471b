"""Where metrics go besides the run directory: experiment trackers by name, each in a thread of its own.

build.py calls `check_sinks` before anything loads and `open_sinks` at start. A tracker that fails or hangs is counted.
"""

from __future__ import annotations

import difflib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shoal.errors import ConfigError
from shoal.observability.sinks.names import rename
from shoal.observability.sinks.tables import completion_rows
from shoal.observability.sinks.threaded import ThreadedSink
from shoal.observability.sinks.trackers import TRACKERS, TrackerRun
from shoal.types import RolloutGroup

__all__ = ["Sinks", "ThreadedSink", "TrackerRun", "check_sinks", "open_sinks"]


class MetricStore(Protocol):
    """Where metrics always go; a RunDir, usually."""

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Watcher(Protocol):
    """Looks at every step as it is recorded; LiveHealth, usually."""

    def look(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Sinks:
    """The run directory first and surely, then whoever watches, then every tracker if and when it can."""

    def __init__(
        self,
        store: MetricStore,
        trackers: Sequence[ThreadedSink] = (),
        run: TrackerRun | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._watcher = watcher
        self.trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._store.append_metrics(step, metrics)
        if self._watcher is not None:
            self._watcher.look(step, metrics)
        self._track(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """More about a step that is logged already."""
        self._store.amend_metrics(step, metrics)
        self._track(step, metrics)

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.trackers:
            renamed = rename(self._run.metric_names if self._run is not None else "native", metrics, step)
            for tracker in self.trackers:
                tracker.log(step, renamed)

    def log_completions(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """A few completions of the step as a table; the run directory has them all anyway."""
        limit = self._run.completions if self._run is not None else 0
        if self.trackers and limit and groups:
            rows = completion_rows(step, groups, limit)
            for tracker in self.trackers:
                tracker.log_completions(step, rows)

    def close(self, timeout_s: float = 10.0) -> dict[str, dict[str, int]]:
        """Flush what can be flushed in time; returns by tracker what was sent, failed and dropped."""
        deadline = time.monotonic() + timeout_s
        for tracker in self.trackers:
            tracker.finish()
        for tracker in self.trackers:
            tracker.leave(max(0.0, deadline - time.monotonic()))
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
    watcher: Watcher | None = None,
) -> Sinks:
    """`on_problem(kind, message, data)` fits EventLog.warn; it is called at the first failure of each tracker."""
    check_sinks(names)
    threaded = []
    for name in names:
        tracker = TRACKERS[name]
        threaded.append(ThreadedSink(name, lambda tracker=tracker: tracker.open(run), on_problem=on_problem))
    return Sinks(store, threaded, run, watcher)
