"""Events, sinks, watchdog and logs: they tell, and they never stand in the way."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, DeadlineError, StorageError
from shoal.observability import sinks as sinks_module
from shoal.observability.console import PlainConsole
from shoal.observability.events import EventLog
from shoal.observability.journal import encode_line, read_lines
from shoal.observability.logs import setup_logging, stop_logging
from shoal.observability.redact import HIDDEN, redact, secret_values
from shoal.observability.run_dir import RunDir, read_metrics
from shoal.observability.sinks import Sinks, ThreadedSink, TrackerRun, check_sinks, open_sinks
from shoal.observability.sinks.trackers import TRACKERS, Tracker
from shoal.observability.watchdog import Watchdog, awake_within


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


def test_events_are_recorded_and_warnings_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        events = EventLog(run_dir, console)
        events.emit("start", "off we go")
        events.step = 4
        events.warn("non-finite", "gradient is not finite, step skipped", data={"in_a_row": 1})
    console.close()
    first, second = read_lines(tmp_path / "run/events.jsonl")
    assert (first["step"], first["kind"], first["level"]) == (0, "start", "notice")
    assert (second["step"], second["level"], second["data"]) == (4, "warning", {"in_a_row": 1})
    assert stream.getvalue() == "warning: gradient is not finite, step skipped\n"
    assert events.counts == {"start": 1, "non-finite": 1}


class Collecting:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def log_completions(self, step: int, rows: Sequence[Any]) -> None:
        return

    def close(self) -> None:
        self.closed = True


class Failing(Collecting):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracker is gone")


class Hanging(Collecting):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.release.wait()


def test_good_failing_and_hanging_sinks_side_by_side(tmp_path: Path) -> None:
    good, hanging, told = Collecting(), Hanging(), []

    def tell(kind: str, message: str, data: Mapping[str, Any]) -> None:
        told.append((kind, data["sink"], data["problem"]))

    trackers = [
        ThreadedSink("good", lambda: good, capacity=1000, on_problem=tell),
        ThreadedSink("failing", Failing, capacity=1000, on_problem=tell),
        ThreadedSink("hanging", lambda: hanging, capacity=5, on_problem=tell),
    ]
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        sinks = Sinks(run_dir, trackers)
        started = time.monotonic()
        for step in range(1, 101):
            sinks.log(step, {"reward/mean": step / 100})
        assert time.monotonic() - started < 2
        counts = sinks.close(timeout_s=0.5)
    hanging.release.set()
    assert len(read_metrics(tmp_path / "run")) == 100
    assert [step for step, _ in good.rows] == list(range(1, 101)) and good.closed
    assert counts["good"] == {"sent": 100, "failed": 0, "dropped": 0, "unsent": 0}
    assert counts["failing"] == {"sent": 0, "failed": 100, "dropped": 0, "unsent": 0}
    assert counts["hanging"]["dropped"] >= 94 and counts["hanging"]["sent"] == 0
    assert sorted(told) == [("sink", "failing", "failed"), ("sink", "hanging", "slow"), ("sink", "hanging", "unsent")]


def test_sink_that_cannot_be_built_or_told_about() -> None:
    def build() -> Collecting:
        raise RuntimeError("no login")

    def tell(*_: object) -> None:
        raise StorageError("disk full")

    sink = ThreadedSink("x", build, on_problem=tell)
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert sink.counts()["failed"] == 4 and sink.counts()["sent"] == 0


def test_sink_that_hangs_while_being_built_delays_nothing() -> None:
    gate = threading.Event()

    def build() -> Collecting:
        gate.wait()
        return Collecting()

    told: list[str] = []
    started = time.monotonic()
    sink = ThreadedSink("x", build, capacity=1, on_problem=lambda _, message, __: told.append(message))
    sink.log(1, {})
    sink.log(2, {})
    sink.finish()
    sink.leave(0.05)
    assert time.monotonic() - started < 1
    assert told[-1] == "x did not take anything of this run in time; the run directory has everything"
    assert sink.counts() == {"sent": 0, "failed": 0, "dropped": 1, "unsent": 1}
    gate.set()


def test_unknown_and_missing_trackers_are_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean wandb"):
        check_sinks(["wandbb"])
    absent = Tracker("a_package_that_is_not_there", "pip install 'shoal[absent]'", lambda run: Collecting())
    monkeypatch.setitem(TRACKERS, "absent", absent)
    with pytest.raises(ConfigError, match=r"needs the package .*; pip install 'shoal\[absent\]'"):
        check_sinks(["absent"])


def test_open_sinks_hands_the_run_to_each_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Collecting]] = []

    def build(run: TrackerRun) -> Collecting:
        made.append((run.title, Collecting()))
        return made[-1][1]

    monkeypatch.setitem(sinks_module.TRACKERS, "local", Tracker("json", "", build))
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        sinks = open_sinks(["local"], run_dir, TrackerRun(run_dir.path))
        sinks.log(1, {"reward/mean": 1.0})
        assert sinks.close() == {"local": {"sent": 1, "failed": 0, "dropped": 0, "unsent": 0}}
    assert made[0][0] == "run" and made[0][1].rows == [(1, {"reward/mean": 1.0})]


def test_watchdog_names_the_waiter_and_dumps_stacks_once(tmp_path: Path) -> None:
    store = Memory()
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=0.15, tick_s=0.02).start()
    watchdog.beat("rollouts of step 3")
    with watchdog.wait("orchestrator", "the engine to answer"):
        assert eventually(lambda: store.events)
        time.sleep(0.2)
    watchdog.close()
    (event,) = store.events
    assert event["kind"] == "stall" and "orchestrator has waited" in event["message"]
    assert "for the engine to answer" in event["message"]
    stacks = (tmp_path / "stacks-1.txt").read_text()
    assert "test_watchdog_names_the_waiter" in stacks and "stacks-2" not in str(list(tmp_path.iterdir()))


def test_watchdog_stays_quiet_while_beats_come_and_barks_again_after_one(tmp_path: Path) -> None:
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


def test_deadline_of_a_blocking_wait_reaches_its_owner(tmp_path: Path) -> None:
    store, late = Memory(), []
    watchdog = Watchdog(tmp_path, EventLog(store), stall_s=60, tick_s=0.02, on_deadline=late.append).start()
    with watchdog.wait("trainer", "weights", deadline_s=0.05), watchdog.wait("trainer", "nothing", deadline_s=60):
        assert eventually(lambda: late)
        time.sleep(0.1)
    watchdog.close()
    assert len(late) == 1 and isinstance(late[0], DeadlineError)
    assert [event["data"] for event in store.events] == [{"waiter": "trainer", "awaited": "weights"}]


def test_time_spent_stopped_counts_for_no_deadline() -> None:
    """The process sleeps over a deadline of its own, and finds an answer that was there all the time."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        loop.call_soon(time.sleep, 2.5)  # nothing of this process runs meanwhile
        loop.call_later(2.55, answer.set_result, 7)
        began = time.monotonic()
        assert await awake_within(answer, 2.2) == 7 and time.monotonic() - began > 2.5
        never: asyncio.Future[int] = loop.create_future()
        with pytest.raises(TimeoutError):
            await awake_within(never, 0.05)
        assert never.cancelled()

    asyncio.run(run())


def test_within_gives_up_and_names_both(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, EventLog(Memory()))

    async def run() -> None:
        assert await watchdog.within(asyncio.sleep(0, 7), "loop", "a nap", 1.0) == 7
        with pytest.raises(DeadlineError, match=r"loop waited 0\.02 s for the engine and gave up"):
            await watchdog.within(asyncio.sleep(60), "loop", "the engine", 0.02)
        task = asyncio.create_task(asyncio.sleep(60), name="sleeper")
        await asyncio.sleep(0)
        assert "task sleeper" in watchdog.dump_stacks("why").read_text()
        task.cancel()

    asyncio.run(run())
    assert watchdog.waiting_for() == ["starting"]


def test_a_stopped_process_is_not_a_stalled_one(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, EventLog(Memory()), stall_s=60)
    with watchdog.wait("a", "b", deadline_s=10):
        before = (watchdog._last_beat, next(iter(watchdog._waits.values())).deadline)
        watchdog._forgive(60)
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


CANARY = "sk-canary-0123456789"


def test_secrets_never_reach_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    with RunDir.create(tmp_path / "run", f"wandb_api_key: {CANARY}\n", {}) as run_dir:
        EventLog(run_dir).warn("x", f"failed with {CANARY}", data={"args": [CANARY], CANARY: 1})
        run_dir.write_rollouts(1, [{"completion": f"the key is {CANARY}", "token_texts": [CANARY], "token_ids": [1]}])
        run_dir.write_status("failed", step=0, reason=f"bad key {CANARY}", resumable=False, next_command=CANARY)
        handler = setup_logging(run_dir.logs, "trainer")
        logging.getLogger("shoal").error("key %s", CANARY)
        try:
            raise RuntimeError(CANARY)
        except RuntimeError:
            logging.getLogger("shoal").exception("bad")
        stop_logging(handler)
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in written if CANARY in text]
    assert sum(HIDDEN in text for text in written) == 5


def test_which_variables_are_secret() -> None:
    environment = {
        "HF_TOKEN": "hf_abcdefgh",
        "DB_PASSWORD": "longpassword",
        "TOKEN": "tokentoken",
        "KEYBOARD": "qwertyuiop",
        "SHORT_KEY": "true",
        "TOKENIZERS_PARALLELISM": "falsefalse",
    }
    assert secret_values(environment) == ["longpassword", "hf_abcdefgh", "tokentoken"]


def test_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "12345678")
    assert encode_line({"n": 12345678, "s": "12345678"}) == b'{"n":12345678,"s":"%s"}\n' % HIDDEN.encode()
    assert redact("a 12345678 b") == f"a {HIDDEN} b"


def test_logs_go_to_the_file_and_not_to_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = setup_logging(tmp_path / "logs", "orch")
    logging.getLogger("some.library").warning("careful \ud800")
    logging.getLogger("shoal.loop").info("step %d", 3)
    warnings.warn("deprecated thing", UserWarning, stacklevel=1)
    stop_logging(handler)
    logging.getLogger("shoal.loop").info("after")
    text = (tmp_path / "logs/orch.log").read_text()
    assert "some.library" in text and "step 3" in text and "deprecated thing" in text and "after" not in text
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    with pytest.raises(ValueError, match="cannot name a log file"):
        setup_logging(tmp_path, "../evil")
