"""Detects a run without progress: warns, names the waiting component, writes the stacks of all threads to logs/.

Started by build/. It only reports. The owner of a wait ends the run: `within` raises, and `on_deadline` is called for
waits that block a thread.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.core.deadlines import wait_while_awake
from shoal.core.errors import DeadlineError
from shoal.runs.events import EventLog

Result = TypeVar("Result")


@dataclass(slots=True)
class Wait:
    """A component that waits for something, with an optional deadline."""

    waiter: str
    awaited: str
    since: float
    deadline: float | None = None
    reported: bool = False

    def describe(self, now: float) -> str:
        return f"{self.waiter} waits for {self.awaited} ({now - self.since:.0f} s so far)"


class Watchdog:
    """A thread that checks for progress. Every operation that makes progress calls `beat`."""

    def __init__(
        self,
        logs: Path,
        events: EventLog,
        *,
        stall_s: float = 300.0,
        on_deadline: Callable[[DeadlineError], None] | None = None,
        tick_s: float | None = None,
    ) -> None:
        self._logs = logs
        self._events = events
        self._stall_s = stall_s
        self._tick_s = tick_s if tick_s is not None else min(1.0, stall_s / 4)
        self._on_deadline = on_deadline
        self._guard = threading.Lock()
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self._last_beat = time.monotonic()
        self._doing = "starting"
        self._stalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def beat(self, doing: str | None = None) -> None:
        """Record progress. `doing` names the next operation, for the warning if it never ends."""
        with self._guard:
            self._last_beat = time.monotonic()
            self._stalled = False
            self._doing = doing or self._doing

    def waiting_for(self) -> list[str]:
        """The declared waits, longest first; without any, the current operation."""
        now = time.monotonic()
        with self._guard:
            waits = sorted(self._waits.values(), key=lambda wait: wait.since)
            return [wait.describe(now) for wait in waits] or [self._doing]

    @contextmanager
    def wait(self, waiter: str, awaited: str, deadline_s: float | None = None) -> Iterator[None]:
        """Declare a wait. After the deadline `on_deadline` is called; a blocked thread cannot be interrupted."""
        now = time.monotonic()
        number = next(self._numbers)
        with self._guard:
            self._waits[number] = Wait(waiter, awaited, now, None if deadline_s is None else now + deadline_s)
        try:
            yield
        finally:
            with self._guard:
                del self._waits[number]

    async def within(self, awaitable: Awaitable[Result], waiter: str, awaited: str, deadline_s: float) -> Result:
        """Await with a deadline. After it, DeadlineError names the waiter and what it waited for."""
        self._loop = asyncio.get_running_loop()
        with self.wait(waiter, awaited):
            try:
                return await wait_while_awake(awaitable, deadline_s)
            except TimeoutError as error:
                raise DeadlineError(f"timeout: {waiter} waited {deadline_s:g} s for {awaited}") from error

    def dump_stacks(self, why: str) -> Path:
        """Write the stacks of all threads and of all tasks of the event loop to logs/stacks-N.txt."""
        number = 1
        while (path := self._logs / f"stacks-{number}.txt").exists():
            number += 1
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{why}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if self._loop is not None and not self._loop.is_closed():
                for task in asyncio.all_tasks(self._loop):
                    file.write(f"\ntask {task.get_name()}\n")
                    task.print_stack(limit=20, file=file)
        return path

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._tick_s):
            now = time.monotonic()
            if now - last > self._tick_s + max(2.0, 3 * self._tick_s):
                self._extend_deadlines(now - last - self._tick_s)  # the process was suspended
            last = now
            with suppress(Exception):  # the watchdog must not stop a run; writers report a full disk
                self._check(now)

    def _extend_deadlines(self, seconds: float) -> None:
        with self._guard:
            self._last_beat += seconds
            for wait in self._waits.values():
                if wait.deadline is not None:
                    wait.deadline += seconds

    def _check(self, now: float) -> None:
        with self._guard:
            stalled_s = now - self._last_beat
            stall = stalled_s >= self._stall_s and not self._stalled
            self._stalled = self._stalled or stall
            late = [w for w in self._waits.values() if w.deadline is not None and now >= w.deadline and not w.reported]
            for wait in late:
                wait.reported = True
        if stall:
            self._warn_stall(stalled_s)
        for wait in late:
            error = DeadlineError(f"timeout: {wait.describe(now)}, past its deadline")
            self._events.warn("deadline", str(error), data={"waiter": wait.waiter, "awaited": wait.awaited})
            if self._on_deadline is not None:
                self._on_deadline(error)

    def _warn_stall(self, seconds: float) -> None:
        waiting = self.waiting_for()
        message = f"no progress for {seconds:.0f} s: {'; '.join(waiting)}"
        try:
            where = str(self.dump_stacks(message))
        except OSError as error:
            where = f"no file ({error.strerror})"
        self._events.warn("stall", f"{message}; stacks in {where}", data={"waiting": waiting, "stacks": where})
