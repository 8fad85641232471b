"""Forwards the reports of the loop to the console, the event log, the watchdog and the metric sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.core.protocols import ProgressBar
from shoal.core.types import RolloutGroup
from shoal.runs.events import EventLog
from shoal.runs.rollout_log import completion_lines
from shoal.watch.console import Console
from shoal.watch.sinks import Sinks
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
