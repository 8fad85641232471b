"""Work as a CUDA graph, with a way back from a capture that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """What `work` launches, as a graph with its memory in `pool`. Whoever calls has done the same work once before:
    kernels are compiled and libraries fill their caches, which must not happen while capturing.

    A capture may fail: a model that waits for the device cannot be captured, and memory may not suffice. Then the
    stream is the one that was, and neither the allocator nor the random numbers take part in a capture any more: torch
    would leave them there, would give nothing back of what is cached, and draw nothing.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer one leads back to the stream that was, also from a capture that fails.
        with torch.cuda.stream(torch.cuda.current_stream()), _capturing(graph, pool):
            return graph, work()
    except BaseException:
        with suppress(RuntimeError, AttributeError):  # the error that led here says more than what follows from it
            torch.cuda.synchronize()
            _leave(pool)
        raise


def _capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> torch.cuda.graph:
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def _leave(pool: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # where it was ended as it should be there is nothing to end
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
    with _capturing(torch.cuda.CUDAGraph()):  # one that ends well: generators are told of no other end
        torch.zeros(1, device="cuda")
