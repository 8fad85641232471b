"""The memory plan of ranks that pass together: the smallest of theirs, number by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.build import plan as plans
from shoal.config.schema import RunConfig
from shoal.trainer.memory import MemoryPlan


@pytest.mark.parametrize("sharded", (True, False))
def test_ranks_that_pass_together_cut_alike(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Cut otherwise, one rank would wait for a pass that the others never make."""
    mine, other = MemoryPlan(8, 1000, False, keys_for_token=9), [900, 12, 0]
    monkeypatch.setattr(plans, "_make_plan", lambda *_: mine)
    ranks: Any = SimpleNamespace(smallest=lambda numbers: [min(pair) for pair in zip(numbers, other, strict=True)])
    recomputes: list[bool] = []
    model: Any = SimpleNamespace(
        sharded=object() if sharded else None, trained=SimpleNamespace(recompute=recomputes.append)
    )
    found = plans.make_plan(RunConfig.model_construct(), model, None, ranks)
    agreed = (found.micro_batch_tokens, found.keys_for_token, found.recompute)
    assert agreed == ((900, 9, True) if sharded else (1000, 9, False)) and recomputes == [found.recompute]
