"""The cache of CUDA graphs, with a fake capture: warm-up, inputs, pool, limits, and failed captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.models import graph_cache
from shoal.models.graph_cache import GraphCache, pad, power_of_two

CPU = torch.device("cpu")
Cache = GraphCache[str, Tensor]


class FakeGraph:
    """Replays by running the work again, into the tensor that the capture returned."""

    def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        self.result.copy_(self.work())


class FakeDevice:
    """The resources that a capture and its pool take from CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools = 0
        self.reserved = 0
        self.captures: list[Any] = []  # the pool of each
        self.fails: Exception | None = None
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_pool)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(graph_cache, "capture", self.capture)

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def capture(self, work: Callable[[], Tensor], pool: Any) -> tuple[FakeGraph, Tensor]:
        self.captures.append(pool)
        result = work()
        if self.fails is not None:
            raise self.fails
        return FakeGraph(work, result), result


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def work_on(device: FakeDevice, inputs: dict[str, Tensor], runs: list[int], reserves: int = 0) -> Callable[[], Tensor]:
    def work() -> Tensor:
        runs.append(len(device.captures))
        device.reserved += reserves
        return inputs["x"] * 2

    return work


def test_graph_reads_its_inputs_in_place(device: FakeDevice) -> None:
    cache, inputs, runs = Cache(CPU, 2), {"x": torch.ones(3)}, []
    graph = cache["a"] = cache.capture(work_on(device, inputs, runs), inputs)
    assert runs == [0, 1], "one run as warm-up, one in the capture"
    first = graph.replay({"x": torch.full((3,), 5.0)})
    assert first.tolist() == [10.0] * 3 and inputs["x"].tolist() == [5.0] * 3
    assert graph.replay() is first, "without new inputs; every replay writes the same result"


def test_graphs_share_a_pool_until_a_reset(device: FakeDevice) -> None:
    cache, inputs = Cache(CPU, 2), {"x": torch.ones(1)}
    assert device.pools == 0, "none before the first capture"
    for key in ("large", "small"):
        assert not cache.full
        cache[key] = cache.capture(work_on(device, inputs, [], reserves=100), inputs)
    assert device.captures == [1, 1] and cache.full and cache.pool_bytes == 200, "warm-ups do not count"
    cache.reset()
    assert not cache and cache.pool_bytes == 0 and not cache.full
    cache["small"] = cache.capture(work_on(device, inputs, [], reserves=7), inputs)
    assert device.captures == [1, 1, 2] and cache.pool_bytes == 7


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("no memory")])
def test_failed_capture_adds_no_gradient(device: FakeDevice, error: Exception) -> None:
    cache, inputs = Cache(CPU, 2), {"x": torch.ones(1)}
    cache["a"] = cache.capture(work_on(device, inputs, []), inputs)
    device.fails = error
    with pytest.raises(type(error)):
        cache["b"] = cache.capture(work_on(device, inputs, []), inputs)
    assert list(cache) == ["a"] and cache.enabled, "the caller decides whether to give up"
    assert cache["a"].replay().tolist() == [2.0]


def test_work_failing_in_the_warm_up_is_not_captured(device: FakeDevice) -> None:
    cache = Cache(CPU, 2)
    with pytest.raises(ZeroDivisionError):
        cache.capture(lambda: torch.ones(1 // 0))
    assert device.captures == []


@pytest.mark.parametrize(
    ("count", "least", "power"), [(0, 1, 1), (1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 1, 8), (5, 256, 256), (257, 256, 512)]
)
def test_powers_of_two(count: int, least: int, power: int) -> None:
    assert power_of_two(count, least) == power


def test_padding_keeps_values_and_dtype() -> None:
    padded = pad(np.array([1.5, 2.5], dtype=np.float32), 4, 1)
    assert padded.dtype == np.float32 and padded.tolist() == [1.5, 2.5, 1.0, 1.0]
    assert pad(np.array([True]), 3).tolist() == [True, False, False]
    assert pad(np.array([7, 8]), 5, np.arange(5)).tolist() == [7, 8, 2, 3, 4]
