"""A server with open requests is polled, and a failure is raised in every wait for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from shoal.core.errors import DeadlineError
from shoal.rollout.remote.client import ConnectionLost, HealthPoller


async def at_once() -> None:
    await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(limited())


async def never() -> int:
    await asyncio.sleep(60)
    return 1


def test_answers_and_errors_are_forwarded() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ValueError("no")

    async def main() -> None:
        poller = HealthPoller(at_once, at_once)
        assert await poller.wait_for(answer()) == 7
        with pytest.raises(ValueError, match="no"):
            await poller.wait_for(fail())
        await poller.close()

    run(main)


@pytest.mark.parametrize("error", [ConnectionLost("nothing listens there"), DeadlineError("waited 2 s")])
def test_poll_error_is_raised_in_all_waits(error: Exception) -> None:
    broken_off: list[int] = []

    async def look() -> None:
        raise error

    async def asked(number: int) -> int:
        try:
            return await never()
        finally:
            broken_off.append(number)

    async def main() -> None:
        poller = HealthPoller(look, at_once)
        results = await asyncio.gather(*(poller.wait_for(asked(i)) for i in range(3)), return_exceptions=True)
        assert results == [error] * 3 and sorted(broken_off) == [0, 1, 2]
        await poller.close()

    run(main)


def test_polling_continues_after_a_failure_and_stops_when_idle() -> None:
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        if looks % 3 == 0:
            raise ConnectionLost("gone")

    async def main() -> None:
        poller = HealthPoller(look, at_once)
        for expected in (3, 6):
            with pytest.raises(ConnectionLost, match="gone"):
                await poller.wait_for(never())
            assert looks == expected
        await asyncio.sleep(0.05)
        assert looks == 6, "no open request, so no polling"
        await poller.close()

    run(main)


def test_overdue_request_is_named_except_generation() -> None:
    async def main() -> None:
        poller = HealthPoller(at_once, lambda: asyncio.sleep(60))
        drawing = asyncio.create_task(poller.wait_for(never()))
        pausing = asyncio.create_task(poller.wait_for(never(), "/pause"))
        await asyncio.sleep(0.05)
        assert poller.overdue(60) is None and poller.overdue(0.01) == "/pause"
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        assert poller.overdue(0.01) is None
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        await poller.close()

    run(main)


def test_cancelled_wait_cancels_the_request() -> None:
    async def main() -> None:
        poller = HealthPoller(at_once, lambda: asyncio.sleep(60))
        asked = asyncio.Event()

        async def question() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                asked.set()

        waiting = asyncio.create_task(poller.wait_for(question()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert asked.is_set()
        await poller.close()

    run(main)


def test_errors_during_cancellation_are_not_unhandled() -> None:
    """Many requests wait. The first failure ends the other waits while theirs fail too."""
    told: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        poller = HealthPoller(at_once, lambda: asyncio.sleep(60))

        async def fail() -> None:
            await asyncio.sleep(0.01)
            waiting.cancel()
            raise ConnectionLost("gone")

        waiting = asyncio.create_task(poller.wait_for(fail()))
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await poller.close()
        gc.collect()

    run(main)
    assert told == []
