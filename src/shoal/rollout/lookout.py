"""While an answer is waited for, whoever owes it is looked at: one that is gone would let it wait for all its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Lookout:
    """`pause` is awaited before each `look`; what `look` raises is raised for everybody who waits."""

    def __init__(self, look: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._pause = pause
        self._asking: dict[asyncio.Future[Any], tuple[str, float]] = {}  # what was asked, and when
        self._task: asyncio.Task[None] | None = None

    async def unless_gone(self, asking: Coroutine[Any, Any, T], what: str = "") -> T:
        """The answer; or what `gone` was told before it came. `what` is named where an answer is soon expected."""
        task = asyncio.ensure_future(asking)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking[gone] = (what, time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking(), name="look at the server")
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                gone.result()
            return task.result()
        finally:
            self._asking.pop(gone, None)
            if gone.done():
                gone.exception()  # it was seen, whether or not it was raised
            task.cancel()  # nothing to one that is done; what it raised is seen in either case
            await asyncio.gather(task, return_exceptions=True)

    def gone(self, why: Exception) -> None:
        asking, self._asking = self._asking, {}
        for waiting in asking:
            waiting.set_exception(why)

    def overdue(self, limit_s: float) -> str | None:
        """What was asked by name longer ago than this, and is not answered yet."""
        latest = time.monotonic() - limit_s
        return next((what for what, asked in self._asking.values() if what and asked < latest), None)

    async def _keep_looking(self) -> None:
        while self._asking:
            await self._pause()
            if not self._asking:
                return
            try:
                await self._look()
            except Exception as error:  # whatever it is, it is theirs to hear
                self.gone(error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
