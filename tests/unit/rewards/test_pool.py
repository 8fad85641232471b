"""The reward pool with rewards that misbehave: real processes, really killed."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.envs import SingleTurn, answer_of, ask
from shoal.errors import RewardServerError
from shoal.rewards.compose import NamedRewards
from shoal.rewards.pool import RewardPool
from shoal.rewards.server import end_of
from shoal.rewards.wire import RESULT, pack

TIMEOUT_S = 0.5


class Misbehaving(SingleTurn):
    """Does what the answer says. `self.folder` is where it leaves process ids."""

    weights = {"heavy": 10.0}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = lambda: 0.75  # a closure cannot be pickled, and need not be

    def tasks(self, split):
        return [ask("what?", answer=1)] * 3

    def reward(self, task, messages):
        return getattr(self, answer_of(messages))()

    def note(self) -> None:
        (self.folder / f"pid-{os.getpid()}").touch()

    def closure(self):
        return self.secret()

    def true(self):
        return True

    def none(self):
        return None

    def parts(self):
        return {"plain": 0.5, "heavy": 0.25}

    def slow(self):
        time.sleep(0.3)
        return 1

    def hang(self):
        self.note()
        while True:
            time.sleep(1)

    def spin(self):
        while True:
            pass

    def fork_and_return(self):
        if os.fork() == 0:
            self.note()
            time.sleep(600)
        while not list(self.folder.iterdir()):
            time.sleep(0.01)
        return 1

    def escape(self):
        """A grandchild in a session of its own, whose parent ends."""
        self.note()
        touch = f"pathlib.Path({str(self.folder)!r}, f'pid-{{os.getpid()}}').touch()"
        script = f"import os, pathlib, time; {touch}; time.sleep(600)"
        subprocess.Popen(["sh", "-c", f'setsid {sys.executable} -c "$0" & exit 0', script])
        while len(list(self.folder.iterdir())) < 2:
            time.sleep(0.01)
        return self.hang()

    def fork_many_and_hang(self):
        for _ in range(20):
            if os.fork() == 0:
                self.note()
                time.sleep(600)
        return self.hang()

    def leave_thread(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return 1

    def allocate(self):
        return len(bytearray(8 * 2**30))

    def segfault(self):
        ctypes.string_at(0)

    def exit_hard(self):
        os._exit(0)

    def exit_soft(self):
        sys.exit(3)

    def interrupt(self):
        raise KeyboardInterrupt

    def flood(self):
        for _ in range(40):
            print("x" * 2**20)
            print("y" * 2**20, file=sys.stderr)
            os.write(1, b"z" * 2**20)
        return 1

    def forge(self):
        """Writes a score of its own making into the pipe, before the worker does."""
        forged = json.dumps({"status": "ok", "reward": float("nan"), "parts": {}}).encode()
        for descriptor in (int(entry.name) for entry in list(Path("/dev/fd").iterdir())):
            with contextlib.suppress(OSError):
                os.write(descriptor, pack(1, RESULT, forged))
        return 1

    def text(self):
        return "1.0"

    def nan(self):
        return float("nan")

    def infinite(self):
        return float("-inf")

    def huge(self):
        return 1e30

    def a_list(self):
        return [1.0, 0.0]

    def bad_part(self):
        return {"plain": "good"}

    def coroutine(self):
        async def later():
            return 1.0

        return later()

    def unprintable(self):
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError

        raise Odd

    def long_error(self):
        raise ValueError("x" * 10**7)

    def secrets(self):
        return {name: 1 for name in os.environ if name.startswith("SHOAL_TEST")}

    def corrupt(self):
        """Writes rubbish into every descriptor it can find."""
        for descriptor in range(3, 4096):  # however many files were open when the server was forked
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 64)
        time.sleep(600)


class Async(SingleTurn):
    def tasks(self, split):
        return [ask("what?")]

    async def reward(self, task, messages):
        await asyncio.sleep(0.01)
        return 0.5


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


def ask_pool(pool, *answers, env="bad"):
    async def run():
        say = [[{"role": "assistant", "content": answer}] for answer in answers]
        return await asyncio.gather(*(pool.score(env, "train", 0, messages) for messages in say))

    return asyncio.run(run())


def noted_pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.iterdir() if path.name.startswith("pid-")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids, within_s=5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    "answer, reward, parts",
    [("closure", 0.75, {}), ("true", 1.0, {}), ("none", None, {}), ("parts", 3.0, {"plain": 0.5, "heavy": 0.25})],
)
def test_good_rewards(pool, answer, reward, parts):
    (score,) = ask_pool(pool, answer)
    assert (score.status, score.reward, score.parts, score.error) == ("ok", reward, parts, None)


def test_async_rewards_are_awaited(pool):
    assert ask_pool(pool, "x", env="async")[0].reward == 0.5


@pytest.mark.parametrize(
    "answer, words",
    [
        ("segfault", "SIGSEGV"),
        ("exit_hard", "exit code 0"),
        ("exit_soft", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("allocate", "MemoryError"),
        ("text", "'1.0' of type str, not a number"),
        ("nan", "nan, not a finite number"),
        ("infinite", "-inf, not a finite number"),
        ("huge", "within ±1e+06"),
        ("a_list", "of type list, not a number"),
        ("bad_part", "part 'plain' is 'good'"),
        ("coroutine", "declare the reward 'async def'"),
        ("unprintable", "Odd"),
        ("long_error", "ValueError: xxx"),
        ("no_such_method", "AttributeError"),
        ("corrupt", "larger than"),
    ],
)
def test_a_failing_reward_is_an_error_for_its_job_alone(pool, answer, words):
    failed, good = ask_pool(pool, answer, "true")
    assert failed.status == "error" and failed.reward is None
    assert words in failed.error and len(failed.error) < 3000
    assert (good.status, good.reward) == ("ok", 1.0)


@pytest.mark.parametrize("answer", ["hang", "spin"])
def test_a_hanging_reward_is_a_timeout_and_its_worker_is_replaced(pool, tmp_path, answer):
    late, good = ask_pool(pool, answer, "true")
    assert (late.status, late.reward) == ("timeout", None)
    assert "longer than 0.5 s" in late.error and 0.4 < late.seconds < 2
    assert good.status == "ok"
    assert all_gone(noted_pids(tmp_path))


def test_the_timeout_counts_from_the_start_of_the_work(pool):
    began = time.monotonic()
    scores = ask_pool(pool, *["slow"] * 5)
    assert time.monotonic() - began > 2 * TIMEOUT_S, "the last one must have waited longer than the timeout"
    assert [score.status for score in scores] == ["ok"] * 5


def test_a_reply_that_came_while_the_loop_was_busy_is_not_late(pool):
    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "true"}]))
        await asyncio.sleep(0)
        time.sleep(2 * TIMEOUT_S)  # the trainer holds the event loop
        return await job

    assert asyncio.run(run()).status == "ok"


@pytest.mark.parametrize("answer", ["escape", "fork_many_and_hang"])
def test_everything_a_killed_reward_started_is_killed_too(pool, tmp_path, answer):
    (score,) = ask_pool(pool, answer)
    assert score.status == "timeout"
    pids = noted_pids(tmp_path)
    assert len(pids) >= 2
    assert all_gone(pids)


def test_what_a_finished_reward_left_running_is_killed(pool, tmp_path):
    (score,) = ask_pool(pool, "fork_and_return")
    assert score.reward == 1.0
    assert len(noted_pids(tmp_path)) == 1
    assert all_gone(noted_pids(tmp_path))
    assert [score.reward for score in ask_pool(pool, "leave_thread", "true")] == [1.0, 1.0]


def test_a_flood_of_output_goes_nowhere(pool, capfd):
    began = time.monotonic()
    (score,) = ask_pool(pool, "flood")
    assert score.status == "ok", score.error
    assert time.monotonic() - began < 5
    assert capfd.readouterr() == ("", "")


def test_unknown_jobs_are_errors(pool):
    async def run():
        return [
            await pool.score("nobody", "train", 0, []),
            await pool.score("bad", "test", 0, []),
            await pool.score("bad", "train", 99, []),
        ]

    assert [score.status for score in asyncio.run(run())] == ["error"] * 3


def test_large_and_odd_conversations_cross_the_pipe(pool):
    async def run():
        messages = [{"role": "user", "content": "\ud800\0é" * 10**6}, {"role": "assistant", "content": "true"}]
        return await asyncio.gather(*(pool.score("bad", "eval", 1, messages) for _ in range(3)))

    assert [score.reward for score in asyncio.run(run())] == [1.0] * 3


def test_many_jobs_on_several_workers(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=3)
    pool.start()
    scores = ask_pool(pool, *["true", "none", "text"] * 200)
    assert [score.status for score in scores] == ["ok", "ok", "error"] * 200
    asyncio.run(pool.close())


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_secrets_are_gone_from_where_the_kernel_shows_them():
    """/proc/self/environ is what a process was started with, so it takes one that was started with a secret."""
    script = (
        "from pathlib import Path; from shoal.rewards import confine; confine.drop_secrets(['KEPT_TOKEN']); "
        "print(Path('/proc/self/environ').read_text())"
    )
    given = {**os.environ, "MY_API_TOKEN": "canary-4711", "KEPT_TOKEN": "wanted", "PLAIN": "seen"}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout and "KEPT_TOKEN=wanted" in done.stdout and "PLAIN=seen" in done.stdout


def test_secrets_do_not_reach_rewards(tmp_path, monkeypatch):
    for name in (
        "SHOAL_TEST_API_KEY",
        "SHOAL_TEST_TOKEN",
        "SHOAL_TEST_SECRET",
        "SHOAL_TEST_PASSWORD",
        "SHOAL_TEST_PLAIN",
    ):
        monkeypatch.setenv(name, "1")
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, keep_env=["SHOAL_TEST_TOKEN"])
    pool.start()
    (score,) = ask_pool(pool, "secrets")
    assert sorted(score.parts) == ["SHOAL_TEST_PLAIN", "SHOAL_TEST_TOKEN"]
    assert "SHOAL_TEST_API_KEY" in os.environ, "the main process keeps its own"
    asyncio.run(pool.close())


def test_close_ends_every_process_and_later_jobs_are_errors(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, timeout_s=60)
    pool.start()

    async def run():
        job = asyncio.create_task(
            pool.score("bad", "train", 0, [{"role": "assistant", "content": "fork_many_and_hang"}])
        )
        while len(noted_pids(tmp_path)) < 21:
            await asyncio.sleep(0.02)
        await pool.close()
        return await job, await pool.score("bad", "train", 0, [])

    running, later = asyncio.run(run())
    assert running.error == later.error == "the reward pool is closed"
    assert all_gone(noted_pids(tmp_path), within_s=1)


def test_a_forged_score_is_looked_at_too(tmp_path):
    """Reward code can reach the pipe; what is no reward does not become one on that way."""
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=1)
    pool.start()

    async def run():
        score = await pool.score("bad", "train", 0, [{"role": "assistant", "content": "forge"}])
        await pool.close()
        return score

    score = asyncio.run(run())
    assert (score.status, score.reward, score.error) == (
        "error", None, "the reward worker sent something that is not a score",
    )  # fmt: skip


def test_a_killed_server_ends_the_wait_of_everybody(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, timeout_s=60)
    pool.start()

    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "hang"}]))
        while not noted_pids(tmp_path):
            await asyncio.sleep(0.02)
        os.kill(pool._pid, signal.SIGKILL)
        for waiting in (job, pool.score("bad", "train", 0, [])):
            with pytest.raises(RewardServerError, match=r"server ended \(killed by SIGKILL\), and with it all"):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(run())
    assert all_gone(noted_pids(tmp_path))
    asyncio.run(pool.close())


def test_an_end_that_writing_notices_first_is_told_alike(pool):
    async def run():
        await pool.score("bad", "train", 0, [{"role": "assistant", "content": "4"}])
        os.kill(pool._pid, signal.SIGKILL)
        while end_of(pool._pid) is None:
            time.sleep(0.005)  # the loop stands: nothing is read
        with pytest.raises(RewardServerError, match=r"server ended \(killed by SIGKILL\), and with it all"):
            await pool.score("bad", "train", 0, [])

    asyncio.run(run())


def test_a_stopped_server_does_not_blame_the_reward(pool):
    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "slow"}]))
        await asyncio.sleep(0.15)
        os.kill(pool._pid, signal.SIGSTOP)
        await asyncio.sleep(3 * TIMEOUT_S)
        os.kill(pool._pid, signal.SIGCONT)
        return await job

    assert asyncio.run(run()).status == "ok"


VICTIM = """
import asyncio, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from test_pool import Misbehaving
from shoal.rewards.pool import RewardPool

folder = pathlib.Path(sys.argv[2])
pool = RewardPool({"bad": Misbehaving(folder)}, timeout_s=600)
pool.start()
(folder / f"pid-{pool._pid}").touch()

async def main():
    answers = ("fork_many_and_hang", "escape")
    await asyncio.gather(*(pool.score("bad", "train", 0, [{"role": "assistant", "content": a}]) for a in answers))

asyncio.run(main())
"""


def test_no_process_outlives_a_killed_parent(tmp_path):
    """Also with HOME unset and a strict umask, as a service manager may run it."""
    env = {key: value for key, value in os.environ.items() if key != "HOME"}
    command = [sys.executable, "-c", VICTIM, str(Path(__file__).parent), str(tmp_path)]
    victim = subprocess.Popen(command, env=env, umask=0o077)
    deadline = time.monotonic() + 60
    while len(noted_pids(tmp_path)) < 24 and time.monotonic() < deadline:  # 1 server, 2 workers, 20 forks, 1 escapee
        time.sleep(0.05)
    pids = noted_pids(tmp_path)
    assert len(pids) == 24 and all(alive(pid) for pid in pids)
    victim.kill()
    victim.wait()
    assert all_gone(pids, within_s=5)


def test_given_weights_come_before_the_environments_own(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, weights={"bad": {"plain": 2.0}})
    pool.start()
    assert ask_pool(pool, "parts")[0].reward == 2.0 * 0.5 + 10.0 * 0.25
    asyncio.run(pool.close())


def test_named_rewards_are_weighted_and_none_excludes():
    class Both(SingleTurn):
        rewards = NamedRewards(correct=lambda task, messages: 1, short=(lambda task, messages: 0.5, 0.2))
        weights = rewards.weights

        def tasks(self, split):
            return [ask("what?")]

        def reward(self, task, messages):
            return self.rewards(task, messages) if answer_of(messages) else None

    pool = RewardPool({"both": Both()})
    pool.start()
    full, none = ask_pool(pool, "x", "", env="both")
    assert full.reward == pytest.approx(1.1) and full.parts == {"correct": 1, "short": 0.5}
    assert (none.status, none.reward) == ("ok", None)
    asyncio.run(pool.close())
