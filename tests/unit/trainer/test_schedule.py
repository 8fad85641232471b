"""Learning rates, computed manually."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_scheduler

from shoal.trainer.optimizer import Kind, Schedule


def rates(kind: Kind, steps: int, warmup: int = 0, final: float = 0.0) -> list[float]:
    schedule = Schedule(1.0, steps, kind, warmup, final)
    return [schedule(step) for step in range(1, steps + 1)]


def test_constant() -> None:
    assert rates("constant", 4) == [1, 1, 1, 1]
    assert rates("constant", 5, warmup=4) == [0.25, 0.5, 0.75, 1, 1]


def test_linear_ends_one_step_before_its_floor() -> None:
    assert rates("linear", 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates("linear", 6, warmup=2, final=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])


def test_cosine() -> None:
    r = math.sqrt(0.5)
    assert rates("cosine", 4) == pytest.approx([1, (1 + r) / 2, 0.5, (1 - r) / 2])
    assert rates("cosine", 4, warmup=2, final=0.1) == pytest.approx([0.5, 1, 1, 0.55])


def test_wsd_is_flat_then_falls_over_the_last_fifth() -> None:
    assert rates("wsd", 10) == pytest.approx([1] * 9 + [0.5])
    assert rates("wsd", 10, warmup=2, final=0.4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.7])
    assert rates("wsd", 5, warmup=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1]), "warm-up may take the complete run"


@pytest.mark.parametrize("kind", ("constant", "linear", "cosine", "wsd"))
@pytest.mark.parametrize("steps", (1, 2, 3, 7))
@pytest.mark.parametrize("warmup", (0, 1, 7))
def test_no_step_has_a_rate_of_zero(kind: Kind, steps: int, warmup: int) -> None:
    assert min(rates(kind, steps, warmup)) > 0
    if warmup == 0:
        assert rates(kind, steps)[0] == 1, "a run of one step trains"


@pytest.mark.parametrize(("kind", "theirs"), [("linear", "linear"), ("cosine", "cosine")])
def test_decay_is_that_of_transformers(kind: Kind, theirs: str) -> None:
    """Warm-up differs by one step: the first step of transformers has the rate 0."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(theirs, optimizer, num_warmup_steps=3, num_training_steps=12)
    found = []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(kind, 12, warmup=3)[3:] == pytest.approx(found[3:])
    assert rates(kind, 12, warmup=3)[:2] == pytest.approx(found[1:3])


@pytest.mark.parametrize("kind", ("linear", "cosine", "wsd"))
def test_past_the_end_the_floor_holds(kind: Kind) -> None:
    assert Schedule(2.0, 10, kind, 1, 0.25)(1000) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ("constant", "linear", "cosine", "wsd"))
def test_schedule_never_exceeds_the_peak_and_warmup_rises(kind: Kind) -> None:
    found = rates(kind, 50, warmup=7, final=0.1)
    assert found[:7] == sorted(found[:7]) and max(found) == found[6] == 1 and min(found[7:]) >= 0.1
