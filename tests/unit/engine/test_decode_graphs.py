"""Which decode graphs are captured, in which order, and which graph a batch uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.engine.decode_graphs import DecodeBucket, DecodeGraphs
from shoal.models.graph_cache import GraphCache


def graphs_of(limit: int) -> Any:
    graphs: Any = object.__new__(DecodeGraphs)
    graphs._view, graphs._cache = SimpleNamespace(noisy=False), SimpleNamespace(slots=64, length=2048)
    graphs._graphs = GraphCache(torch.device("cpu"), limit)
    graphs._capture = lambda bucket, narrowed: (bucket, narrowed)
    return graphs


@pytest.mark.parametrize(("limit", "kept"), [(1, [64]), (2, [64, 8]), (9, [64, 8, 16])])
def test_largest_graph_is_captured_first(limit: int, kept: list[int]) -> None:
    """At the limit, a batch uses the smallest graph that covers it."""
    graphs = graphs_of(limit)
    taken = [graphs._graph(DecodeBucket(rows, 512), False)[0].rows for rows in (8, 16)]
    assert [bucket.rows for bucket, *_ in graphs._graphs] == kept
    assert taken == [8 if 8 in kept else 64, 16 if 16 in kept else 64]


def test_largest_graph_is_kept_for_each_sampling_kind() -> None:
    graphs = graphs_of(2)
    for narrowed in (False, True):
        graphs._graph(DecodeBucket(8, 512), narrowed)
    assert [(b.rows, b.longest, narrowed) for b, narrowed, _ in graphs._graphs] == [
        (64, 2048, False), (8, 512, False), (64, 2048, True)
    ]  # fmt: skip
