"""How an engine in this process is paused: after its turn on the device, and not without a limit."""

from __future__ import annotations

import asyncio

from shoal.errors import EngineError

PAUSE_S = 600.0  # a turn may stand behind a training step


async def pause_between_turns(running: asyncio.Event, between: asyncio.Event, name: str, limit_s: float) -> None:
    """Draws nothing more once it returns; requests stay where they are. One that fails has paused nothing."""
    running.clear()
    try:
        async with asyncio.timeout(limit_s):
            await between.wait()
    except TimeoutError as error:
        running.set()
        raise EngineError(f"{name} was not paused: its turn on the device did not end in {limit_s:g} s") from error
