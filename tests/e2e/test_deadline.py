"""A hanging device ends the run with a reason, in bounded time, and leaves no process."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.runs.run_dir import read_status

from .helpers.processes import WarmPython, environment

HANG = "import time\n\n\ndef loss(inputs):\n    time.sleep(300)\n    return -inputs.policy_logprobs\n"


def test_hanging_device_ends_the_run(tmp_path: Path, warm: WarmPython, model: Path) -> None:
    (tmp_path / "hanging_loss.py").write_text(HANG)
    run = tmp_path / "run"
    command = [
        "grpo", f"train.model={model}", f"train.output_dir={run}", "train.max_steps=2",
        "train.sequence_len=256", "train.loss.type=hanging_loss:loss", "orch.env=[{id: arithmetic}]",
        "orch.batch_size=8", "orch.rollouts_per_example=4", "orch.sampling.max_tokens=8", "orch.groups.uniform=keep",
        "orch.deadline_s=5",
    ]  # fmt: skip
    start = time.monotonic()
    done = warm.run(command, tmp_path, env=environment(PYTHONPATH=str(tmp_path)))
    assert done.wait() == 3, done.text()
    assert time.monotonic() - start < 90
    assert "waited 5 s for the device" in done.text()
    status = read_status(run)
    assert status["state"] == "stopped" and status["resumable"] and "forward_backward" in status["reason"]
