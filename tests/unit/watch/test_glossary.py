"""The glossary: names, entries, search, and agreement with the metrics that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal
from shoal.core.metrics import SUMMED
from shoal.runs.run_dir import read_metrics
from shoal.watch.glossary import CATALOGUE, FAMILIES, checked_metrics, find_metric, nearest_metrics, sort_metrics
from shoal.watch.observer import PHASES, Sinks

OLD_RUNS = Path(__file__).parents[2] / "fixtures/ca3ec84"
PACKAGES_THAT_MEASURE = ("signals", "build", "core", "rollout", "trainer")
# Names that the code assembles from parts.
BUILT_NAMES = {
    'f"reward/p{share}"': ("reward/p10", "reward/p50", "reward/p90"),
    'f"time/{phase}"': tuple(f"time/{phase}" for phase in PHASES),
    'f"reward/part/{name}"': ("reward/part/<name>",),
    'f"reward/env/{name}"': ("reward/env/<env>",),
    'f"batch/env/{name}"': ("batch/env/<env>",),
    'f"group/env/{name}"': ("group/env/<env>",),
    'f"completion/env/{name}"': ("completion/env/<env>",),
    'f"eval/{name}/{key}"': tuple(name for name in FAMILIES if name.startswith("eval/")),
}


def measuring_source() -> str:
    source = Path(shoal.__file__).parent
    files = [file for name in PACKAGES_THAT_MEASURE for file in (source / name).rglob("*.py")]
    return "\n".join(file.read_text() for file in [*files, source / "watch" / "observer.py"])


def test_names_follow_the_pattern_area_quantity_stat() -> None:
    pattern = re.compile(r"[a-z]+(/(<\w+>|[a-z][a-z0-9_]*)){1,2}")
    assert [name for name in [*CATALOGUE, *FAMILIES] if not pattern.fullmatch(name)] == ["masked"]


@pytest.mark.parametrize("run", ["sync", "async", "lora"])
def test_every_metric_of_an_old_run_is_still_in_the_glossary(run: str) -> None:
    names = {name for record in read_metrics(OLD_RUNS / run) for name in record} - {"step"}
    assert len(names) > 30
    assert [name for name in sorted(names) if find_metric(name) is None] == []


def test_every_metric_in_the_glossary_is_measured() -> None:
    text = measuring_source()
    found = {name for name in CATALOGUE if f'"{name}"' in text}
    found |= {name for built, names in BUILT_NAMES.items() if built in text for name in names}
    assert {*CATALOGUE, *FAMILIES} - found == set()
    keys = ("error_frac", "mean", "std", "pass_at_k", "length_mean", "truncated_frac")
    assert {name.split("/")[-1] for name in FAMILIES if name.startswith("eval/")} == set(keys)


def test_every_measured_metric_is_in_the_glossary() -> None:
    areas = "|".join(sorted({name.split("/")[0] for name in CATALOGUE if "/" in name}))
    names = set(re.findall(rf'"((?:{areas})/[a-z0-9_]+)"', measuring_source()))
    assert len(names) > 40
    assert [name for name in sorted(names) if find_metric(name) is None] == []


def test_meanings_are_sentences() -> None:
    for metric in [*CATALOGUE.values(), *FAMILIES.values()]:
        assert metric.meaning.endswith(".") and not metric.meaning[0].islower(), metric.name


def test_important_metrics_have_a_healthy_range_and_a_remedy() -> None:
    for name in ("masked", "mismatch/k3", "completion/truncated_frac", "group/all_bad_frac", "policy/entropy"):
        assert CATALOGUE[name].healthy and CATALOGUE[name].change


def test_metrics_outside_the_glossary_raise() -> None:
    class Store:
        def __init__(self) -> None:
            self.written: list[list[str]] = []

        def append_metrics(self, step, metrics) -> None:
            self.written.append(list(metrics))

        amend_metrics = append_metrics

    sinks = Sinks(store := Store())
    for write in (sinks.log, sinks.amend):
        with pytest.raises(ValueError, match="did you mean reward/mean"):
            write(1, {"optim/lr": 0.1, "reward/meen": 1.0})
        write(1, {"eval/_my.env/mean": 1.0, "optim/lr": 0.1, "reward/mean": 1.0})
    assert store.written == [["reward/mean", "optim/lr", "eval/_my.env/mean"]] * 2
    assert checked_metrics({}) == {}


def test_summed_metrics_are_in_the_glossary() -> None:
    assert set(CATALOGUE) > SUMMED


def test_nearest_names() -> None:
    assert nearest_metrics("ratio_max")[:2] == ["policy/ratio_max", "mismatch/ratio_max"]
    assert nearest_metrics("reward/meen")[0] == "reward/mean"


def test_names_of_families_match() -> None:
    assert find_metric("eval/reverse-text/mean") is FAMILIES["eval/<env>/mean"]
    assert find_metric("eval/reasoning-gym:chain_sum/mean") is not None
    assert find_metric("reward/part/format") is not None
    assert find_metric("eval/a/b/mean") is None
    assert find_metric("reward/part/") is None


def test_order_is_that_of_the_glossary() -> None:
    assert list(sort_metrics({"time/step": 1, "eval/a/mean": 1, "reward/mean": 1, "custom/z": 1})) == [
        "reward/mean",
        "time/step",
        "custom/z",
        "eval/a/mean",
    ]
