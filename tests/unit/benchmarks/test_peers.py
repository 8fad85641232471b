"""The comparison with other systems: settings, the measurement of processes, and the figures made from it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT

MODULES = ("compare", "processes", "install", "machine", "readme_tables", "results_page", "ablations_tables",
           "performance_tables")  # fmt: skip


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import compare

    yield compare
    for name in MODULES:
        sys.modules.pop(name, None)


def run_of(setting: str, rewards: dict[int, float], cpu_per_step: float, system: str = "trl") -> dict[str, Any]:
    marks = {step: [2.0 * step, cpu_per_step * step] for step in rewards}
    return {"system": system, "setting": setting, "seed": 1, "held_out": rewards, "marks": marks}


def test_each_system_has_at_least_six_settings(compare: Any):
    profiles = [compare.read_profile(name) for name in ("cpu", "h200")]
    assert [list(profile["systems"]) for profile in profiles] == [
        ["trl", "shoal"],
        ["trl", "trl-continuous-batching", "trl-vllm", "shoal"],
    ]
    for profile in profiles:
        sizes = {kind: len(system["settings"]) for kind, system in profile["systems"].items()}
        assert min(sizes["trl"], sizes["shoal"]) >= 6 and min(sizes.values()) >= 5
    inherited = profiles[1]["systems"]["trl-vllm"]
    assert inherited["common"]["use_vllm"] and inherited["common"]["loss_type"] == "dapo"
    assert not any("static" in name for name in inherited["settings"])


@pytest.mark.parametrize("profile", ["cpu", "h200"])
def test_shoal_accepts_its_settings(compare: Any, profile: str, tmp_path: Path):
    from shoal.config.load import load_run
    from shoal.config.rules import check_run

    found = compare.read_profile(profile)
    system = found["systems"]["shoal"]
    for name in system["settings"]:
        words = compare.shoal_command(found, system, name, Path("shape:tiny"), tmp_path, 1)
        loaded = load_run(overrides=words[words.index("grpo") + 1 :])
        check_run(loaded.config).raise_errors(loaded.origins)
        assert loaded.config.orch.batch_size == 128 and loaded.config.orch.rollouts_per_example == 8


def test_systems_take_turns(compare: Any):
    systems = {"a": {"settings": {"1": {}, "2": {}, "3": {}}}, "b": {"settings": {"1": {}, "2": {}}}}
    assert list(compare.interleaved(systems)) == [("a", "1"), ("b", "1"), ("a", "2"), ("b", "2"), ("a", "3")]


def test_the_time_to_a_target_is_that_of_the_first_checkpoint_that_reaches_it(compare: Any):
    run = run_of("one", {4: 0.5, 8: 0.85, 12: 0.8, 16: 0.95}, 1.5)
    assert compare.times_to(run, [0.8, 0.9, 0.99]) == {"0.8": [16.0, 12.0], "0.9": [32.0, 24.0], "0.99": None}


def test_the_best_setting_reaches_the_highest_target_in_the_least_time(compare: Any):
    targets = [0.8, 0.9]
    fast = run_of("fast, but lower", {4: 0.85, 8: 0.85}, 0.1)
    early = run_of("fewer steps", {4: 0.9, 8: 0.9}, 3.0)
    cheap = run_of("cheaper steps", {4: 0.8, 8: 0.9}, 1.0)
    runs = [run | {"to": compare.times_to(run, targets)} for run in (fast, early, cheap)]
    failed = {"system": "trl", "setting": "failed", "seed": 1, "error": "ended with 1", "to": {}}
    assert compare.best_setting([*runs, failed], "trl", 1, targets) == "cheaper steps"
    assert compare.best_setting(runs, "trl", 1, targets, "wall") == "fewer steps"
    assert compare.best_setting(runs[:1], "trl", 1, targets) == "fast, but lower"
    assert compare.best_setting(runs, "shoal", 1, targets) is None


def test_trl_steps_are_differences_of_sums(compare: Any, tmp_path: Path):
    file = tmp_path / "steps.jsonl"
    spent = ('{"rollout": 1.0, "reward": 0.1, "train": 2.0, "save": 0.0}',
             '{"rollout": 1.5, "reward": 0.2, "train": 3.0, "save": 0.25}')  # fmt: skip
    lines = [f'{{"step": {at + 1}, "time": {10 + 2 * at}, "tokens": {100 * (at + 1)}, "spent": {text}}}'
             for at, text in enumerate(spent)]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    first, second = compare.trl_steps(file)
    assert first["step_s"] == pytest.approx(3.1) and first["tokens"] == 100
    assert second["step_s"] == 2 and second["rollout"] == 0.5 and second["save"] == 0.25 and second["tokens"] == 100


def test_processes_are_measured_with_their_children(compare: Any, tmp_path: Path):
    lines = tmp_path / "lines"
    child = "x = 0\nfor i in range(6_000_000): x += i\nheld = bytearray(50_000_000)\nimport time; time.sleep(1)"
    parent = (
        f"import subprocess, sys, time\nopen({str(lines)!r}, 'a').write('1\\n')\ntime.sleep(0.5)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\nopen({str(lines)!r}, 'a').write('2\\n')\ntime.sleep(0.5)"
    )
    found = compare.measure([sys.executable, "-c", parent], tmp_path / "log", lines, os.environ, limit_s=60)
    assert found.code == 0 and len(found.marks) == 2
    assert found.marks[1][1] - found.marks[0][1] > 0.1, "the CPU time of the child"
    assert found.peak_bytes > 40_000_000


def test_a_run_that_takes_too_long_is_ended(compare: Any, tmp_path: Path):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    found = compare.measure(command, tmp_path / "log", tmp_path / "none", os.environ, limit_s=0.3)
    assert found.code == -9 and found.seconds < 30 and not found.marks


def recorded(compare: Any) -> dict[str, Any]:
    """A result as compare.py writes it: two seeds of the best settings, one failed run."""
    profile = compare.read_profile("cpu")
    runs = []
    for system, setting, seed, cpu in (
        ("shoal", "learning rate 2e-4", 1, 1.0),
        ("shoal", "learning rate 2e-4", 2, 3.0),
        ("trl", "learning rate 4e-4", 1, 4.0),
        ("trl", "learning rate 1e-4", 1, 5.0),
    ):
        run = run_of(setting, {4: 0.85, 8: 0.95}, cpu, system) | {"seed": seed}
        run |= {"step_s": 2.0, "phases_s": {"rollout": 1.0, "reward": 0.25, "train": 0.5}, "step_cpu_s": 0.5}
        run |= {"first_step_cpu_s": cpu + 1, "peak_mib": 400, "rollout_tokens_per_s": 1500}
        runs.append(run | {"to": compare.times_to(run, profile["targets"])})
    runs.append({"system": "trl", "setting": "static cache", "seed": 1, "error": "ended with 1: reason", "to": {}})
    best = {system: compare.best_setting(runs, system, 1, profile["targets"]) for system in profile["systems"]}
    machine = {"cores": 2, "python": "3.11", "date": "2026-11-19"}
    return {"profile": profile, "runs": runs, "best": best, "versions": {"trl": "1.16.0"}, "start_reward": 0.5,
            "machine": machine, "command": "python benchmarks/compare.py out.json", "note": None}  # fmt: skip


def test_pages_show_a_recorded_result(compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme_tables
    import results_page

    result = recorded(compare)
    assert result["best"] == {"trl": "learning rate 4e-4", "shoal": "learning rate 2e-4"}
    page = "\n\n".join(results_page.peers(result))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert ["TRL", "**learning rate 4e-4**", "1", ".950", "16", "16", "32", "0.50", "5.0", "400 MiB"] in rows
    assert ["TRL", "static cache", "1", "failed", "", "", "", "", "", ""] in rows
    assert "ended with 1: reason" in page

    (tmp_path / "peers_cpu.json").write_text(json.dumps(result))
    table = readme_tables.comparison(tmp_path)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    (times,) = [row for row in rows if "held-out reward of .85" in row[0]]
    assert (
        "[8 CPU s (2 of 2 seeds)]" in times[1] and "[16 CPU s (1 of 1 seeds)]" in times[2] and times[3:] == ["", "", ""]
    )
    (tmp_path / "peers_cpu.json").unlink()
    assert "held-out reward of .85" not in readme_tables.comparison(tmp_path)
