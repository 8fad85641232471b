"""Every implementation of `protocols.Ranks` satisfies its contract, each as the only process of its run.

tests/parity/test_ranks.py tests several processes together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from shoal.core.protocols import Ranks
from shoal.core.ranks import SingleProcess
from shoal.trainer.process_ranks import ProcessRanks


@pytest.fixture(params=["single process", "torch.distributed"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.delenv("RANK", raising=False)
    made: Ranks = SingleProcess() if request.param == "single process" else ProcessRanks(20.0, 1, "cpu")
    yield made
    made.close()


def test_one_process_is_rank_0_of_1(ranks: Ranks):
    assert (ranks.rank, ranks.world) == (0, 1)


def test_exchange_returns_the_bytes_of_every_rank(ranks: Ranks):
    for mine in (b"", b"x", bytes(range(256))):
        assert asyncio.run(ranks.exchange(mine)) == [mine]


def test_result_of_rank_0_is_everybodys(ranks: Ranks):
    assert asyncio.run(ranks.on_main(lambda: asyncio.sleep(0, {"step": 3}))) == {"step": 3}


def test_error_of_rank_0_is_raised(ranks: Ranks):
    async def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        asyncio.run(ranks.on_main(fail))


def test_sum_over_one_rank_is_its_own_gradient(ranks: Ranks):
    masters = {"weight": torch.zeros(3), "bias": torch.zeros(2)}
    for master in masters.values():
        master.grad = torch.arange(len(master), dtype=torch.float32)
    ranks.sum_gradients(masters)
    assert {name: master.grad.tolist() for name, master in masters.items() if master.grad is not None} == {
        "weight": [0.0, 1.0, 2.0],
        "bias": [0.0, 1.0],
    }


def test_tensor_that_is_not_sharded_is_gathered_as_it_is(ranks: Ranks):
    tensor = torch.arange(4)
    assert ranks.gather_full(tensor) is tensor


def test_minimum_over_one_rank_is_its_own(ranks: Ranks):
    assert ranks.minimum([5, 0, 7]) == [5, 0, 7]


def test_errors_that_are_not_of_the_transport_pass_through(ranks: Ranks):
    with pytest.raises(RuntimeError, match="unrelated"), ranks.watch_peers():
        raise RuntimeError("unrelated")


def test_only_joined_processes_have_a_mesh_and_a_group(ranks: Ranks):
    joined = isinstance(ranks, ProcessRanks)
    assert ((ranks.mesh is not None), (ranks.cpu_group is not None)) == (joined, joined)
