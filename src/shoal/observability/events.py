"""Everything notable that happens to a run, written with its reason to events.jsonl; warnings also reach the console.

Called from any thread. Each event carries a step, so that a resume can cut what it will live through again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from shoal.observability.redact import redact

# What lies below the loop knows no events; what it warns of is that a run goes on, but not as fast as it might.
BELOW = ("shoal.engine", "shoal.trainer", "shoal.models", "shoal.orchestrator.learn")
Level = Literal["notice", "warning", "error"]


class EventStore(Protocol):
    """Where events go; a RunDir, usually."""

    def append_event(self, record: Mapping[str, Any]) -> None: ...


class Teller(Protocol):
    """Who tells a person; a Console, usually."""

    def warn(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class EventLog:
    """`wording` puts a message into the words of the surface a run was started from, before anybody reads it."""

    def __init__(self, store: EventStore, console: Teller | None = None, wording: Callable[[str], str] = str) -> None:
        self._wording = wording
        self.step = 0  # the step going on; the loop sets it
        self.counts: Counter[str] = Counter()
        self._store = store
        self._console = console

    def emit(
        self,
        kind: str,
        message: str,
        *,
        level: Level = "notice",
        step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an event. `kind` is a short stable word such as checkpoint, stall, sink, non-finite."""
        step, message = self.step if step is None else step, self._wording(message)
        record = {"time": time.time(), "step": step, "level": level, "kind": kind, "message": message}
        self.counts[kind] += 1
        if self._console is not None and level != "notice":
            self._console.warn(redact(message))
        self._store.append_event({**record, "data": dict(data)} if data else record)

    def warn(self, kind: str, message: str, *, step: int | None = None, data: Mapping[str, Any] | None = None) -> None:
        self.emit(kind, message, level="warning", step=step, data=data)


class _Listener(logging.Handler):
    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._events.warn("slower", record.getMessage())
        except Exception:  # telling never ends what was told about
            self.handleError(record)


@contextmanager
def told_from_below(events: EventLog) -> Iterator[None]:
    """Warnings of the engine, the trainer and the model are events of the run."""
    listener = _Listener(events)
    loggers = [logging.getLogger(name) for name in BELOW]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
