"""The cost of many concurrent rollouts: the real loop, runner, reward pool and run directory with a simulated engine.

python benchmarks/many_rollouts.py OUT.json [--rollouts 10000] [--tokens 256] [--smoke]

All rollouts of the step run at the same time and finish one after another. The own time is the CPU time of all threads
of this process: dispatch, episodes, reward requests, settling of groups, packing, and writing rollouts. Rewards run in
other processes, and the simulated engine sleeps. The process uses two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import print_table, write_result
from simulated import Outcome, Shape, Vowels, simulate

from shoal.core.types import Message, Score
from shoal.rewards.pool import RewardPool

CORES = 2
GROUP = 8
FIRST_S, SPREAD_S = 4.0, 4.0  # the first answer comes after this time, and the last one this much later
LIMIT_MS, LIMIT_GIB = 1.0, 2.0


@dataclass
class OpenJudge:
    """A reward pool that outlives the event loop of a run."""

    pool: RewardPool

    async def score(self, env: str, split: str, index: int, messages: Sequence[Message]) -> Score:
        return await self.pool.score(env, split, index, messages)

    async def score_group(
        self, env: str, split: str, index: int, conversations: Sequence[Sequence[Message]]
    ) -> list[Score]:
        return await self.pool.score_group(env, split, index, conversations)

    async def close(self) -> None: ...


def measure(rollouts: int, tokens: int, group: int, wait: tuple[float, float] = (FIRST_S, SPREAD_S)) -> dict[str, Any]:
    first_s, spread_s = wait
    pool = RewardPool({"vowels": Vowels()}, workers=CORES, timeout_s=60.0)
    pool.start()
    shape = Shape(
        batch=rollouts,
        group=group,
        steps=1,
        train_s=0.0,
        seconds=lambda request: first_s + spread_s * (request.sampling.seed % 9973) / 9973,
        tokens=tokens,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            before = time.process_time()
            outcome = simulate(shape, Path(folder) / "run", OpenJudge(pool))
            own_s = time.process_time() - before
    finally:
        asyncio.run(pool.close())
    if outcome.rollouts != rollouts:
        raise SystemExit(f"{rollouts - outcome.rollouts} of {rollouts} rollouts were lost on the way")
    return _row(shape, outcome, own_s)


def _row(shape: Shape, outcome: Outcome, own_s: float) -> dict[str, Any]:
    return {
        "rollouts": outcome.rollouts,
        "group": shape.group,
        "tokens": shape.tokens,
        "most_at_once": outcome.most_open,
        "own_ms_a_rollout": 1e3 * own_s / outcome.rollouts,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "wall_s": outcome.wall_s,
    }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--rollouts", type=int, default=10_000)
    made.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024])
    made.add_argument("--smoke", action="store_true", help="a few rollouts, to see that it runs")
    asked = made.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    rollouts, wait = (200, (0.2, 0.2)) if asked.smoke else (asked.rollouts, (FIRST_S, SPREAD_S))
    rows = []
    for tokens in sorted(asked.tokens):  # the peak is that of the process, so larger runs come later
        rows.append(measure(rollouts, tokens, GROUP, wait))
        write_result(asked.out, {"smoke": asked.smoke, "cores_used": CORES, "rows": rows})
    print_table("one orchestrator", rows, ["rollouts", "tokens", "most_at_once", "own_ms_a_rollout", "peak_gib"])
    slow = [row for row in rows if row["own_ms_a_rollout"] > LIMIT_MS or row["peak_gib"] > LIMIT_GIB]
    print("within the limits" if not slow else f"{len(slow)} beyond {LIMIT_MS:g} ms or {LIMIT_GIB:g} GiB")


if __name__ == "__main__":
    main()
