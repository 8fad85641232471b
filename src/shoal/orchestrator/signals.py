"""What SIGINT, SIGTERM and SIGHUP do to a run: the first asks it to stop with its state saved, the second ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

Result = TypeVar("Result")


def on_signals(interrupt: Callable[[int], None], give_up: Callable[[], None]) -> None:
    """The first signal asks the loop to stop at a safe point, the second ends the process where it is.

    `give_up` is called before that, to leave word; whatever it raises, the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # a notebook's: signals are its own
    loop = asyncio.get_running_loop()

    def handle(code: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: _end(code, give_up))
        interrupt(code)

    loop.add_signal_handler(signal.SIGINT, handle, EXIT_INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, handle, EXIT_TERMINATED)
    loop.add_signal_handler(signal.SIGHUP, handle, EXIT_TERMINATED)


def _end(code: int, give_up: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(code))  # a third signal does not wait for words
    try:
        give_up()
    finally:
        os._exit(code)


def outside_event_loop(work: Callable[[], Result]) -> Result:
    """Do work that starts an event loop. Where one is running, as in a notebook, it gets a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="run") as thread:
        return thread.submit(work).result()


@contextlib.contextmanager
def stop_signals(give_up: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """The same for steps without an event loop: the list gets the exit code. Earlier handlers come back at the end."""
    stop: list[int] = []

    def handle(number: int, _: object) -> None:
        if stop:
            _end(stop[0], give_up)
        stop.append(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
