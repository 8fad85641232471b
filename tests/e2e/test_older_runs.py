"""Run directories of an earlier version resume: synchronous, asynchronous, and with an adapter.

Version ca3ec84 made the fixtures: each run was killed after step 6 and has a checkpoint of step 4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .helpers.processes import WarmPython

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ca3ec84"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["sync", "async", "lora"])
def test_run_of_an_earlier_version_resumes(kind: str, warm: WarmPython, tmp_path: Path):
    folder = shutil.copytree(FIXTURES, tmp_path / "older")
    run = folder / kind
    before, metrics_before = lines_of(run / "journal.jsonl"), lines_of(run / "metrics.jsonl")
    command = warm.run(["grpo", f"{kind}/config.yaml", "--resume", "train.max_steps=8"], folder)
    assert command.wait() == 0, command.text()
    after, metrics = lines_of(run / "journal.jsonl"), lines_of(run / "metrics.jsonl")
    assert [entry["step"] for entry in after] == list(range(1, 9))
    assert after[:4] == before[:4], "steps before the checkpoint are kept"
    assert {id for entry in after[4:6] for id in entry["rollout_ids"]} == {
        id for entry in before[4:6] for id in entry["rollout_ids"]
    }, "later steps are computed again from the same prompts"
    assert (run / "final").is_dir()
    if kind != "async":  # its groups may be trained in another step
        for then, now in zip(metrics_before[4:6], metrics[4:6], strict=True):
            assert now["reward/mean"] == pytest.approx(then["reward/mean"], abs=1e-6)
            assert now["policy/loss"] == pytest.approx(then["policy/loss"], rel=1e-3, abs=1e-6)
