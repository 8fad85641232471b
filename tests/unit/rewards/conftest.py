"""A pool with misbehaving rewards, closed after the test."""

import asyncio

import pytest

from shoal.rewards.pool import RewardPool

from .misbehaving import TIMEOUT_S, Async, Misbehaving


@pytest.fixture
def pool(tmp_path):
    pool = RewardPool(
        {"bad": Misbehaving(tmp_path), "async": Async()},  # pyright: ignore[reportArgumentType]
        workers=1,
        timeout_s=TIMEOUT_S,
        memory_bytes=2**30,
    )
    pool.start()
    yield pool
    asyncio.run(pool.close())
