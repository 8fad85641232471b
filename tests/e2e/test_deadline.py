"""A device that hangs ends the run with its reason, in bounded time, with nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from shoal.observability.run_dir import read_status

HANG = "import time\n\n\ndef loss(inputs):\n    time.sleep(300)\n    return -inputs.policy_logprobs\n"


def test_a_hanging_device_ends_the_run(tmp_path: Path, model: Path) -> None:
    (tmp_path / "hanging_loss.py").write_text(HANG)
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "shoal", "grpo", f"train.model={model}", f"train.output_dir={run}", "train.max_steps=2",
        "train.sequence_len=256", "train.loss.type=hanging_loss:loss", "orch.env=[{id: arithmetic}]",
        "orch.batch_size=8", "orch.rollouts_per_example=4", "orch.sampling.max_tokens=8", "orch.groups.uniform=keep",
        "orch.deadline_s=5",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - start < 90
    assert "waited 5 s for the device" in done.stderr
    status = read_status(run)
    assert status["state"] == "stopped" and status["resumable"] and "forward_backward" in status["reason"]
