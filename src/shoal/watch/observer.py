"""Forwards the reports of the loop to the console, the event log, the watchdog and the metric sinks.

Sinks are the run directory, and experiment trackers such as wandb behind a bounded queue and a thread each. A tracker
that fails, hangs or is slow neither stops nor slows the run: a full queue drops the newest record, an exception is
counted, and each kind of problem is reported once. build/ calls `check_sinks` before anything loads and `open_sinks` at
the start.
"""

from __future__ import annotations

import difflib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core.errors import ConfigError
from shoal.core.protocols import ProgressBar
from shoal.core.types import RolloutGroup
from shoal.runs.events import EventLog
from shoal.runs.rollout_log import completion_lines
from shoal.watch.console import Console
from shoal.watch.glossary import checked_metrics
from shoal.watch.trackers import TRACKERS, MetricSink, TrackerRun, completion_rows, rename
from shoal.watch.watchdog import Watchdog


@dataclass
class RunObserver:
    """Implements Observer."""

    console: Console
    events: EventLog
    watchdog: Watchdog
    sinks: Sinks

    def begin_step(self, step: int) -> None:
        self.events.step = step

    def doing(self, what: str) -> None:
        self.console.waiting(what)
        self.watchdog.beat(what)

    def progress(self, what: str, total: float) -> AbstractContextManager[ProgressBar]:
        return self.console.progress(what, total, quiet=True)

    def refilling(self, needed: int, zero_variance: float) -> None:
        groups = "group" if needed == 1 else "groups"
        text = f"waiting for {needed} more useful {groups}; {zero_variance:.0%} of groups have equal rewards"
        self.doing(f"rollouts of step {self.events.step}: {text}")

    def emit(self, kind: str, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        self.events.emit(kind, message, data=data)

    def warn(self, kind: str, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        self.events.warn(kind, message, data=data)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sinks.log(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sinks.amend(step, metrics)

    def log_completions(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        self.sinks.log_completions(step, groups)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.console.step(step, metrics)

    def show_completions(self, step: int, groups: Sequence[RolloutGroup], number: int) -> None:
        self.console.completions(step, completion_lines(groups, number))

    def close(self) -> None:
        self.sinks.close()


PHASES = ("rollout", "environment", "environment_wait", "reward", "train", "sync", "eval", "save")


class Phases:
    """Measures phases of a step. They may nest, overlap and run in several threads or tasks.

    The time of a phase is the wall time during which at least one block of that name is open, so 64 concurrent rollouts
    count once. Idle is the wall time during which no phase is open. `counters` are seconds that are measured
    elsewhere, by name: their increase is a metric of the step if there is any.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, counters: Mapping[str, Callable[[], float]] | None = None
    ) -> None:
        self._now = now
        self._counters = dict(counters or {})
        self._counted = dict.fromkeys(self._counters, 0.0)
        self._guard = threading.Lock()
        self._open: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._idle = 0.0
        self._window_start = self._last = now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; one of {', '.join(PHASES)}")
        with self._guard:
            self._advance()
            self._open[phase] = self._open.get(phase, 0) + 1
            self._seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            with self._guard:
                self._advance()
                self._open[phase] -= 1
                if not self._open[phase]:
                    del self._open[phase]

    def take(self) -> dict[str, float]:
        """The time/* metrics since the last call. Open phases continue."""
        with self._guard:
            self._advance()
            taken = {"time/step": self._last - self._window_start}
            taken |= {f"time/{phase}": self._seconds[phase] for phase in PHASES if phase in self._seconds}
            taken["time/idle"] = self._idle
            for name, read in self._counters.items():
                seconds = read()
                if seconds > self._counted[name]:
                    taken[f"time/{name}"] = seconds - self._counted[name]
                self._counted[name] = seconds
            self._seconds = dict.fromkeys(self._open, 0.0)
            self._idle = 0.0
            self._window_start = self._last
            return taken

    def _advance(self) -> None:
        now = self._now()
        elapsed = max(0.0, now - self._last)
        self._last = now
        for phase in self._open:
            self._seconds[phase] += elapsed
        if not self._open:
            self._idle += elapsed


__all__ = ["Sinks", "ThreadedSink", "TrackerRun", "check_sinks", "open_sinks"]

_END = object()
_GIVE_UP_AFTER = 20  # failures in a row; after that the tracker receives nothing


class ThreadedSink:
    """Forwards metrics to one tracker in a thread. The thread also opens the tracker, because logins may hang."""

    def __init__(
        self,
        name: str,
        build: Callable[[], MetricSink],
        *,
        capacity: int = 256,
        on_problem: Callable[[str, str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.sent = self.failed = self.dropped = 0
        self._build = build
        self._on_problem = on_problem
        self._queue: queue.Queue[Any] = queue.Queue(capacity)
        self._reported: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Never blocks, never raises."""
        self._put("log", step, dict(metrics))

    def log_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Never blocks, never raises."""
        self._put("log_completions", step, list(rows))

    def _put(self, method: str, step: int, data: Any) -> None:
        try:
            self._queue.put_nowait((method, step, data))
        except queue.Full:
            self.dropped += 1
            self._report(
                "slow", f"{self.name} is too slow or hangs; it loses metrics, the run directory keeps them all"
            )

    def counts(self) -> dict[str, int]:
        waiting = self._queue.qsize() if self._thread.is_alive() else 0
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped, "unsent": waiting}

    def finish(self) -> None:
        """Let the thread flush and end; does not wait."""
        self._ending.set()
        try:
            self._queue.put_nowait(_END)
        except queue.Full:
            return  # the thread checks the flag after it has emptied the queue

    def leave(self, timeout_s: float) -> None:
        """Wait for the thread for at most `timeout_s`; then report that metrics are missing."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            missing = "the last metrics" if self.sent else "any metrics"
            self._report("unsent", f"timeout: {self.name} did not receive {missing}; the run directory has them all")

    def close(self) -> None:
        self.finish()
        self.leave(10.0)

    def _run(self) -> None:
        try:
            sink = self._build()
        except Exception as error:
            self._count_failure(error)
            self._drain_as_failed()
            return
        self._forward(sink)
        try:
            sink.close()
        except Exception as error:
            self._count_failure(error)

    def _forward(self, sink: MetricSink) -> None:
        in_a_row = 0
        while True:
            if self._ending.is_set() and self._queue.empty():
                return
            item = self._queue.get()
            if item is _END:
                return
            if in_a_row >= _GIVE_UP_AFTER:
                self.failed += 1
                continue
            try:
                method, step, data = item
                getattr(sink, method)(step, data)
                self.sent += 1
                in_a_row = 0
            except Exception as error:
                in_a_row += 1
                self._count_failure(error)

    def _drain_as_failed(self) -> None:
        while self._queue.get() is not _END and not (self._ending.is_set() and self._queue.empty()):
            self.failed += 1

    def _count_failure(self, error: Exception) -> None:
        self.failed += 1
        self._report("failed", f"{self.name} failed; training continues without it: {type(error).__name__}: {error}")

    def _report(self, kind: str, message: str) -> None:
        if kind in self._reported or self._on_problem is None:
            return
        self._reported.add(kind)
        try:
            self._on_problem("sink", message, {"sink": self.name, "problem": kind})
        except Exception:  # the report may fail too (full disk); the writers of the run directory raise for that
            return


class MetricStore(Protocol):
    """The destination of all metrics, usually a RunDir."""

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def amend_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Watcher(Protocol):
    """Checks each recorded step, usually LiveHealth."""

    def check(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Sinks:
    """Writes metrics to the run directory, then to the health rules, then to the queue of each tracker."""

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
        metrics = checked_metrics(metrics)
        self._store.append_metrics(step, metrics)
        if self._watcher is not None:
            self._watcher.check(step, metrics)
        self._track(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is already logged."""
        metrics = checked_metrics(metrics)
        self._store.amend_metrics(step, metrics)
        self._track(step, metrics)

    def _track(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.trackers:
            renamed = rename(self._run.metric_names if self._run is not None else "native", metrics, step)
            for tracker in self.trackers:
                tracker.log(step, renamed)

    def log_completions(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Some completions of the step as a table. The run directory has all of them."""
        limit = self._run.completions if self._run is not None else 0
        if self.trackers and limit and groups:
            rows = completion_rows(step, groups, limit)
            for tracker in self.trackers:
                tracker.log_completions(step, rows)

    def close(self, timeout_s: float = 10.0) -> dict[str, dict[str, int]]:
        """Flush within `timeout_s`. Returns for each tracker how many records were sent, failed and dropped."""
        deadline = time.monotonic() + timeout_s
        for tracker in self.trackers:
            tracker.finish()
        for tracker in self.trackers:
            tracker.leave(max(0.0, deadline - time.monotonic()))
        return {tracker.name: tracker.counts() for tracker in self.trackers}


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError for unknown trackers and missing packages, without importing any."""
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(TRACKERS)}"
            raise ConfigError(f"train.report_to: unknown tracker {name!r}; {hint}")
        tracker = TRACKERS[name]
        if importlib.util.find_spec(tracker.package) is None:
            raise ConfigError(f"train.report_to: {name} needs the package {tracker.package}; {tracker.install}")
        if problem := tracker.problem():
            raise ConfigError(f"train.report_to: {name}: {problem}")


def open_sinks(
    names: Sequence[str],
    store: MetricStore,
    run: TrackerRun,
    on_problem: Callable[[str, str, Mapping[str, Any]], None] | None = None,
    watcher: Watcher | None = None,
) -> Sinks:
    """`on_problem(kind, message, data)`, usually EventLog.warn, is called for the first problem of each kind."""
    check_sinks(names)
    threaded = []
    for name in names:
        tracker = TRACKERS[name]
        threaded.append(ThreadedSink(name, lambda tracker=tracker: tracker.open(run), on_problem=on_problem))
    return Sinks(store, threaded, run, watcher)
