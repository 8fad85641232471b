"""Several ranks as one: sharing, exchange, agreement. Ranks are coroutines of one event loop here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules
from shoal.core.errors import EngineError, StorageError
from shoal.core.ranks import SingleProcess, any_rank, deal, gather_results, interleave
from shoal.core.types import Prompt, RolloutGroup
from shoal.rollout.group_exchange import GroupExchange
from shoal.split.trainer_process import all_ranks_succeed

from .groups import make_group, make_stream
from .world import Plan, World


class Meeting:
    """The exchange of ranks: each waits until all have arrived."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.rounds: list[dict[int, bytes]] = []
        self.changed = asyncio.Condition()

    def rank(self, number: int) -> Any:
        return _Rank(self, number)


class _Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.world = rank, meeting.world
        self._meeting = meeting
        self._round = 0

    async def exchange(self, mine: bytes) -> list[bytes]:
        meeting, number = self._meeting, self._round
        self._round += 1
        async with meeting.changed:
            if len(meeting.rounds) == number:
                meeting.rounds.append({})
            meeting.rounds[number][self.rank] = mine
            meeting.changed.notify_all()
            await meeting.changed.wait_for(lambda: len(meeting.rounds[number]) == meeting.world)
        return [meeting.rounds[number][rank] for rank in range(meeting.world)]

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        raise AssertionError("not used here")


def test_dealing_and_undealing():
    world = Meeting(3)
    shares = [deal(list("abcdefg"), world.rank(r)) for r in range(3)]
    assert shares == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert interleave(shares) == list("abcdefg")
    assert interleave([[], []]) == []


def test_one_process_does_not_share():
    async def run():
        alone = SingleProcess()
        assert await alone.exchange(b"x") == [b"x"]
        assert await any_rank(alone, True) and not await any_rank(alone, False)
        return await alone.on_main(lambda: asyncio.sleep(0, "done"))

    assert asyncio.run(run()) == "done"


def test_any_rank_can_request_a_stop():
    async def run() -> list[bool]:
        meeting = Meeting(2)
        return list(await asyncio.gather(any_rank(meeting.rank(0), False), any_rank(meeting.rank(1), True)))

    assert asyncio.run(run()) == [True, True]


def test_failure_on_one_rank_fails_on_all():
    """Each rank raises its own error, or that of the first failed rank. Afterwards they are in step."""

    async def work(rank: int) -> int:
        if rank == 1:
            raise StorageError("the disk of the second machine is full")
        return rank

    async def one(rank: Any) -> tuple[str, list[bytes]]:
        with pytest.raises(StorageError) as caught:
            await all_ranks_succeed(rank, work(rank.rank))
        return str(caught.value), await rank.exchange(b"next")

    async def run() -> Any:
        meeting = Meeting(3)
        return await asyncio.gather(*(one(meeting.rank(number)) for number in range(3)))

    told = "the disk of the second machine is full"
    first, second, third = asyncio.run(run())
    assert (first[0], second[0], third[0]) == (f"process 1 of 3: {told}", told, f"process 1 of 3: {told}")
    assert first[1] == second[1] == third[1] == [b"next"] * 3


def test_results_come_back_in_order_with_their_arrays():
    async def run():
        meeting = Meeting(2)
        results = [({"m": (float(i), 1.0)}, [np.full(i + 1, i, dtype=np.float32)]) for i in range(5)]
        return await asyncio.gather(*(gather_results(meeting.rank(r), results[r::2]) for r in range(2)))

    for metrics, arrays in asyncio.run(run()):
        assert [one["m"][0] for one in metrics] == [0, 2, 4, 1, 3]  # by rank
        assert [array.tolist() for array in arrays] == [[i] * (i + 1) for i in range(5)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_collect_the_groups_of_one_process(world: int):
    """Every third prompt has zero variance and is replaced; each prompt is trained once."""
    played: list[tuple[int, str]] = []

    async def collect(rank: Any) -> list[list[str]]:
        async def run_group(prompt: Prompt) -> RolloutGroup:
            played.append((rank.rank, prompt.prompt_id))
            await asyncio.sleep(0.001 * (prompt.index % 3))
            return make_group(prompt, [1.0, 1.0] if prompt.index % 3 == 0 else [0.0, 1.0])

        shared = GroupExchange(run_group, rank) if world > 1 else run_group
        collector = Collector(
            shared, make_stream(50), Admission(8, 2, max_off_policy_steps=9), GroupRules(lockstep=world > 1)
        )
        steps = []
        for step in range(3):
            collected = await collector.collect(step, asyncio.Event())
            steps.append([group.prompt.prompt_id for group in collected.kept])
        return steps

    async def run():
        meeting = Meeting(world)
        return await asyncio.gather(*(collect(meeting.rank(r) if world > 1 else SingleProcess()) for r in range(world)))

    found = asyncio.run(run())
    assert all(steps == found[0] for steps in found)
    kept = [prompt for step in found[0] for prompt in step]
    assert len(kept) == len(set(kept)) and set(kept) <= {prompt for _, prompt in played}
    assert {rank for rank, _ in played} == set(range(world))
    assert [len(step) for step in found[0]] == [4, 4, 4]
    ALL.setdefault("steps", found[0])
    assert found[0] == ALL["steps"]


ALL: dict[str, Any] = {}  # the groups of the first world; every other world must collect the same


def test_processes_with_other_weights_are_detected(tmp_path: Path):
    class Other(SingleProcess):
        async def exchange(self, mine: bytes) -> list[bytes]:
            return [mine, b"weights-of-another-run" if mine.startswith(b"weights") else mine]

    world = World(tmp_path, Plan())
    world.loop.parts.ranks = Other()
    with pytest.raises(EngineError, match="version 0 differ"):
        world.run()
    world.close()
