"""What SIGINT, SIGTERM and SIGHUP do to a run: the first asks it to stop with its state saved, the second ends it.

A hangup that was ignored when the process began stays ignored: that is how `nohup` works. An ignored SIGINT does not:
shells ignore it for whatever a script starts in the background, and a script may send it all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from shoal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated

Result = TypeVar("Result")
STOPPING = "stopping at the next safe point, with the state saved; a second signal ends it at once"
_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}


def heeded_signals() -> list[signal.Signals]:
    """Those that end a run here."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _CODES if number != signal.SIGHUP or not ignored]


def on_signals(
    interrupt: Callable[[int], None], give_up: Callable[[], str | None], tell: Callable[[str], None] = lambda _: None
) -> None:
    """The first signal asks the loop to stop at a safe point, and says so; the second ends the process where it is.

    `give_up` is called before that, to leave word, and gives a last line; whatever it raises, the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # a notebook's: signals are its own
    loop, heeded = asyncio.get_running_loop(), heeded_signals()

    def handle(code: int) -> None:
        for number in heeded:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: _end(code, give_up))
        interrupt(code)
        tell(STOPPING)

    for number in heeded:
        loop.add_signal_handler(number, handle, _CODES[number])


def _end(code: int, give_up: Callable[[], str | None]) -> None:
    for number in heeded_signals():
        signal.signal(number, lambda *_: os._exit(code))  # a third signal does not wait for words
    try:
        _write(give_up())
    finally:
        os._exit(code)


def _write(line: str | None) -> None:
    """Past Python's streams, of which one may be in the middle of a line. A panel leaves no cursor behind."""
    cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{cursor}\nshoal: {line}\n".encode() if line else cursor.encode())


def end_by(number: signal.Signals) -> NoReturn:
    """As the signal would have, now that everything is closed: whoever started this process sees by what it ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError(f"{number.name} did not end the process")


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Do work that starts an event loop. Where one is running, as in a notebook, it gets a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="run") as thread:
        return thread.submit(work).result()


@contextlib.contextmanager
def stop_signals(
    give_up: Callable[[], str | None] = lambda: None, tell: Callable[[str], None] = lambda _: None
) -> Iterator[list[int]]:
    """The same for steps without an event loop: the list gets the exit code. Earlier handlers come back at the end."""
    stop: list[int] = []
    asked = threading.Event()

    def speak() -> None:
        asked.wait()
        if stop:
            tell(STOPPING)

    def handle(number: int, _: object) -> None:
        if stop:
            _end(stop[0], give_up)
        stop.append(_CODES[signal.Signals(number)])
        asked.set()

    # The main thread may be in the middle of a line of its own when the signal comes, so another one speaks.
    threading.Thread(target=speak, name="signals", daemon=True).start()
    try:
        with _handling(heeded_signals(), handle):
            yield stop
    finally:
        asked.set()


@contextlib.contextmanager
def terminated_at_once() -> Iterator[None]:
    """Until there are steps to finish: a signal raises where the process is, however long that would still take.

    What began to be loaded is given up, and whoever keeps a status can write it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        code = _CODES[signal.Signals(number)]
        for other in heeded:
            signal.signal(other, lambda *_: os._exit(code))  # a second one waits for nothing
        raise Terminated(f"ended by {signal.Signals(number).name}", code)

    heeded = heeded_signals()
    with _handling(heeded, handle):
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handle: Callable[[int, Any], None]) -> Iterator[None]:
    earlier = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
