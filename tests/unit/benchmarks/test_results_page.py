"""docs/results.md is up to date, and the recorded ablations belong to the committed arms."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from shoal.build.load import load
from shoal.config.load import load_run

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks" / "results"
EXPERIMENT = ROOT / "experiments" / "ablations"
FILES = (
    "ablations_cpu",
    "peers_cpu",
    "demo_cpu",
    "tutorial_cpu",
    "smollm2_arithmetic_h200",
    "smollm2_arithmetic_graphs_h200",
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("results_page")


@pytest.fixture
def tables(script: ModuleType) -> ModuleType:
    return importlib.import_module("ablations_tables")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def run(arm: str, seed: int, *rewards: float) -> dict[str, Any]:
    held_out = {str(8 * n): value for n, value in enumerate(rewards)}
    return {"arm": arm, "seed": seed, "held_out": held_out, "rollouts_mean": 64.0, "cpu_seconds": 1.0}


def test_page_is_up_to_date(script: ModuleType):
    written = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert written == script.page(RECORDED), "run python benchmarks/results_page.py"


def test_missing_file_gives_no_figure(script: ModuleType, tmp_path: Path):
    unrecorded = sum(not (RECORDED / f"{section[1]}.json").exists() for section in script.SECTIONS)
    assert script.page(tmp_path).count("Not measured yet: ") == len(script.SECTIONS) == len(FILES) + unrecorded
    for missing in FILES:
        folder = tmp_path / missing
        folder.mkdir()
        for name in FILES:
            if name != missing:
                shutil.copy(RECORDED / f"{name}.json", folder)
        page = script.page(folder)
        assert page.count("Not measured yet: ") == 1 + unrecorded
        assert f"{missing}.json" not in page


def test_recorded_ablations_belong_to_the_committed_configuration():
    found = json.loads((RECORDED / "ablations_cpu.json").read_text("utf-8"))
    for key, file in {"config": "config.yaml", "warm_up": "warm_up.yaml", "arms": "arms.yaml"}.items():
        assert found[key] == read(EXPERIMENT / file), f"{file} was changed after the measurement"
    arms = {name for group in found["arms"].values() for name in group} | {"base"}
    pairs = [(line["arm"], line["seed"]) for line in found["runs"]]
    assert len(pairs) == len(set(pairs)) and {arm for arm, _ in pairs} <= arms


def test_every_arm_is_valid_and_changes_the_run(tmp_path: Path):
    config = read(EXPERIMENT / "config.yaml")
    config["train"] |= {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")}
    config["orch"]["env"] = [{"id": f"{EXPERIMENT / 'task.py'}:ExactReverse"}]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    base = load(load_run(str(file))).config
    seen = [base]
    for group in read(EXPERIMENT / "arms.yaml").values():
        for name, keys in group.items():
            arm = load(load_run(str(file), overrides=keys)).config
            assert arm not in seen, f"{name} is the same run as another arm"
            seen.append(arm)
    assert len(seen) > 30


def test_differences_are_paired_by_seed(tables: ModuleType):
    runs = [run("base", 1, 0.9, 0.1, 0.3), run("base", 2, 0.9, 0.5, 0.7)]
    runs += [run("skip", 1, 0.0, 0.2, 0.4), run("skip", 2, 0.0, 0.6, 0.8), run("keep", 2, 0.0, 0.4, 0.4)]
    base, skip, keep = tables.rows({"arms": {"replacement": {"skip": [], "keep": []}}, "runs": runs})
    assert base.difference is None
    assert skip.difference.mean == pytest.approx(0.1)  # the start does not count
    assert skip.difference.half == pytest.approx(0.0, abs=1e-9)
    assert skip.difference.excludes_zero
    assert keep.difference.mean == pytest.approx(-0.2)
    assert math.isinf(keep.difference.half) and not keep.difference.excludes_zero


def test_failed_run_is_excluded_from_the_means(tables: ModuleType):
    runs = [run("base", 1, 0.0, 0.5), {"arm": "skip", "seed": 1, "error": "out of memory"}]
    (row,) = tables.rows({"arms": {"replacement": {"skip": []}}, "runs": runs})
    assert row.name == "base"


def test_interval_uses_students_t(tables: ModuleType):
    found = tables.interval([1.0, 2.0, 3.0])  # standard deviation 1, two degrees of freedom
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))


def test_steps_to_the_threshold(tables: ModuleType):
    assert tables.steps_to_threshold(run("base", 1, 0.1, 0.24, 0.26, 0.2)) == 16
    assert tables.steps_to_threshold(run("base", 1, 0.1, 0.2)) is None
