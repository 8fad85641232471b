"""Console output of a run: a live block in a terminal, one line per step otherwise.

Used by the loop and the commands. A console that cannot be written to (closed pipe, missing encoding) stops printing or
replaces characters. It never stops a run.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO, cast

from shoal.runs.secrets import redact
from shoal.watch.text import duration, one_line, sanitise, step_line

HEARTBEAT_S = 30.0
PUBLISH_S = 1.0  # between two reports of the progress to the live page
MAX_FINISHED = 12  # operations before the first step that the live page lists


class Progress(Protocol):
    """Returned by `Console.progress`."""

    def advance(self, amount: float = 1) -> None: ...


class Console(Protocol):
    activity: Callable[[], str]  # current work of the sampler as text; set by build/

    def begin(self, title: str, total_steps: int, first_step: int = 0) -> None:
        """Start of training. `first_step` steps are already done."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def completions(self, step: int, lines: Sequence[str]) -> None: ...

    def waiting(self, what: str) -> None:
        """Set the current operation, which heartbeats show."""
        ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(
        self, description: str, total: float | None = None, *, quiet: bool = False
    ) -> AbstractContextManager[Progress]:
        """A progress bar. A quiet one belongs to a step: outside a terminal it prints no lines of its own."""
        ...

    def closing(self, lines: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def make_console(stream: TextIO | None = None, *, every: int = 1) -> BaseConsole:
    """The live console if `stream` is a terminal, else the plain one. `every` is train.logging_steps."""
    if stream is None:
        stream = cast("TextIO | None", sys.stdout) or io.StringIO()  # None if it was closed before Python started
    if not stream.isatty():
        return PlainConsole(stream, every=every)
    from shoal.watch.live_console import LiveConsole  # importing rich takes 20 ms

    return LiveConsole(stream, every=every)


@contextmanager
def stderr_console() -> Iterator[BaseConsole]:
    """A console for commands whose result goes to stdout: progress lines go to stderr."""
    console = PlainConsole(cast("TextIO | None", sys.stderr) or io.StringIO())
    try:
        yield console
    finally:
        console.close()


class SafeStream(io.TextIOBase):
    """A stream that never raises: it stops writing after a closed pipe and replaces unencodable characters with `?`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._mute = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        safe = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda: self._stream.write(safe))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._mute:
            return
        try:
            action()
        except (OSError, ValueError):  # the reader has closed the pipe
            self._mute = True


class BaseConsole:
    """Shared by both consoles: safe output, the estimate of the time left and the heartbeat thread."""

    def __init__(self, stream: TextIO, *, every: int = 1, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._stream = SafeStream(stream)
        self._every = max(1, every)
        self._heartbeat_s = heartbeat_s
        self._guard = threading.RLock()
        self._waiting, self._since = "starting", time.monotonic()
        self._last_shown = time.monotonic()
        self._stop = threading.Event()
        self._total = 0
        self._pace = Pace()
        self._step = 0
        self._bar: Bar | None = None  # of the current operation
        self.activity: Callable[[], str] = str
        self.publish: Callable[[Mapping[str, Any]], None] | None = None  # set by build/: the progress for the live page
        self._published = 0.0
        self._finished: list[tuple[str, float]] = []  # operations before the first step, with their seconds
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def begin(self, title: str, total_steps: int, first_step: int = 0) -> None:
        self._total, self._step = total_steps, first_step
        self._pace.start(first_step)
        self.note(title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._finished.clear()
        self._pace.step(step)
        if self._shows(step):
            self._show_step(step, metrics)

    def completions(self, step: int, lines: Sequence[str]) -> None:
        """Completions of the step, printed below the line of the step."""
        for line in lines if self._shows(step) else ():
            self.note(f"  {one_line(line)}")

    def _shows(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self._total)

    def waiting(self, what: str) -> None:
        self._waiting, self._since = sanitise(what), time.monotonic()

    def note(self, text: str) -> None:
        self._print(sanitise(redact(text)))

    def warn(self, text: str) -> None:
        self._print(f"warning: {sanitise(redact(text))}")

    def closing(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.note(line)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

    @contextmanager
    def progress(self, description: str, total: float | None = None, *, quiet: bool = False) -> Iterator[Progress]:
        bar = Bar(total) if quiet else LineProgress(self, one_line(description), total)
        with self._operation(description, bar):
            yield bar
        bar.finish()

    @contextmanager
    def _operation(self, description: str, bar: Bar | None) -> Iterator[None]:
        """Set the current operation for the block, then restore the previous one."""
        outer = self._waiting, self._since, self._bar
        self.waiting(description)
        self._bar = bar
        started, before_training = time.monotonic(), self._pace.has_no_steps
        try:
            yield
            if outer[2] is None and before_training:
                self._finished[MAX_FINISHED - 1 :] = []
                self._finished.append((sanitise(description), time.monotonic() - started))
        finally:
            self._waiting, self._since, self._bar = outer

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print(step_line(step, self._total, metrics, self._pace.left(self._total)))

    def _print(self, text: str) -> None:
        with self._guard:
            self._last_shown = time.monotonic()
            self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _beat(self) -> None:
        while not self._stop.wait(min(1.0, self._heartbeat_s / 4)):
            if self.publish is not None and time.monotonic() - self._published >= PUBLISH_S:
                self._published = time.monotonic()
                self.publish(self.describe_progress())
            if time.monotonic() - self._last_shown >= self._heartbeat_s:
                self._show_heartbeat()

    def describe_progress(self) -> dict[str, Any]:
        """The current operation and the position of the run, for the live page. Times in seconds."""
        now, bar = time.monotonic(), self._bar
        progress = {
            "doing": self._waiting,
            "activity": self.activity(),
            "elapsed_s": round(now - self._since, 1),
            "finished": [[name, round(seconds, 1)] for name, seconds in self._finished],
            "step": self._step,
            "total_steps": self._total or None,
            "left_s": self._pace.left(self._total) if self._total else None,
        }
        if bar is not None and bar.total:
            progress |= {"done": bar.done, "total": bar.total, "operation_left_s": bar.left(now)}
        return progress

    def _show_heartbeat(self) -> None:
        where = f"step {self._step}/{self._total} done" if self._total else "working"
        self._print(f"… {where}; now: {self._describe_operation()}")

    def _describe_operation(self) -> str:
        """The current operation, its progress and the work of the sampler."""
        details = [text for text in (str(self._bar) if self._bar is not None else "", self.activity()) if text]
        return f"{self._waiting} ({', '.join(details)})" if details else self._waiting


class PlainConsole(BaseConsole):
    """One line per step, for files, pipes and continuous integration."""


class Bar:
    """Progress of an operation; the console draws it."""

    def __init__(self, total: float | None) -> None:
        self.total = total
        self.done = 0.0
        self.started = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def left(self, now: float) -> float | None:
        """Estimated seconds left, at the speed so far."""
        if not self.total or not self.done:
            return None
        return (now - self.started) * max(0.0, self.total - self.done) / self.done

    def finish(self) -> None:
        return

    def __str__(self) -> str:
        return f"{self.done:.0f}/{self.total:.0f}" if self.total else ""


class LineProgress(Bar):
    """Progress as lines: at the start, at every 10 % and at the end."""

    def __init__(self, console: BaseConsole, description: str, total: float | None) -> None:
        super().__init__(total)
        self._console = console
        self._description = description
        self._shown_tenth = 0
        console.note(description)

    def advance(self, amount: float = 1) -> None:
        super().advance(amount)
        if self.total:
            tenth = int(10 * self.done / self.total)
            if self._shown_tenth < tenth < 10 and time.monotonic() - self.started > 5:
                self._shown_tenth = tenth
                self._console.note(f"{self._description}: {tenth}0%")

    def finish(self) -> None:
        self._console.note(f"{self._description}: done in {duration(time.monotonic() - self.started)}")


class Pace:
    """Smoothed seconds per step, to estimate the time left."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._done = 0
        self._seconds: float | None = None

    @property
    def has_no_steps(self) -> bool:
        return self._seconds is None

    def start(self, done: int) -> None:
        self._last, self._done = self._now(), done

    def step(self, step: int) -> None:
        now = self._now()
        if step > self._done:
            each = (now - self._last) / (step - self._done)
            self._seconds = each if self._seconds is None else 0.8 * self._seconds + 0.2 * each
        self._last, self._done = now, step

    def left(self, total: int) -> float | None:
        return None if self._seconds is None else self._seconds * max(0, total - self._done)
