"""Every benchmark script runs with the tiny model on the CPU and the real engine, trainer and command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "rollout": ["--generate", "--eager"],
    "mixed": [],
    "train": [],
    "growth": [],
    "grpo_step": [],
}


def smoke(name: str, folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """The result that a script writes."""
    out = folder / f"{name}.json"
    command = [sys.executable, f"benchmarks/{name}.py", str(out), "--smoke", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text("utf-8"))


@pytest.mark.slow
def test_two_trees_are_compared(tmp_path: Path):
    found = smoke("before_after", tmp_path, "--before", ".", "--scripts", "train", "--rounds", "1", OMP_NUM_THREADS="1")
    assert found["rows"] and all(row["before"] > 0 and row["after"] > 0 for row in found["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, tmp_path: Path):
    found = smoke(name, tmp_path, *SCRIPTS[name], OMP_NUM_THREADS="1")
    assert found["smoke"] and found["rows"] and min(found["rates"].values()) > 0
    for row in found["rows"]:
        assert row["fraction"] > 0
        rate = row.get("tokens_per_s") or row["rollout_tokens_per_s"]
        assert rate > 0
    if name == "rollout":
        first = found["rows"][0]
        assert first["generate_ratio"] == pytest.approx(first["tokens_per_s"] / first["generate_tokens_per_s"])
        assert first["parity_graphs_eager"]["mean_logprob_gap"] < 1e-4
    if name == "grpo_step":
        assert [row["name"] for row in found["rows"]] == ["tiny", "tiny-shape"]
        for row in found["rows"]:
            assert row["prompt_tokens"] == 64 and len(row["steps"]) == 4
            assert 0 < row["step_s"] < row["first_step_s"]["warm"]


@pytest.mark.slow
def test_without_a_gpu_a_benchmark_says_what_to_do(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "benchmarks/mixed.py", str(tmp_path / "out.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode != 0 and "--smoke" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asynchronous", "many_rollouts"])
def test_scheduling_is_measured(name: str, tmp_path: Path):
    rows = smoke(name, tmp_path)["rows"]
    if name == "many_rollouts":
        assert all(row["most_at_once"] == 200 and row["own_ms_a_rollout"] > 0 for row in rows)
        return
    layouts = [row["layout"] for row in rows]
    assert layouts == ["simulated"] * 6 + ["engine process"] * 3 + ["co-located"] * 3
    assert all(row["rollouts_per_s"] > 0 for row in rows)
    assert all(row["of_predicted"] > 0 for row in rows if row["layout"] == "engine process")


@pytest.mark.slow
def test_kills_are_counted(tmp_path: Path):
    found = smoke("kills", tmp_path)
    assert len(found["rows"]) == 7 and found["kills"] >= 4 and found["failed"] == 0


@pytest.mark.slow
def test_kills_are_added_to_earlier_ones(tmp_path: Path):
    earlier = smoke("kills", tmp_path, "--kinds", "moments", "--minutes", "0")
    assert [row["runs"] for row in earlier["rows"]] == [0]
    earlier["rows"][0] |= {"runs": 1, "kills": 3}
    (tmp_path / "kills.json").write_text(json.dumps(earlier))
    later = smoke("kills", tmp_path, "--kinds", "moments", "--add")
    assert [row["runs"] for row in later["rows"]] == [1, 1, 1, 1] and later["rows"][0] == earlier["rows"][0]
    assert later["kills"] == sum(row["kills"] for row in later["rows"]) >= 4


@pytest.mark.slow
def test_kill_during_a_save_is_counted(tmp_path: Path):
    found = smoke("gpu_kills", tmp_path)
    (row,) = found["rows"]
    assert found["kills"] == 1 and found["failed"] == 0
    assert row["resumed_from"] <= row["last_step"] <= found["steps"] and found["undisturbed"]["save_s"] > 0


@pytest.mark.slow
def test_quickstart_is_timed(tmp_path: Path):
    (row,) = smoke("quickstart", tmp_path)["rows"]
    assert row["steps"] == 2 and row["supervised_step_s"] > 0 and 0 < row["step_s"] < row["seconds"]


@pytest.mark.slow
def test_server_under_attack_answers_its_clients(tmp_path: Path):
    quiet, attacked = smoke("soak", tmp_path, "--only", "server", OMP_NUM_THREADS="1")["rows"]
    assert quiet["answers"] and attacked["answers"] and attacked["attacks"]
    assert not quiet["wrong"] + quiet["lost"] + attacked["wrong"] + attacked["lost"] + len(attacked["unexpected"])
