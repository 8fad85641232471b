"""Notices when a run stops moving, says who waits for whom, and leaves the stacks of all threads in logs/.

Started by the orchestrator. It looks and tells; ending the run is up to whoever owns the wait (`within`, or the
`on_deadline` callback for waits that block a thread).
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import DeadlineError
from shoal.observability.events import EventLog

Result = TypeVar("Result")
AWAKE_TICK_S = 1.0


async def wait_awake(
    futures: Collection[asyncio.Future[Any]], limit_s: float, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """As asyncio.wait, with a limit on the time this process was awake.

    One that was stopped (Ctrl-Z, a debugger) comes back to answers that are there and not yet read: nobody is late.
    """
    first, left_s = return_when == asyncio.FIRST_COMPLETED, limit_s
    while True:
        tick_s, began = min(AWAKE_TICK_S, max(left_s, 0.0)), time.monotonic()
        done, pending = await asyncio.wait(futures, timeout=tick_s, return_when=return_when)
        left_s -= min(time.monotonic() - began, 2 * tick_s)
        if (done and first) or not pending or left_s <= 0.001:
            return done, pending


async def awake_within(awaitable: Awaitable[Result], limit_s: float) -> Result:
    """As asyncio.wait_for, with the same limit: TimeoutError once it is passed, and the work is cancelled."""
    task = asyncio.ensure_future(awaitable)
    try:
        await wait_awake({task}, limit_s)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    raise TimeoutError


async def within(limit_s: float, work: Awaitable[Result], what: str, key: str) -> Result:
    """The same for something whose limit is a setting: DeadlineError names both."""
    try:
        return await awake_within(work, limit_s)
    except TimeoutError:
        raise DeadlineError(f"{what} took longer than {limit_s:g} s; raise {key} if that is expected") from None


@dataclass(slots=True)
class Wait:
    """Somebody waiting for something since a moment, with an optional moment at which that is too long."""

    waiter: str
    awaited: str
    since: float
    deadline: float | None = None
    told: bool = False

    def describe(self, now: float) -> str:
        return f"{self.waiter} has waited {now - self.since:.0f} s for {self.awaited}"


class Watchdog:
    """A thread that wakes a few times per `stall_s`. Beats come from whatever makes progress."""

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
        """Progress was made; `doing` says what comes next, to be named if it never ends."""
        with self._guard:
            self._last_beat = time.monotonic()
            self._stalled = False
            self._doing = doing or self._doing

    def waiting_for(self) -> list[str]:
        """Who waits for whom, longest first; the present activity if nobody declared a wait."""
        now = time.monotonic()
        with self._guard:
            waits = sorted(self._waits.values(), key=lambda wait: wait.since)
            return [wait.describe(now) for wait in waits] or [self._doing]

    @contextmanager
    def wait(self, waiter: str, awaited: str, deadline_s: float | None = None) -> Iterator[None]:
        """Declare a wait. Passing the deadline calls `on_deadline`; it cannot interrupt a blocked thread."""
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
        """Await with a deadline and an owner; DeadlineError names both when it passes."""
        self._loop = asyncio.get_running_loop()
        with self.wait(waiter, awaited):
            try:
                return await awake_within(awaitable, deadline_s)
            except TimeoutError as error:
                raise DeadlineError(f"{waiter} waited {deadline_s:g} s for {awaited} and gave up") from error

    def dump_stacks(self, why: str) -> Path:
        """Write the stacks of all threads, and of the tasks of the event loop in use, to logs/stacks-N.txt."""
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
                self._forgive(now - last - self._tick_s)  # the whole process was stopped; nobody is to blame
            last = now
            with suppress(Exception):  # watching never kills a run; a full disk is reported by its writers
                self._look(now)

    def _forgive(self, seconds: float) -> None:
        with self._guard:
            self._last_beat += seconds
            for wait in self._waits.values():
                if wait.deadline is not None:
                    wait.deadline += seconds

    def _look(self, now: float) -> None:
        with self._guard:
            stalled_s = now - self._last_beat
            stall = stalled_s >= self._stall_s and not self._stalled
            self._stalled = self._stalled or stall
            late = [w for w in self._waits.values() if w.deadline is not None and now >= w.deadline and not w.told]
            for wait in late:
                wait.told = True
        if stall:
            self._tell_stall(stalled_s)
        for wait in late:
            error = DeadlineError(f"{wait.describe(now)} and its deadline has passed")
            self._events.warn("deadline", str(error), data={"waiter": wait.waiter, "awaited": wait.awaited})
            if self._on_deadline is not None:
                self._on_deadline(error)

    def _tell_stall(self, seconds: float) -> None:
        waiting = self.waiting_for()
        message = f"no progress for {seconds:.0f} s: {'; '.join(waiting)}"
        try:
            where = str(self.dump_stacks(message))
        except OSError as error:
            where = f"nowhere ({error.strerror})"
        self._events.warn("stall", f"{message}; stacks in {where}", data={"waiting": waiting, "stacks": where})
