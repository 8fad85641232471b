"""Settings that change with the step: noise stages, temperature, saving and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from shoal.config.orch import TemperatureSchedule
from shoal.core.state import EvalCadence, SaveCadence

from .world import noise_schedule

SEED_EXAMPLE = (0, 0.05, 0.0281, 0.0158, 0.0089, 0.005, 0.0028, 0.0016, 0.0009, 0.0005)


def temperature(start: float, end: float, total_steps: int, schedule: str = "linear") -> Callable[[int], float]:
    section = TemperatureSchedule.model_validate({"start": start, "end": end, "schedule": schedule})
    return partial(section.at, total_steps=total_steps)


def test_noise_of_the_quickstart():
    """40 steps, N = 10: four steps with each of the ten values."""
    schedule = noise_schedule(5e-2, 5e-4, 10, total_steps=40)
    wanted = [sigma for sigma in SEED_EXAMPLE for _ in range(4)]
    assert [schedule(step) for step in range(1, 41)] == pytest.approx(wanted, abs=5e-5)
    assert schedule(1) == 0.0 and schedule(5) == 5e-2
    assert schedule(40) == pytest.approx(5e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "sigmas"),
    [(1, [0.0] * 6), (2, [0.0, 0.0, 0.0, 0.05, 0.05, 0.05]), (3, [0.0, 0.0, 0.05, 0.05, 0.0005, 0.0005])],
)
def test_noise_with_few_stages(stages: int, sigmas: list[float]):
    schedule = noise_schedule(5e-2, 5e-4, stages, total_steps=6)
    assert [schedule(step) for step in range(1, 7)] == pytest.approx(sigmas)


def test_noise_stays_in_its_last_stage_in_an_extended_run():
    schedule = noise_schedule(5e-2, 5e-4, 10, total_steps=40)
    assert schedule(41) == schedule(100) == pytest.approx(5e-4)


def test_noise_falls_and_never_below_its_end():
    schedule = noise_schedule(0.1, 0.001, 7, total_steps=100)
    noisy = [schedule(step) for step in range(1, 101) if schedule(step) > 0]
    assert noisy == sorted(noisy, reverse=True)
    assert noisy[0] == 0.1 and noisy[-1] == pytest.approx(0.001)


def test_temperature_linear_and_cosine():
    linear = temperature(1.0, 0.6, total_steps=5)
    assert [linear(step) for step in range(1, 6)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert linear(50) == pytest.approx(0.6)
    cosine = temperature(1.0, 0.6, total_steps=5, schedule="cosine")
    wanted = [1.0, 1 - 0.4 * (1 - 0.5**0.5) / 2, 0.8, 1 - 0.4 * (1 + 0.5**0.5) / 2, 0.6]
    assert [cosine(step) for step in range(1, 6)] == pytest.approx(wanted)


def test_constant_temperature_is_exact():
    assert temperature(0.7, 0.7, total_steps=3)(2) == 0.7
    assert temperature(1.0, 0.5, total_steps=1)(1) == 1.0


@pytest.mark.parametrize(("steps", "due"), [(None, [10, 20, 30]), (1, list(range(1, 31))), (7, [7, 14, 21, 28])])
def test_saving_by_steps(steps: int | None, due: list[int]):
    cadence = SaveCadence(steps)
    assert [step for step in range(1, 31) if cadence.due(step)] == due


def test_saving_by_seconds():
    cadence = SaveCadence(seconds=0.05)
    assert not cadence.due(10), "steps do not count then"
    time.sleep(0.06)
    assert cadence.due(11) and cadence.due(12)
    cadence.saved()
    assert not cadence.due(13)


def test_evaluating_on_the_interval_and_at_the_last_step():
    cadence = EvalCadence(interval=4)
    assert [step for step in range(11) if cadence.due(step, 10)] == [0, 4, 8, 10]
    assert not EvalCadence(interval=4, at_start=False).due(0, 10)


def test_zero_steps_save_nothing():
    off = SaveCadence(0)
    assert off.off and not any(off.due(step) for step in range(1, 30))
    assert not SaveCadence(None).off and not SaveCadence(0, seconds=1.0).off
