"""Catalogue, tally and phases, with numbers one can check by hand."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observability import metrics as metrics_module
from shoal.observability.catalogue import CATALOGUE, FAMILIES, find_metric, nearest_metrics, sort_metrics
from shoal.observability.metrics import Tally
from shoal.observability.spans import Phases, throughput

NAMED_IN_THE_DESIGN = [
    "reward/mean",
    "reward/std",
    "reward/raw_mean",
    "reward/error_frac",
    "reward/timeout_frac",
    "group/mixed_frac",
    "group/all_good_frac",
    "group/all_bad_frac",
    "policy/loss",
    "policy/entropy",
    "policy/kl_ref",
    "mismatch/k3",
    "mismatch/ratio_mean",
    "mask/token_frac",
    "mask/sequence_frac",
    "masked",
    "optim/lr",
    "optim/grad_norm",
    "optim/skipped",
    "tokens/prompt",
    "tokens/completion",
    "completion/length_mean",
    "completion/truncated_frac",
    "staleness/mean",
    "staleness/max",
    "time/step",
    "time/rollout",
    "time/reward",
    "time/train",
    "time/sync",
    "time/idle",
    "throughput/rollout_tok_s",
    "throughput/train_tok_s",
    "noise/sigma",
    "eval/<env>/mean",
]


def test_every_name_of_the_design_is_in_the_catalogue() -> None:
    assert [name for name in NAMED_IN_THE_DESIGN if name not in CATALOGUE and name not in FAMILIES] == []


@pytest.mark.shared
@pytest.mark.skipif("SHOAL_SHARED" not in os.environ, reason="SHOAL_SHARED is not set")
def test_the_list_above_is_the_design_documents() -> None:
    text = (Path(os.environ["SHOAL_SHARED"]) / "design/architecture.md").read_text()
    block = text[text.index("Metric names,") : text.index("A metric that does not apply")]
    quoted = " ".join(re.findall(r"`([^`]*)`", block)).split()
    assert [name for name in quoted if name != "area/quantity[/stat]"] == NAMED_IN_THE_DESIGN


def test_catalogue_entries_are_one_sentence_each() -> None:
    for metric in [*CATALOGUE.values(), *FAMILIES.values()]:
        assert metric.meaning.endswith(".") and metric.meaning[0].isupper(), metric.name


# Names that are put together where they are measured.
PUT_TOGETHER = {
    'f"reward/p{share}"': ("reward/p10", "reward/p50", "reward/p90"),
    'f"time/{phase}"': ("time/rollout", "time/reward", "time/train", "time/sync", "time/eval", "time/save"),
    'f"reward/part/{name}"': ("reward/part/<name>",),
    'f"reward/env/{name}"': ("reward/env/<env>",),
    'f"group/env/{name}"': ("group/env/<env>",),
    'f"completion/env/{name}"': ("completion/env/<env>",),
    'f"eval/{name}/{key}"': tuple(name for name in FAMILIES if name.startswith("eval/")),
}


def test_everything_in_the_glossary_is_measured_somewhere() -> None:
    source = Path(metrics_module.__file__).parents[1]
    rooms = ("algorithms", "orchestrator", "trainer", "observability/spans.py")
    files = [
        file for room in rooms for file in ([source / room] if room.endswith(".py") else (source / room).rglob("*.py"))
    ]
    text = "\n".join(file.read_text() for file in files)
    found = {name for name in CATALOGUE if f'"{name}"' in text}
    found |= {name for how, names in PUT_TOGETHER.items() if how in text for name in names}
    assert {*CATALOGUE, *FAMILIES} - found == set()
    keys = ("error_frac", "mean", "std", "pass_at_k", "length_mean", "truncated_frac")
    assert {name.split("/")[-1] for name in FAMILIES if name.startswith("eval/")} == set(keys)


def test_what_is_unhealthy_has_a_remedy() -> None:
    for name in ("masked", "mismatch/k3", "completion/truncated_frac", "group/all_bad_frac", "policy/entropy"):
        assert CATALOGUE[name].healthy and CATALOGUE[name].change


def test_nearest_names() -> None:
    assert nearest_metrics("ratio_max")[:2] == ["policy/ratio_max", "mismatch/ratio_max"]
    assert nearest_metrics("reward/meen")[0] == "reward/mean"


def test_families_match_and_others_do_not() -> None:
    assert find_metric("eval/reverse-text/mean") is FAMILIES["eval/<env>/mean"]
    assert find_metric("eval/reasoning-gym:chain_sum/mean") is not None
    assert find_metric("reward/part/format") is not None
    assert find_metric("eval/a/b/mean") is None
    assert find_metric("reward/part/") is None


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


def test_an_empty_part_does_not_disturb_a_mean() -> None:
    tally = Tally()
    tally.add("mismatch/k3", 2.0, 4)
    tally.add("mismatch/k3", 0.0, 0)
    assert tally.reduce() == {"mismatch/k3": 0.5}


def test_misuse_is_refused() -> None:
    tally = Tally()
    with pytest.raises(ValueError, match="did you mean reward/mean"):
        tally.value("reward/meen", 1.0)
    tally.add("policy/kl_ref", 1.0, 2)
    with pytest.raises(ValueError, match="once with a count and once without"):
        tally.add("policy/kl_ref", 1.0, 0)
    with pytest.raises(ValueError, match="two different ways"):
        tally.max("policy/kl_ref", 1.0)


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 50)), min_size=1, max_size=20), st.randoms())
def test_any_split_reduces_to_the_same_mean(pairs: list[tuple[int, int]], dice) -> None:
    whole, parts = Tally(), Tally()
    whole.add("policy/entropy", sum(total for total, _ in pairs), sum(count for _, count in pairs))
    dice.shuffle(pairs)
    for total, count in pairs:
        parts.add("policy/entropy", total, count)
    assert whole.reduce() == parts.reduce()


def test_order_is_the_catalogues() -> None:
    assert list(sort_metrics({"time/step": 1, "eval/a/mean": 1, "reward/mean": 1, "custom/z": 1})) == [
        "reward/mean",
        "time/step",
        "custom/z",
        "eval/a/mean",
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_overlap_nest_and_leave_idle() -> None:
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


def test_open_phase_goes_on_into_the_next_window() -> None:
    tick = Clock()
    clock = Phases(tick)
    with clock("rollout"):
        tick.now += 2
        assert clock.take() == {"time/step": 2.0, "time/rollout": 2.0, "time/idle": 0.0}
        tick.now += 5
    assert clock.take() == {"time/step": 5.0, "time/rollout": 5.0, "time/idle": 0.0}
    assert clock.take() == {"time/step": 0.0, "time/idle": 0.0}


def test_phase_ends_with_an_exception_and_unknown_ones_are_refused() -> None:
    clock = Phases()
    with pytest.raises(RuntimeError), clock("train"):
        raise RuntimeError
    with pytest.raises(ValueError, match="unknown phase"), clock("lunch"):
        pass


def test_phases_of_many_threads_count_once() -> None:
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
