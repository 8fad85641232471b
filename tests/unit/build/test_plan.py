"""The memory request of a configuration, and ranks with common passes, which use the smallest of their plans."""

from __future__ import annotations

import pytest

from shoal.build.memory_plan import MemoryPlan, _narrows, agreed
from shoal.config.orch import EvalSamplingConfig, SamplingConfig
from shoal.core.ranks import SingleProcess


class TwoRanks(SingleProcess):
    """This rank and another one with its numbers."""

    def __init__(self, *other: int) -> None:
        self.other = other

    def minimum(self, numbers: list[int]) -> list[int]:
        return [min(pair) for pair in zip(numbers, self.other, strict=True)]


def test_ranks_with_common_passes_split_equally() -> None:
    """With another split, one rank would wait for a pass that the others never make."""
    mine = MemoryPlan(8, 1000, False, keys_for_token=9)
    plan = agreed(mine, TwoRanks(900, 12, 0))
    assert (plan.slots, plan.micro_batch_tokens, plan.keys_for_token, plan.recompute) == (8, 900, 9, True)
    assert agreed(mine, TwoRanks(2000, 7, 1)) == MemoryPlan(8, 1000, False, keys_for_token=7)


@pytest.mark.parametrize("kind", (SamplingConfig, EvalSamplingConfig))
def test_memory_of_truncated_sampling_is_counted(kind: type[SamplingConfig] | type[EvalSamplingConfig]) -> None:
    assert not _narrows(kind())
    assert not _narrows(kind(top_p=1.0, top_k=-1, min_p=0.0, min_tokens=0))
    assert all(map(_narrows, (kind(top_p=0.9), kind(top_k=5), kind(min_p=0.1), kind(min_tokens=3))))
