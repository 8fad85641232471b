"""Results of the reward pool: the number and parts of a reward, or an error of this job only; and hidden secrets."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards.compose import NamedRewards
from shoal.rewards.pool import RewardPool

from .misbehaving import Misbehaving, ask_pool


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
def test_failing_reward_affects_only_its_job(pool, answer, words):
    failed, good = ask_pool(pool, answer, "true")
    assert failed.status == "error" and failed.reward is None
    assert words in failed.error and len(failed.error) < 3000
    assert (good.status, good.reward) == ("ok", 1.0)


def test_excess_output_is_discarded(pool, capfd):
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


def test_large_and_unusual_conversations_cross_the_pipe(pool):
    async def run():
        messages = [{"role": "user", "content": "\ud800\0é" * 10**6}, {"role": "assistant", "content": "true"}]
        return await asyncio.gather(*(pool.score("bad", "eval", 1, messages) for _ in range(3)))

    assert [score.reward for score in asyncio.run(run())] == [1.0] * 3


def test_many_jobs_on_several_workers(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=3)
    pool.start()
    scores = ask_pool(pool, *["true", "none", "text"] * 40)
    assert [score.status for score in scores] == ["ok", "ok", "error"] * 40
    asyncio.run(pool.close())


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_secrets_are_removed_from_proc_environ():
    """/proc/self/environ has the initial environment of a process, so the test starts a process with a secret."""
    script = (
        "from pathlib import Path; from shoal.rewards import sandbox; sandbox.drop_secrets(['KEPT_TOKEN']); "
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
    assert "SHOAL_TEST_API_KEY" in os.environ, "the main process keeps its environment"
    asyncio.run(pool.close())


def test_forged_score_is_validated(tmp_path):
    """Reward code can write to the pipe. Invalid rewards are rejected there too."""
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=1)
    pool.start()

    async def run():
        score = await pool.score("bad", "train", 0, [{"role": "assistant", "content": "forge"}])
        await pool.close()
        return score

    score = asyncio.run(run())
    assert (score.status, score.reward, score.error) == (
        "error", None, "the reward worker sent an invalid reply",
    )  # fmt: skip


def test_configured_weights_override_the_environment(tmp_path):
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
