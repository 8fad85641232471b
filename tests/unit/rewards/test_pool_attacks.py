"""Rewards that attack the processes that run them: detected in bounded time, and other jobs keep their rewards."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.errors import RewardServerError
from shoal.rewards import pool as pool_module
from shoal.rewards.pool import RewardPool

from .misbehaving import TIMEOUT_S, Misbehaving, all_gone, ask_pool, noted_pids

PING_LIMIT_S = 1.0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(pool_module, "PING_LIMIT_S", PING_LIMIT_S)


@pytest.mark.parametrize("answer", ["stop_server", "kill_server", "stop_all"])
def test_server_that_a_reward_stopped_is_replaced(pool, quick, answer):
    """The time does not depend on the batch size: with 200 queued jobs the wait was over an hour."""
    ask_pool(pool, "true")
    began = time.monotonic()
    attack, *others = ask_pool(pool, answer, *["true"] * 200)
    assert time.monotonic() - began < PING_LIMIT_S + 5
    assert (attack.status, attack.reward) == ("error", None) or answer == "stop_server"
    assert [score.reward for score in others].count(1.0) >= 199
    assert ask_pool(pool, "true")[0].reward == 1.0


def test_new_server_stopped_at_once_is_detected(pool, quick):
    ask_pool(pool, "true")
    began = time.monotonic()
    ask_pool(pool, "stop_server", "stop_server", *["true"] * 20)
    assert time.monotonic() - began < 2 * PING_LIMIT_S + 8


def test_server_restarts_are_bounded(pool, quick):
    with pytest.raises(RewardServerError):
        ask_pool(pool, *["kill_server"] * (pool_module.MAX_RESTARTS + 2))


def test_server_stopped_per_batch_loses_one_job_per_batch(pool, quick):
    for _ in range(pool_module.MAX_RESTARTS + 1):
        assert [score.status for score in ask_pool(pool, "kill_server", "true")] == ["error", "ok"]


VICTIM = """
import asyncio, pathlib, sys
sys.path.insert(0, sys.argv[1])
from tests.unit.rewards.misbehaving import Misbehaving
from shoal.rewards.pool import RewardPool

folder, answers = pathlib.Path(sys.argv[2]), sys.argv[3:]
pool = RewardPool({"bad": Misbehaving(folder)}, timeout_s=600)
pool.start()

async def main():
    await asyncio.gather(*(pool.score("bad", "train", 0, [{"role": "assistant", "content": a}]) for a in answers))

asyncio.run(main())
"""


def killed_run(folder: Path, *answers: str, until: int) -> list[int]:
    """Run rewards in a process, kill it once `until` processes are recorded, and return these."""
    root = Path(__file__).parents[3]
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(root), str(folder), *answers])
    deadline = time.monotonic() + 60
    while len(noted_pids(folder)) < until and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    victim.kill()
    victim.wait()
    pids = noted_pids(folder)
    assert len(pids) >= until
    return pids


def test_stopped_servers_do_not_outlive_a_killed_run(tmp_path):
    pids = killed_run(tmp_path, "escape", "stop_all", until=5)  # worker, escaped process; worker, server, keeper
    assert all_gone(pids, within_s=5)


def test_setsid_chain_ends_with_a_killed_run(tmp_path):
    killed_run(tmp_path, "hop", until=1)
    (tmp_path / "hop").unlink(missing_ok=True)
    time.sleep(1.0)
    (tmp_path / "hop").unlink(missing_ok=True)
    time.sleep(0.5)
    assert not (tmp_path / "hop").exists(), "the chain still runs"


def test_setsid_chain_ends_with_its_job(pool, tmp_path):
    assert ask_pool(pool, "hop")[0].status == "timeout"
    assert ask_pool(pool, "true")[0].reward == 1.0
    asyncio.run(pool.close())
    (tmp_path / "hop").unlink(missing_ok=True)
    time.sleep(0.5)
    assert not (tmp_path / "hop").exists(), "the chain still runs"


@pytest.mark.parametrize("answer", ["patch_library", "patch_self", "patch_to_fail"])
def test_changes_by_a_reward_do_not_affect_the_next(pool, answer):
    _, *others = ask_pool(pool, answer, "close", "true", "parts", "closure")
    assert [score.reward for score in others] == [0.0, 1.0, 3.0, 0.75]


@pytest.mark.parametrize("answer", ["foreign_frame", "close_all"])
def test_worker_that_breaks_the_protocol_is_replaced_before_its_deadline(tmp_path, answer):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=1, timeout_s=60)
    pool.start()
    began = time.monotonic()
    broken, good = ask_pool(pool, answer, "true")
    assert broken.status != "ok" and good.reward == 1.0 and time.monotonic() - began < 5
    asyncio.run(pool.close())


def test_unresponsive_worker_does_not_block_others(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=2, timeout_s=60)
    pool.start()
    ask_pool(pool, "true", "true")

    async def run():
        loud = [{"role": "assistant", "content": "hang"}, {"role": "tool", "content": "x" * 2**20}]
        hanging = asyncio.create_task(pool.score("bad", "train", 0, loud))
        while not noted_pids(tmp_path):
            await asyncio.sleep(0.01)
        os.kill(noted_pids(tmp_path)[0], signal.SIGSTOP)
        began = time.monotonic()
        good = await pool.score("bad", "train", 0, [{"role": "assistant", "content": "true"}])
        hanging.cancel()
        return good, time.monotonic() - began

    good, seconds = asyncio.run(run())
    assert good.reward == 1.0 and seconds < 2
    asyncio.run(pool.close())


def test_hanging_calls_slow_the_pool_by_their_share(tmp_path):
    """400 calls on two workers, 5 % of them hang for 2 s: two at a time, these alone would take 20 s."""
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, workers=2, timeout_s=2)
    pool.start()
    ask_pool(pool, *["true"] * 64)
    began = time.monotonic()
    scores = ask_pool(pool, *(["hang"] + ["true"] * 19) * 20)
    seconds = time.monotonic() - began
    assert [score.status for score in scores] == (["timeout"] + ["ok"] * 19) * 20
    assert seconds < 8, "a hanging worker must not block the others"
    asyncio.run(pool.close())


def test_repeating_the_start_of_a_job_ends_no_run(pool):
    late, *others = ask_pool(pool, "extend", *["true"] * 20)
    assert late.status == "timeout" and late.seconds < 4 * TIMEOUT_S
    assert [score.status for score in others] == ["ok"] * 20
