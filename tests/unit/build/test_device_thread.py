"""The device thread is awaited until the deadline, and never again after a deadline passed."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.build.sampler import CLOSE_LIMIT_S, DeviceThread, Sampler
from shoal.core.errors import DeadlineError
from shoal.rollout.embedded import EmbeddedRolloutEngine
from support.engines import make_engine
from support.models import small_decoder


def hang(until: threading.Event) -> None:
    until.wait(60)


def test_hanging_device_is_awaited_once() -> None:
    """The deadline passed before the engine is closed, so its work never runs on the thread."""
    free, device = threading.Event(), ThreadPoolExecutor(1)

    async def main() -> float:
        thread = DeviceThread(0.1, executor=device)
        assert await thread(sum, [1, 2]) == 3 and not thread.timed_out
        engine = EmbeddedRolloutEngine(make_engine(small_decoder()), device)
        sampler = Sampler(nothing(), engine, nothing(), thread)
        with pytest.raises(DeadlineError, match="waited 0 s for the device to do hang"):
            await sampler.device(hang, free)
        began = time.monotonic()
        await sampler.close()
        return time.monotonic() - began

    try:
        assert asyncio.run(main()) < CLOSE_LIMIT_S / 2
    finally:
        free.set()
        device.shutdown()


def nothing() -> Any:
    """Neither model nor runner is used."""
    return None
