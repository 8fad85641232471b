"""Events and log files of a run. Each event goes to events.jsonl with its step; warnings also go to the console.

`setup_logging` sends the logging of a process to logs/<component>.log, with secrets hidden. Events may be emitted from
any thread. A resume removes the events of the steps that it repeats.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from shoal.runs.files import storage
from shoal.runs.secrets import redact

# These packages have no access to the event log. Their log warnings mean that the run continues, but slower.
FORWARDED_LOGGERS = ("shoal.engine", "shoal.trainer", "shoal.models", "shoal.rewards", "shoal.core.learn")
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CHATTY_LOGGERS = ("asyncio", "urllib3", "filelock", "fsspec", "matplotlib", "aiohttp.access")
Level = Literal["notice", "warning", "error"]


class EventStore(Protocol):
    """The destination of events, usually a RunDir."""

    def append_event(self, record: Mapping[str, Any]) -> None: ...


class Notifier(Protocol):
    """Shows messages to the user, usually a Console."""

    def warn(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class EventLog:
    """Writes events. `wording` replaces config keys in messages with the argument names of the entry point used."""

    def __init__(self, store: EventStore, console: Notifier | None = None, wording: Callable[[str], str] = str) -> None:
        self._wording = wording
        self.step = 0  # current step; set by the loop
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
        """Record an event. `kind` is a short stable identifier such as checkpoint, stall, sink or non-finite."""
        step, message = self.step if step is None else step, self._wording(message)
        record = {"time": time.time(), "step": step, "level": level, "kind": kind, "message": message}
        self.counts[kind] += 1
        if self._console is not None and level != "notice":
            self._console.warn(redact(message))
        self._store.append_event({**record, "data": dict(data)} if data else record)

    def warn(self, kind: str, message: str, *, step: int | None = None, data: Mapping[str, Any] | None = None) -> None:
        self.emit(kind, message, level="warning", step=step, data=data)


class _EventHandler(logging.Handler):
    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._events.warn("slower", record.getMessage())
        except Exception:  # a failed log record must not stop the run
            self.handleError(record)


@contextmanager
def forward_log_warnings(events: EventLog) -> Iterator[None]:
    """Record log warnings of the engine, trainer and models as events."""
    handler = _EventHandler(events)
    loggers = [logging.getLogger(name) for name in FORWARDED_LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _RedactingFormatter(logging.Formatter):
    """Hides secrets in the formatted line, which includes arguments and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(logs: Path, component: str, level: int = logging.INFO) -> logging.Handler:
    """Send all logging of this process to logs/<component>.log. Returns the handler for `stop_logging`.

    Write errors of the log file are ignored: the run directory reports a full disk.
    """
    if not _COMPONENT.fullmatch(component):
        raise ValueError(f"{component!r} is not a valid name of a log file")
    with storage(f"open the log {logs / component}.log"):
        logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(logs / f"{component}.log", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s [%(threadName)s] %(message)s"))
    handler.setLevel(level)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(min(level, root.level or level))
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.raiseExceptions = False
    return handler


def stop_logging(handler: logging.Handler) -> None:
    logging.captureWarnings(False)
    logging.getLogger().removeHandler(handler)
    handler.close()
