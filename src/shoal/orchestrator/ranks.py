"""One policy trained by several processes: who plays which group, and how all of them come to hold the same step.

Every rank runs the same loop. A round of prompts is dealt out, played, and exchanged whole, so collection, advantages
and packing are computed alike everywhere; gradients are summed in the trainer. Only rank 0 writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.protocols import Ranks
from shoal.transport.calls import Answer, failed, raise_failed
from shoal.types import Prompt, RolloutGroup

Item = TypeVar("Item")


class Alone:
    """The usual case: one process."""

    rank = 0
    world = 1

    async def exchange(self, mine: bytes) -> list[bytes]:
        return [mine]

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()


def share(items: Sequence[Item], ranks: Ranks, rank: int | None = None) -> list[Item]:
    """The items dealt to this rank, or to another, one after the other."""
    return list(items[ranks.rank if rank is None else rank :: ranks.world])


def undeal(shares: Sequence[Sequence[Item]]) -> list[Item]:
    """The items of all ranks in the order they had before they were dealt."""
    longest = max((len(part) for part in shares), default=0)
    return [part[i] for i in range(longest) for part in shares if i < len(part)]


async def agree(ranks: Ranks, flag: bool) -> bool:
    """True everywhere if it is true anywhere."""
    return b"1" in await ranks.exchange(b"1" if flag else b"0")


async def all_or_none(ranks: Ranks, work: Awaitable[Item]) -> Item:
    """What each rank's own work came to, if it succeeded on all of them: what fails on one fails on every one."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = await work
    except Exception as error:
        failure = error
    told = await ranks.exchange(b"" if failure is None else msgspec.msgpack.encode(failed(0, failure)))
    if failure is not None:
        raise failure
    for rank, reason in enumerate(told):
        if reason:
            raise_failed(msgspec.msgpack.decode(reason, type=Answer), f"process {rank} of {ranks.world}")
    return result


class SharedGroups:
    """Plays prompts that were asked for together as one round: each rank its share, then everyone has all groups."""

    def __init__(self, run_group: Callable[[Prompt], Awaitable[RolloutGroup]], ranks: Ranks) -> None:
        self._run_group = run_group
        self._ranks = ranks
        self._asked: list[tuple[Prompt, asyncio.Future[RolloutGroup]]] = []
        self._round: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt) -> RolloutGroup:
        answer: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        self._asked.append((prompt, answer))
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._play(), name="round")
        return await answer

    async def _play(self) -> None:
        await asyncio.sleep(0)  # whoever asked together is in this round, on every rank alike
        asked, self._asked = self._asked, []
        try:
            mine = [self._run_group(prompt) for prompt, _ in share(asked, self._ranks)]
            played = await asyncio.gather(*mine)
            parts = await self._ranks.exchange(msgspec.msgpack.encode(list(played)))
            groups = undeal([msgspec.msgpack.decode(part, type=list[RolloutGroup]) for part in parts])
        except BaseException as error:
            for _, answer in asked:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), group in zip(asked, groups, strict=True):
            if not answer.done():
                answer.set_result(group)


Metrics = dict[str, tuple[float, float]]
Results = tuple[Metrics, list[np.ndarray]]  # of one micro-batch: metrics, and an array a row


async def gather_results(ranks: Ranks, mine: Sequence[Results]) -> tuple[list[Metrics], list[np.ndarray]]:
    """Metrics of all micro-batches and the arrays of all rows, those in the order before they were dealt.

    Rows are dealt, not micro-batches: how many rows fit at once may differ between machines.
    """
    arrays = [array for _, of_rows in mine for array in of_rows]
    if ranks.world == 1:
        return [metrics for metrics, _ in mine], arrays
    packed = ([metrics for metrics, _ in mine], [array.astype(np.float32).tobytes() for array in arrays])
    parts = await ranks.exchange(msgspec.msgpack.encode(packed))
    decoded = [msgspec.msgpack.decode(part, type=tuple[list[Metrics], list[bytes]]) for part in parts]
    rows = undeal([data for _, data in decoded])
    metrics = [of_micro_batch for of_rank, _ in decoded for of_micro_batch in of_rank]
    return metrics, [np.frombuffer(data, dtype=np.float32) for data in rows]
