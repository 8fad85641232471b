"""Timeouts that do not count the time during which this process is suspended, and waits that a signal ends.

Used wherever a task waits for others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

from shoal.core.errors import DeadlineError

Result = TypeVar("Result")
AWAKE_TICK_S = 1.0


async def wait_without_suspension(
    futures: Collection[asyncio.Future[Any]], limit_s: float, return_when: str = asyncio.ALL_COMPLETED
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """Like asyncio.wait, but the limit does not count the time during which this process is suspended.

    After a suspension (Ctrl-Z, a debugger) results may have arrived that nobody could read. They are not late.
    """
    first, left_s = return_when == asyncio.FIRST_COMPLETED, limit_s
    while True:
        tick_s, began = min(AWAKE_TICK_S, max(left_s, 0.0)), time.monotonic()
        done, pending = await asyncio.wait(futures, timeout=tick_s, return_when=return_when)
        left_s -= min(time.monotonic() - began, 2 * tick_s)
        if (done and first) or not pending or left_s <= 0.001:
            return done, pending


async def wait_while_awake(awaitable: Awaitable[Result], limit_s: float) -> Result:
    """Like asyncio.wait_for, with the limit of `wait_without_suspension`."""
    task = asyncio.ensure_future(awaitable)
    try:
        await wait_without_suspension({task}, limit_s)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    raise TimeoutError


async def within(limit_s: float, work: Awaitable[Result], what: str, key: str) -> Result:
    """Like `wait_while_awake`, for a limit that is a configuration key: raises DeadlineError with the key's name."""
    try:
        return await wait_while_awake(work, limit_s)
    except TimeoutError:
        raise DeadlineError(f"{what} took longer than {limit_s:g} s; raise {key} if that is expected") from None


async def unless_stopped(work: Awaitable[Result], stop: asyncio.Event) -> Result | None:
    """The result of the work; None if `stop` was set first, which cancels it."""
    running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
