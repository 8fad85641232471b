"""A pause waits for its turn on the device, with a limit. A failed pause pauses nothing."""

from __future__ import annotations

import asyncio

import pytest

from shoal.core.errors import EngineError
from shoal.rollout.embedded import pause_between_turns


def test_turn_that_ends_and_one_that_does_not() -> None:
    async def check() -> None:
        running, between = asyncio.Event(), asyncio.Event()
        running.set()
        asyncio.get_running_loop().call_later(0.01, between.set)
        await pause_between_turns(running, between, "it", 10.0)
        assert not running.is_set() and between.is_set()
        running.set()
        between.clear()
        with pytest.raises(EngineError, match="it was not paused: its turn on the device did not end"):
            await pause_between_turns(running, between, "it", 0.02)
        assert running.is_set()

    asyncio.run(check())
