"""Tally and Phases, with manually computed numbers."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.metrics import Tally, throughput
from shoal.watch.observer import Phases


def test_means_sums_maxima_and_values() -> None:
    tally = Tally()
    tally.add("policy/entropy", 3.0, 2)
    tally.add("policy/entropy", 1.0, 2)
    tally.add("policy/loss", 0.25, 0)
    tally.add("policy/loss", -0.5, 0)
    tally.max("staleness/max", 1)
    tally.max("staleness/max", 3)
    tally.max("staleness/max", 2)
    tally.value("optim/lr", 1e-3)
    tally.value("optim/lr", 1e-4)
    tally.mean("reward/mean", [1.0, 0.0, 0.5])
    tally.add_all({"masked": (1.0, 4.0)})
    expected = {"reward/mean": 0.5, "policy/loss": -0.25, "policy/entropy": 1.0, "masked": 0.25}
    assert tally.reduce() == {**expected, "optim/lr": 1e-4, "staleness/max": 3.0}


def test_no_data_is_absent_and_zero_is_data() -> None:
    tally = Tally()
    tally.mean("reward/mean", [])
    tally.add("mismatch/k3", 0.0, 0)
    tally.add("optim/skipped", 0.0, 0)
    tally.add("masked", 0.0, 8)
    assert tally.reduce() == {"masked": 0.0, "optim/skipped": 0.0}


def test_empty_part_does_not_change_a_mean() -> None:
    tally = Tally()
    tally.add("mismatch/k3", 2.0, 4)
    tally.add("mismatch/k3", 0.0, 0)
    assert tally.reduce() == {"mismatch/k3": 0.5}


def test_misuse_raises() -> None:
    tally = Tally()
    tally.add("policy/kl_ref", 1.0, 2)
    with pytest.raises(ValueError, match="with and without a count"):
        tally.add("policy/kl_ref", 1.0, 0)
    with pytest.raises(ValueError, match="two different ways"):
        tally.max("policy/kl_ref", 1.0)


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 50)), min_size=1, max_size=20), st.randoms())
def test_mean_does_not_depend_on_the_split(pairs: list[tuple[int, int]], dice) -> None:
    whole, parts = Tally(), Tally()
    whole.add("policy/entropy", sum(total for total, _ in pairs), sum(count for _, count in pairs))
    dice.shuffle(pairs)
    for total, count in pairs:
        parts.add("policy/entropy", total, count)
    assert whole.reduce() == parts.reduce()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_and_nested_phases_and_idle_time() -> None:
    tick = Clock()
    clock = Phases(tick)
    tick.now += 1  # idle
    with clock("rollout"):
        tick.now += 2
        with clock("rollout"), clock("reward"):
            tick.now += 3
        tick.now += 1
    with clock("train"):
        tick.now += 4
    tick.now += 0.5  # idle
    expected = {"time/step": 11.5, "time/rollout": 6.0, "time/reward": 3.0, "time/train": 4.0, "time/idle": 1.5}
    assert clock.take() == expected


def test_open_phase_continues_in_the_next_step() -> None:
    tick = Clock()
    clock = Phases(tick)
    with clock("rollout"):
        tick.now += 2
        assert clock.take() == {"time/step": 2.0, "time/rollout": 2.0, "time/idle": 0.0}
        tick.now += 5
    assert clock.take() == {"time/step": 5.0, "time/rollout": 5.0, "time/idle": 0.0}
    assert clock.take() == {"time/step": 0.0, "time/idle": 0.0}


def test_exception_ends_a_phase_and_unknown_phases_raise() -> None:
    clock = Phases()
    with pytest.raises(RuntimeError), clock("train"):
        raise RuntimeError
    with pytest.raises(ValueError, match="unknown phase"), clock("unknown"):
        pass


def test_parallel_phases_of_many_threads_count_once() -> None:
    clock = Phases()
    together = threading.Barrier(8)

    def work() -> None:
        together.wait()
        for _ in range(200):
            with clock("reward"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = clock.take()
    assert 0 < taken["time/reward"] <= taken["time/step"]


def test_throughput() -> None:
    metrics = {"time/rollout": 2.0, "tokens/completion": 100.0, "time/train": 4.0}
    assert throughput(metrics, 600) == {"throughput/rollout_tok_s": 50.0, "throughput/train_tok_s": 150.0}
    assert throughput({"tokens/completion": 100.0, "time/rollout": 0.0}) == {}
