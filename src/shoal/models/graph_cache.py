"""The cache of CUDA graphs used for decode steps, prefills and training passes, and capture with error recovery.

Callers choose the key of a graph (its bucket of sizes, and the kind of work), pad the inputs to the bucket, and decide
when to capture. The cache owns the graphs, their memory pool and its size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
_capture_s = 0.0  # of this process


def capture_seconds() -> float:
    """Seconds this process has spent capturing graphs, with their warm-ups: `time/capture` is the difference."""
    return _capture_s


@contextmanager
def _timed_capture() -> Iterator[None]:
    global _capture_s
    began = time.monotonic()
    try:
        yield
    finally:
        _capture_s += time.monotonic() - began


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`; `least` is a power of two."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def pad(array: np.ndarray, size: int, fill: np.ndarray | int = 0) -> np.ndarray:
    """`array` [n] padded to [size] with `fill`: one value, or an array [size] whose last values are used."""
    padded = np.full(size, fill, array.dtype)
    padded[: len(array)] = array
    return padded


@dataclass(frozen=True)
class CapturedGraph(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    result: Result  # overwritten by every replay

    def replay(self, inputs: Mapping[str, Tensor] | None = None) -> Result:
        """Copy `inputs` into the tensors that the graph reads, and launch it."""
        for name, tensor in (inputs or {}).items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return self.result


class GraphCache(dict[Key, CapturedGraph[Result]]):
    """Captured graphs by key, with one memory pool.

    A graph reuses the pool's blocks of larger graphs, but not of smaller ones: capture the largest graph first, or
    bound the sum of sizes. `limit` and `enabled` are for the caller to check before a capture.
    """

    def __init__(self, device: torch.device, limit: int, enabled: bool = True) -> None:
        super().__init__()
        self.limit = limit
        self.enabled = enabled
        self.pool_bytes = 0  # reserved by captures since the last reset
        self._device = device
        self._pool: Any = None

    @property
    def full(self) -> bool:
        return len(self) >= self.limit

    def capture(self, work: Callable[[], Result], inputs: Mapping[str, Tensor] | None = None) -> CapturedGraph[Result]:
        """Run `work` once to warm up, then capture it. The caller stores the graph."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()

        def measured() -> Result:
            before = torch.cuda.memory_reserved(self._device)  # capturing has freed all unused memory
            result = work()
            self.pool_bytes += torch.cuda.memory_reserved(self._device) - before
            return result

        with _timed_capture():
            work()
            graph, result = capture(measured, self._pool)
        return CapturedGraph(graph, inputs or {}, result)

    def reset(self) -> None:
        """Drop all graphs and start a new pool: memory is freed only with the last graph of a pool, and an emptied
        pool cannot be reused."""
        self.clear()
        self._pool, self.pool_bytes = None, 0


def capture(work: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture `work` as a CUDA graph with its memory in `pool`. The caller has run the same work once before, since
    kernels must not be compiled, nor library caches filled, during a capture.

    A capture fails if the model synchronises with the device or memory runs out. The previous stream is then restored,
    and the allocator and the random generators leave capture mode. torch would leave them in it: cached memory could
    not be freed, and no random numbers drawn.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context restores the previous stream, also after a failed capture.
        with torch.cuda.stream(torch.cuda.current_stream()), _capturing(graph, pool):
            return graph, work()
    except BaseException:
        with suppress(RuntimeError, AttributeError):  # keep the original error
            torch.cuda.synchronize()
            _leave(pool)
        raise


def _capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> torch.cuda.graph:
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")


def _leave(pool: Any) -> None:
    with suppress(RuntimeError, AttributeError):  # raised if the capture was ended properly
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device, pool)  # type: ignore[attr-defined]
    with _capturing(torch.cuda.CUDAGraph()):  # generators only leave capture mode after a successful capture
        torch.zeros(1, device="cuda")
