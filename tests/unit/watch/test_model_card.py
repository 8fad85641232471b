"""The model card states for how many steps the weights were trained, not how many were planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runs.run_dir import RunDir
from shoal.runs.weight_files import Weights
from shoal.watch.report.model_card import model_card

CONFIG = """
train: {{model: org/model, max_steps: {planned}, learning_rate: 0.001, loss: {{type: grpo}}}}
orch: {{env: [{{id: arithmetic}}], batch_size: 64, rollouts_per_example: 16, sampling: {{max_tokens: 16}}}}
"""


@pytest.mark.parametrize(
    ("planned", "weights", "steps"),
    [
        (60, "checkpoints/step_000040/weights", "40 of 60"),
        (60, "final", "54 of 60"),  # a run that a stop rule ended
        (54, "final", "54"),
        ("null", "final", "54"),  # planned in epochs
    ],
)
def test_steps_are_those_of_the_weights(tmp_path: Path, planned: object, weights: str, steps: str):
    run = tmp_path / "run"
    with RunDir.create(run, CONFIG.format(planned=planned), {}) as run_dir:
        run_dir.write_status("solved", step=54, reason="solved after step 54", resumable=False, next_command=None)
    assert f"| Steps | {steps} |" in model_card(Weights(str(run / weights), None, run)).splitlines()
    assert f"| Steps | {steps} |" in model_card(Weights("org/model", str(run / weights), run)).splitlines()
