"""Rewards that hang, and processes that they leave: the worker is replaced, and all its child processes are killed."""

import asyncio
import os
import signal
import time

import pytest

from .misbehaving import TIMEOUT_S, all_gone, ask_pool, noted_pids


@pytest.mark.parametrize("answer", ["hang", "spin"])
def test_hanging_reward_is_a_timeout_and_its_worker_is_replaced(pool, tmp_path, answer):
    late, good = ask_pool(pool, answer, "true")
    assert (late.status, late.reward) == ("timeout", None)
    assert "longer than 0.5 s" in late.error and 0.4 < late.seconds < 2
    assert good.status == "ok"
    assert all_gone(noted_pids(tmp_path))


def test_repeating_the_start_does_not_extend_the_timeout(pool):
    began = time.monotonic()
    (late,) = ask_pool(pool, "extend")
    assert late.status == "timeout" and time.monotonic() - began < 10 * TIMEOUT_S
    assert ask_pool(pool, "true")[0].status == "ok"


def test_worker_with_invalid_replies_is_replaced(pool):
    """A reward that breaks its process must not affect later rewards."""
    spoilt, *others = ask_pool(pool, "patch", *["true"] * 4)
    assert (spoilt.status, spoilt.reward) == ("error", None)
    assert [(score.status, score.reward) for score in others] == [("ok", 1.0)] * 4


def test_timeout_counts_from_the_start_of_the_work(pool):
    began = time.monotonic()
    scores = ask_pool(pool, *["slow"] * 5)
    assert time.monotonic() - began > 2 * TIMEOUT_S, "the last one must have waited longer than the timeout"
    assert [score.status for score in scores] == ["ok"] * 5


def test_reply_during_a_busy_loop_is_in_time(pool):
    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "true"}]))
        await asyncio.sleep(0)
        time.sleep(2 * TIMEOUT_S)  # the trainer blocks the event loop
        return await job

    assert asyncio.run(run()).status == "ok"


@pytest.mark.parametrize("answer", ["escape", "fork_many_and_hang"])
def test_processes_of_a_killed_reward_are_killed(pool, tmp_path, answer):
    (score,) = ask_pool(pool, answer)
    assert score.status == "timeout"
    pids = noted_pids(tmp_path)
    assert len(pids) >= 2
    assert all_gone(pids)


def test_processes_left_by_a_finished_reward_are_killed(pool, tmp_path):
    (score,) = ask_pool(pool, "fork_and_return")
    assert score.reward == 1.0
    assert len(noted_pids(tmp_path)) == 1
    assert all_gone(noted_pids(tmp_path))
    assert [score.reward for score in ask_pool(pool, "leave_thread", "true")] == [1.0, 1.0]


def test_stopped_server_does_not_blame_the_reward(pool):
    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "slow"}]))
        await asyncio.sleep(0.15)
        os.kill(pool._pid, signal.SIGSTOP)
        await asyncio.sleep(3 * TIMEOUT_S)
        os.kill(pool._pid, signal.SIGCONT)
        return await job

    assert asyncio.run(run()).status == "ok"
