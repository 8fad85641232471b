"""A metric sink behind a bounded queue and a thread, so that it can neither stop nor slow what is measured.

A full queue drops the newest record and counts it; an exception is counted and told once. The sink itself is also built
in the thread, since logging in to a tracker is what hangs most often.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.protocols import MetricSink

_END = object()
_GIVE_UP_AFTER = 20  # failures in a row; a dead tracker is then left alone


class ThreadedSink:
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
        self._told: set[str] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Never blocks, never raises."""
        self._put("log", step, dict(metrics))

    def log_completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The same for a table."""
        self._put("log_completions", step, list(rows))

    def _put(self, method: str, step: int, data: Any) -> None:
        try:
            self._queue.put_nowait((method, step, data))
        except queue.Full:
            self.dropped += 1
            self._tell("slow", f"{self.name} is too slow or hangs; metrics are dropped there, not in the run directory")

    def counts(self) -> dict[str, int]:
        waiting = self._queue.qsize() if self._thread.is_alive() else 0
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped, "unsent": waiting}

    def finish(self) -> None:
        """Ask the thread to flush and end; does not wait."""
        self._ending.set()
        try:
            self._queue.put_nowait(_END)
        except queue.Full:
            return  # the thread looks at the flag once it gets through the queue, if it ever does

    def leave(self, timeout_s: float) -> None:
        """Wait for the thread so long and no longer; what it has not taken by then is told."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            missing = "the end of this run" if self.sent else "anything of this run"
            self._tell("unsent", f"{self.name} did not take {missing} in time; the run directory has everything")

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
        self._tell("failed", f"{self.name} failed and training goes on without it: {type(error).__name__}: {error}")

    def _tell(self, kind: str, message: str) -> None:
        if kind in self._told or self._on_problem is None:
            return
        self._told.add(kind)
        try:
            self._on_problem("sink", message, {"sink": self.name, "problem": kind})
        except Exception:  # telling may fail too (a full disk), and its writers report that themselves
            return
