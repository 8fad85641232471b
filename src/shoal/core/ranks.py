"""Data-parallel training: how ranks divide rollouts and rows, and exchange the results.

Every rank runs the same loop. Each samples its share of a round of prompts, and all exchange whole groups, so they
compute the same advantages and rows. The trainer sums the gradients. Only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.core.protocols import Ranks

Item = TypeVar("Item")


class SingleProcess:
    """Ranks for training in one process."""

    rank = 0
    world = 1
    mesh = None
    cpu_group = None

    async def exchange(self, mine: bytes) -> list[bytes]:
        return [mine]

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    def sum_gradients(self, masters: Mapping[str, Any]) -> None:
        """With one process the gradient is already the sum."""

    def gather_full(self, tensor: Any) -> Any:
        return tensor

    def minimum(self, numbers: list[int]) -> list[int]:
        return numbers

    def watch_peers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


def deal(items: Sequence[Item], ranks: Ranks, rank: int | None = None) -> list[Item]:
    """This rank's share of the items, or that of another rank: every world-th one."""
    return list(items[ranks.rank if rank is None else rank :: ranks.world])


def interleave(shares: Sequence[Sequence[Item]]) -> list[Item]:
    """The inverse of `deal`: the items of all shares in their original order."""
    longest = max((len(part) for part in shares), default=0)
    return [part[i] for i in range(longest) for part in shares if i < len(part)]


async def any_rank(ranks: Ranks, flag: bool) -> bool:
    """Whether the flag is true on any rank; the same result on all of them."""
    return b"1" in await ranks.exchange(b"1" if flag else b"0")


Metrics = dict[str, tuple[float, float]]
Results = tuple[Metrics, list[np.ndarray]]  # of one micro-batch: metrics, and one array per row


async def gather_results(ranks: Ranks, mine: Sequence[Results]) -> tuple[list[Metrics], list[np.ndarray]]:
    """Metrics of all micro-batches, and the arrays of all rows in their original order, from all ranks.

    Ranks divide rows, not micro-batches, because machines may use micro-batches of different sizes.
    """
    arrays = [array for _, row_arrays in mine for array in row_arrays]
    if ranks.world == 1:
        return [metrics for metrics, _ in mine], arrays
    packed = ([metrics for metrics, _ in mine], [array.astype(np.float32).tobytes() for array in arrays])
    parts = await ranks.exchange(msgspec.msgpack.encode(packed))
    decoded = [msgspec.msgpack.decode(part, type=tuple[list[Metrics], list[bytes]]) for part in parts]
    rows = interleave([data for _, data in decoded])
    metrics = [pairs for rank_metrics, _ in decoded for pairs in rank_metrics]
    return metrics, [np.frombuffer(data, dtype=np.float32) for data in rows]
