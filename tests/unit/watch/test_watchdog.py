"""The watchdog: stalls and deadlines are reported once, and a suspended process is not a stalled one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.core.deadlines import wait_while_awake
from shoal.core.errors import DeadlineError, StorageError
from shoal.runs.events import EventLog
from shoal.watch.watchdog import Watchdog


class Memory:
    """Keeps events in a list."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append_event(self, record: Mapping[str, Any]) -> None:
        self.events.append(dict(record))


def eventually(check: Callable[[], Any], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.005)
    return bool(check())


def test_watchdog_names_the_waiter_and_dumps_stacks_once(tmp_path: Path) -> None:
    store = Memory()
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=0.15, tick_s=0.02).start()
    watchdog.beat("rollouts of step 3")
    with watchdog.wait("orchestrator", "the engine to answer"):
        assert eventually(lambda: store.events)
        time.sleep(0.2)
    watchdog.close()
    (event,) = store.events
    assert event["kind"] == "stall" and "orchestrator" in event["message"]
    assert "the engine to answer" in event["message"]
    stacks = (tmp_path / "stacks-1.txt").read_text()
    assert "test_watchdog_names_the_waiter" in stacks and "stacks-2" not in str(list(tmp_path.iterdir()))


def test_watchdog_warns_only_without_beats_and_again_after_one(tmp_path: Path) -> None:
    store = Memory()
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=0.3, tick_s=0.02).start()
    for _ in range(10):
        watchdog.beat("step")
        time.sleep(0.05)
    assert store.events == []
    assert eventually(lambda: len(store.events) == 1)
    watchdog.beat("step")
    assert eventually(lambda: len(store.events) == 2)
    watchdog.close()
    assert (tmp_path / "stacks-2.txt").exists()


def test_blocking_wait_raises_its_deadline_in_the_caller(tmp_path: Path) -> None:
    store, late = Memory(), []
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=60, tick_s=0.02, on_deadline=late.append).start()
    with watchdog.wait("trainer", "weights", deadline_s=0.05), watchdog.wait("trainer", "nothing", deadline_s=60):
        assert eventually(lambda: late)
        time.sleep(0.1)
    watchdog.close()
    assert len(late) == 1 and isinstance(late[0], DeadlineError)
    assert [event["data"] for event in store.events] == [{"waiter": "trainer", "awaited": "weights"}]


def test_time_while_suspended_does_not_count_towards_a_deadline() -> None:
    """The process is blocked past its deadline; the answer was ready in time."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        loop.call_soon(time.sleep, 2.5)  # blocks the whole event loop
        loop.call_later(2.55, answer.set_result, 7)
        began = time.monotonic()
        assert await wait_while_awake(answer, 2.2) == 7 and time.monotonic() - began > 2.5
        never: asyncio.Future[int] = loop.create_future()
        with pytest.raises(TimeoutError):
            await wait_while_awake(never, 0.05)
        assert never.cancelled()

    asyncio.run(run())


def test_within_raises_and_names_the_waiter_and_the_awaited(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, EventLog(Memory()))

    async def run() -> None:
        assert await watchdog.within(asyncio.sleep(0, 7), "loop", "a nap", 1.0) == 7
        with pytest.raises(DeadlineError, match=r"loop waited 0\.02 s for the engine"):
            await watchdog.within(asyncio.sleep(60), "loop", "the engine", 0.02)
        task = asyncio.create_task(asyncio.sleep(60), name="sleeper")
        await asyncio.sleep(0)
        assert "task sleeper" in watchdog.dump_stacks("why").read_text()
        task.cancel()

    asyncio.run(run())
    assert watchdog.waiting_for() == ["starting"]


def test_suspended_process_is_not_a_stalled_one(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, EventLog(Memory()), stall_s=60)
    with watchdog.wait("a", "b", deadline_s=10):
        before = (watchdog._last_beat, next(iter(watchdog._waits.values())).deadline)
        watchdog._extend_deadlines(60)
        after = (watchdog._last_beat, next(iter(watchdog._waits.values())).deadline)
    assert before[1] is not None and after == (before[0] + 60, before[1] + 60)


def test_watchdog_survives_a_store_that_fails(tmp_path: Path) -> None:
    class Broken:
        calls = 0

        def append_event(self, record: Mapping[str, Any]) -> None:
            self.calls += 1
            raise StorageError("disk full")

    store = Broken()
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=0.05, tick_s=0.02).start()
    assert eventually(lambda: store.calls == 1)
    watchdog.beat()
    assert eventually(lambda: store.calls == 2)
    watchdog.close()
