"""Handling of SIGINT, SIGTERM and SIGHUP: the first stops the run with its state saved, the second ends it at once.

A SIGHUP that was ignored when the process started stays ignored, as `nohup` requires. An ignored SIGINT is handled:
shells ignore it for background processes of a script, and the script may still send it.
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

from shoal.core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated

Result = TypeVar("Result")
STOPPING = "stopping at the next safe point, with the state saved; a second signal ends it at once"
_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}


def handled_signals() -> list[signal.Signals]:
    """The signals that end a run in this process."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _CODES if number != signal.SIGHUP or not ignored]


def on_signals(
    interrupt: Callable[[int], None], give_up: Callable[[], str | None], tell: Callable[[str], None] = lambda _: None
) -> None:
    """The first signal calls `interrupt`, which stops the loop at a safe point. The second ends the process at once.

    `give_up` is called before that and returns a last line to print. If it raises, the process ends all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # such as in a notebook, which handles signals itself
    loop, handled = asyncio.get_running_loop(), handled_signals()

    def handle(code: int) -> None:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: _end(code, give_up))
        interrupt(code)
        tell(STOPPING)

    for number in handled:
        loop.add_signal_handler(number, handle, _CODES[number])


def _end(code: int, give_up: Callable[[], str | None]) -> None:
    for number in handled_signals():
        signal.signal(number, lambda *_: os._exit(code))  # a third signal does not wait for give_up
    try:
        _write(give_up())
    finally:
        os._exit(code)


def _write(line: str | None) -> None:
    """Write past Python's streams, which may be in the middle of a line. Show the cursor that a live panel hides."""
    cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{cursor}\nshoal: {line}\n".encode() if line else cursor.encode())


def end_by(number: signal.Signals) -> NoReturn:
    """End by the signal itself after cleaning up, so that the parent process sees which signal it was."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError(f"{number.name} did not end the process")


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Do work that starts an event loop. If one is running, as in a notebook, the work runs in another thread."""
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
    """For steps without an event loop: the first signal puts its exit code into the list. Restores the handlers."""
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

    # Another thread prints, because the signal may arrive while the main thread is in the middle of a line.
    threading.Thread(target=speak, name="signals", daemon=True).start()
    try:
        with _handling(handled_signals(), handle):
            yield stop
    finally:
        asked.set()


@contextlib.contextmanager
def exit_on_first_signal() -> Iterator[None]:
    """Before the first step: a signal raises Terminated in the main thread, so loading is abandoned at once.

    The exception passes through the code that writes the status.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        code = _CODES[signal.Signals(number)]
        for other in handled:
            signal.signal(other, lambda *_: os._exit(code))  # the second signal
        raise Terminated(f"ended by {signal.Signals(number).name}", code)

    handled = handled_signals()
    with _handling(handled, handle):
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handle: Callable[[int, Any], None]) -> Iterator[None]:
    earlier = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
