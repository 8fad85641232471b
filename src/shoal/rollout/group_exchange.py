"""Runs the groups of several ranks: each rank samples its share of a round, and all receive all groups.

`build` gives it to the collector in place of a group runner if a run has several ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from shoal.core.protocols import Ranks
from shoal.core.ranks import deal, interleave
from shoal.core.types import Prompt, RolloutGroup


class GroupExchange:
    """Runs prompts that are requested together as one round: each rank runs its share, and all receive all groups."""

    def __init__(self, run_group: Callable[[Prompt], Awaitable[RolloutGroup]], ranks: Ranks) -> None:
        self._run_group = run_group
        self._ranks = ranks
        self._requested: list[tuple[Prompt, asyncio.Future[RolloutGroup]]] = []
        self._round: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Prompt) -> RolloutGroup:
        result: asyncio.Future[RolloutGroup] = asyncio.get_running_loop().create_future()
        self._requested.append((prompt, result))
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._run_round(), name="round")
        return await result

    async def _run_round(self) -> None:
        await asyncio.sleep(0)  # all prompts of this dispatch join the round, on every rank alike
        requested, self._requested = self._requested, []
        try:
            mine = await asyncio.gather(*(self._run_group(prompt) for prompt, _ in deal(requested, self._ranks)))
            parts = await self._ranks.exchange(msgspec.msgpack.encode(list(mine)))
            groups = interleave([msgspec.msgpack.decode(part, type=list[RolloutGroup]) for part in parts])
        except BaseException as error:
            for _, result in requested:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), group in zip(requested, groups, strict=True):
            if not result.done():
                result.set_result(group)
