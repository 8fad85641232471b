"""What SIGINT, SIGTERM and SIGHUP do to a run: the first asks it to stop with its state saved, the second ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from shoal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED


def on_signals(interrupt: Callable[[int], None]) -> None:
    """The first signal asks the loop to stop at a safe point, the second ends the process where it is."""
    loop = asyncio.get_running_loop()

    def handle(code: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(code))
        interrupt(code)

    loop.add_signal_handler(signal.SIGINT, handle, EXIT_INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, handle, EXIT_TERMINATED)
    loop.add_signal_handler(signal.SIGHUP, handle, EXIT_TERMINATED)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The same for steps without an event loop: the list gets the exit code. Earlier handlers come back at the end."""
    stop: list[int] = []

    def handle(number: int, _: object) -> None:
        if stop:
            os._exit(stop[0])
        stop.append(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED)

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
