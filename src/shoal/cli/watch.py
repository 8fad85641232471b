"""`shoal watch`: the report as a live page on loopback, for as long as the command runs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.errors import ConfigError

DEFAULT_PORT = 7447


def watch(
    run: str,
    *others: Annotated[str, Parameter(negative=())],
    port: int | None = None,
) -> None:
    """Serve a live page of a run on this machine; it updates while the run goes on. Ctrl-C ends it.

    Parameters
    ----------
    run
        The run directory; it may be mounted read-only.
    others
        More run directories, laid over the first.
    port
        Port on 127.0.0.1; 7447 or the next free one unless given, 0 for any.
    """
    from shoal.report.data import require_run

    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(
            f"command line: --port: must be between 0 and 65535, not {port}; leave it out for {DEFAULT_PORT}"
        )
    runs = [require_run(Path(name)) for name in (run, *others)]
    asyncio.run(_serve(runs, port))


async def _serve(runs: list[Path], port: int | None) -> None:
    from shoal.report.server import serve

    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, until.set)
    ports = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + 10), 0]
    for attempt in ports:
        try:
            await serve(runs, attempt, lambda address: say(f"watching {', '.join(map(str, runs))} at {address}"), until)
            return
        except ConfigError:
            if attempt == ports[-1]:
                raise
