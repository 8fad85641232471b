"""The simulated engine, the gain of asynchronous training in the loop, and the cost of thousands of rollouts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def simulated() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import simulated

        yield simulated
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def request(number: int) -> Any:
    from shoal.core.types import Request, SamplingParams

    return Request(f"r{number}", [1, 2], SamplingParams(max_tokens=10, seed=number))


def test_requests_take_their_time_in_their_slots(simulated: Any):
    """Four requests of 50 ms in two slots: 100 ms, all slots busy."""

    async def run() -> tuple[float, Any]:
        engine = simulated.SimulatedEngine(2, lambda _: 0.05, tokens=10)
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(engine.generate(request(i)) for i in range(4)))
        return asyncio.get_running_loop().time() - started, engine

    wall_s, engine = asyncio.run(run())
    assert 0.1 <= wall_s < 0.3 and engine.busy_s >= 0.2 and engine.most_open == 4


def test_version_loaded_during_generation_is_in_the_spans(simulated: Any):
    async def run() -> Any:
        engine = simulated.SimulatedEngine(1, lambda _: 0.2, tokens=10)
        running = asyncio.ensure_future(engine.generate(request(0)))
        await asyncio.sleep(0.1)
        await engine.load(1)
        return await running

    first, second = asyncio.run(run()).spans
    assert (first.start, first.version, second.end, second.version) == (0, 0, 10, 1)
    assert first.end == second.start and 3 <= first.end <= 7


def test_asynchronous_training_halves_balanced_steps(simulated: Any, tmp_path: Path):
    """Eight steps of one second each: 2 · 8 s synchronously, 1 + 8 s at level 1. The clock is virtual, so the times
    are exact.
    """

    def run(level: int, train_s: float = 1.0) -> Any:
        shape = simulated.Shape(8, 2, 8, train_s, lambda _: 1.0, level=level)
        return simulated.simulate(shape, tmp_path / f"{level}-{train_s}", virtual=True)

    found = {level: run(level) for level in (0, 1, 4)}
    assert [round(outcome.wall_s, 6) for outcome in found.values()] == [16.0, 9.0, 9.0]
    assert all(outcome.rollouts == 64 for outcome in found.values())
    assert found[1].rollouts_per_s >= 1.5 * found[0].rollouts_per_s
    for level, idle in ((0, 1 / 2), (1, 1 / 9), (4, 1 / 9)):
        assert found[level].sampler_idle == found[level].trainer_idle == pytest.approx(idle)
    assert run(1, train_s=0.25).wall_s == pytest.approx(8.25), "if generation takes longer, only its time counts"


def test_long_answers_do_not_block_sampling_ahead(simulated: Any, tmp_path: Path):
    """One rollout in eight takes four seconds, the others one. Synchronous steps wait for the longest."""

    def wall_s(level: int) -> float:
        slow = lambda request: 4.0 if request.request_id.endswith("/7/0") else 1.0  # noqa: E731
        shape = simulated.Shape(16, 8, 10, 1.0, slow, level=level)
        return simulated.simulate(shape, tmp_path / str(level), virtual=True).wall_s

    waited = {level: wall_s(level) for level in (0, 1, 4)}
    assert waited[0] == pytest.approx(50.0)
    assert waited[4] < waited[1] < waited[0] and waited[4] < 0.5 * waited[0]


def test_thousand_concurrent_rollouts_take_under_a_millisecond_each(simulated: Any):
    """The real runner, reward pool, collector, packing and records. CPU time; on a busy machine one of three counts."""
    from many_rollouts import measure  # type: ignore[import-not-found]

    spent: list[float] = []
    while not spent or (min(spent) >= 1.0 and len(spent) < 3):
        row = measure(1000, 128, 8, (0.8, 0.4))
        assert row["rollouts"] == row["most_at_once"] == 1000
        spent.append(row["own_ms_a_rollout"])
    assert min(spent) < 1.0, spent
