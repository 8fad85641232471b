"""The start order of a run: reward workers fork before torch is imported and before the directory is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from shoal.cli import main
from shoal.rewards.pool import RewardPool

folder, arguments = Path(sys.argv[1]), sys.argv[2:]

def start(pool):
    print(json.dumps({"torch": "torch" in sys.modules, "directory": folder.exists()}))
    raise SystemExit(7)

RewardPool.start = start
sys.exit(main(arguments))
"""


@pytest.mark.parametrize("verb", ["grpo", "eval"])
def test_reward_workers_fork_before_torch_is_imported(tmp_path: Path, verb: str):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = tmp_path / "run"
    arguments = {
        "grpo": [
            f"train.model={tmp_path / 'model'}", f"train.output_dir={run}", "train.max_steps=1",
            "orch.env=[{id: arithmetic}]", "orch.batch_size=8", "orch.rollouts_per_example=4",
        ],
        "eval": [str(tmp_path / "model"), "--env", "arithmetic"],
    }[verb]  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(run), verb, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 7, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == {"torch": False, "directory": False}
