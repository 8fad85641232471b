"""The memory plan of ranks that pass together: the smallest of theirs, number by number."""

from __future__ import annotations

from shoal.build.plan import agreed
from shoal.trainer.memory import MemoryPlan


class TwoRanks:
    """This one and another with its numbers."""

    def __init__(self, *other: int) -> None:
        self.other = other

    def smallest(self, numbers: list[int]) -> list[int]:
        return [min(pair) for pair in zip(numbers, self.other, strict=True)]


def test_ranks_that_pass_together_cut_alike() -> None:
    """Cut otherwise, one rank would wait for a pass that the others never make."""
    mine = MemoryPlan(8, 1000, False, keys_for_token=9)
    plan = agreed(mine, TwoRanks(900, 12, 0))
    assert (plan.slots, plan.micro_batch_tokens, plan.keys_for_token, plan.recompute) == (8, 900, 9, True)
    assert agreed(mine, TwoRanks(2000, 7, 1)) == MemoryPlan(8, 1000, False, keys_for_token=7)
