"""What a person sees while a run goes on: a live block in a terminal, one line a step anywhere else.

Used by the orchestrator and the commands. A console that cannot be written to (closed pipe, odd encoding) falls silent
or loses characters; it never ends a run.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO, cast

from shoal.observability.redact import redact
from shoal.observability.step_line import step_line
from shoal.observability.text import duration, one_line, sanitise

HEARTBEAT_S = 30.0


class Progress(Protocol):
    """Handed out by `Console.progress`."""

    def advance(self, amount: float = 1) -> None: ...


class Console(Protocol):
    activity: Callable[[], str]  # what the sampler is doing, in words; build/ sets it

    def begin(self, title: str, total_steps: int, first_step: int = 0) -> None:
        """Training starts; `first_step` steps are already done."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def completions(self, step: int, lines: Sequence[str]) -> None: ...

    def waiting(self, what: str) -> None:
        """Say what goes on from here; shown in heartbeats."""
        ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def progress(
        self, description: str, total: float | None = None, *, quiet: bool = False
    ) -> AbstractContextManager[Progress]:
        """A bar while something goes on. A quiet one belongs to a step: no lines of its own outside a terminal."""
        ...

    def closing(self, lines: Sequence[str]) -> None: ...

    def close(self) -> None: ...


def make_console(stream: TextIO | None = None, *, plain: bool | None = None, every: int = 1) -> BaseConsole:
    """The live console if `stream` is a terminal, else the plain one; `every` is logging_steps."""
    if stream is None:
        stream = cast("TextIO | None", sys.stdout) or io.StringIO()  # None if it was closed before Python started
    if plain is None:
        plain = not stream.isatty()
    if plain:
        return PlainConsole(stream, every=every)
    from shoal.observability.live import LiveConsole  # rich costs 20 ms that a plain run need not pay

    return LiveConsole(stream, every=every)


@contextmanager
def told_on_stderr() -> Iterator[BaseConsole]:
    """For what has no lines of its own, and a result on stdout: whoever waits long is told what goes on."""
    console = PlainConsole(cast("TextIO | None", sys.stderr) or io.StringIO())
    try:
        yield console
    finally:
        console.close()


class SafeStream(io.TextIOBase):
    """Writes to a stream for as long as that works. A closed pipe mutes it; characters it cannot encode become `?`."""

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
        self._safely(lambda: self._stream.write(safe))
        return len(text)

    def flush(self) -> None:
        self._safely(self._stream.flush)

    def _safely(self, act: Callable[[], object]) -> None:
        if self._mute:
            return
        try:
            act()
        except (OSError, ValueError):  # nobody is looking any more
            self._mute = True


class BaseConsole:
    """What both consoles share: safe output, the estimate of time left, and the heartbeat thread."""

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
        self._bar: Bar | None = None  # of what is going on
        self.activity: Callable[[], str] = str
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def begin(self, title: str, total_steps: int, first_step: int = 0) -> None:
        self._total, self._step = total_steps, first_step
        self._pace.start(first_step)
        self.note(title)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._pace.step(step)
        if self._shows(step):
            self._show_step(step, metrics)

    def completions(self, step: int, lines: Sequence[str]) -> None:
        """What the policy wrote in this step, under the step's own line."""
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
        with self._going_on(description, bar):
            yield bar
        bar.finish()

    @contextmanager
    def _going_on(self, description: str, bar: Bar | None) -> Iterator[None]:
        """What goes on now; when it is over, so is the word of it."""
        outer = self._waiting, self._since, self._bar
        self.waiting(description)
        self._bar = bar
        try:
            yield
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
            if time.monotonic() - self._last_shown >= self._heartbeat_s:
                self._show_heartbeat()

    def _show_heartbeat(self) -> None:
        where = f"step {self._step}/{self._total} done" if self._total else "working"
        self._print(f"… {where}; now: {self._describe_waiting()}")

    def _describe_waiting(self) -> str:
        """What is waited for, how far it is, and what the sampler does."""
        facts = [fact for fact in (str(self._bar) if self._bar is not None else "", self.activity()) if fact]
        return f"{self._waiting} ({', '.join(facts)})" if facts else self._waiting


class PlainConsole(BaseConsole):
    """One line a step, for files, pipes and continuous integration."""


class Bar:
    """How far something is; shown by whoever draws the console."""

    def __init__(self, total: float | None) -> None:
        self.total = total
        self.done = 0.0
        self.started = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def finish(self) -> None:
        return

    def __str__(self) -> str:
        return f"{self.done:.0f}/{self.total:.0f}" if self.total else ""


class LineProgress(Bar):
    """Progress as a line now and then: at the start, every tenth or every heartbeat, and at the end."""

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
    """Seconds a step, smoothed, to estimate the time left."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()
        self._done = 0
        self._seconds: float | None = None

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
