"""Work as a CUDA graph, with a way back from a capture that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(
    work: Callable[[], Result], pool: Any, warm_up: Callable[[], object]
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """What `work` launches, as a graph with its memory in `pool`. `warm_up` comes first and does the same: kernels are
    compiled and libraries fill their caches, which must not happen while capturing.

    A capture may fail: a model that waits for the device cannot be captured, and memory may not suffice. Then the
    stream is the one that was, and the allocator takes no part in a capture any more: torch would leave it there, and
    would give nothing back of what is cached.
    """
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(here)
    try:
        with torch.cuda.stream(beside):
            warm_up()
    finally:
        here.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(here), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return graph, work()
    except BaseException:
        _leave(pool)
        raise


def _leave(pool: Any) -> None:
    torch.cuda.synchronize()
    with suppress(RuntimeError):  # where the capture was ended as it should be there is nothing to end
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
