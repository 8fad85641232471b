"""Ends of the pool: closed, its server killed, or its owner killed. No process remains."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.errors import RewardServerError
from shoal.rewards.pool import RewardPool
from shoal.rewards.sandbox import end_of

from .misbehaving import Misbehaving, alive, all_gone, noted_pids


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


def test_killed_server_ends_all_waits(tmp_path):
    pool = RewardPool({"bad": Misbehaving(tmp_path)}, timeout_s=60)
    pool.start()

    async def run():
        job = asyncio.create_task(pool.score("bad", "train", 0, [{"role": "assistant", "content": "hang"}]))
        while not noted_pids(tmp_path):
            await asyncio.sleep(0.02)
        os.kill(pool._pid, signal.SIGKILL)
        for waiting in (job, pool.score("bad", "train", 0, [])):
            with pytest.raises(RewardServerError, match=r"server ended \(killed by SIGKILL\)"):
                await asyncio.wait_for(waiting, 5)

    asyncio.run(run())
    assert all_gone(noted_pids(tmp_path))
    asyncio.run(pool.close())


def test_end_detected_by_a_write_is_reported_the_same(pool):
    async def run():
        await pool.score("bad", "train", 0, [{"role": "assistant", "content": "4"}])
        os.kill(pool._pid, signal.SIGKILL)
        while end_of(pool._pid) is None:
            time.sleep(0.005)  # the event loop is blocked: nothing is read
        with pytest.raises(RewardServerError, match=r"server ended \(killed by SIGKILL\)"):
            await pool.score("bad", "train", 0, [])

    asyncio.run(run())


VICTIM = """
import asyncio, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from misbehaving import Misbehaving
from shoal.rewards.sandbox import end_of
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
    """Also without HOME and with a strict umask, as a service manager may run it."""
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
