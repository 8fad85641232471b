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


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (CONFIG.format(planned=1), "to raise a reward"),
        ("train: {model: org/model}\ndataset: {path: d}\n", "to imitate the completions"),
        ("train: {model: org/model}\ndataset: {path: d}\nloss: {type: ipo}\n", "to prefer the chosen"),
    ],
)
def test_limits_are_those_of_the_training(tmp_path: Path, config: str, limit: str):
    with RunDir.create(tmp_path / "run", config, {}) as run_dir:
        run_dir.write_status("finished", step=1, reason="", resumable=False, next_command=None)
    (line,) = [
        line for line in model_card(Weights("org/model", None, tmp_path / "run")).splitlines() if "trained to" in line
    ]
    assert line.startswith(f"The model was trained {limit}")


def test_preference_run_is_named_by_its_loss(tmp_path: Path):
    config = "train: {model: org/model}\ndataset: {path: d}\nloss: {type: ipo}\n"
    with RunDir.create(tmp_path / "run", config, {}) as run_dir:
        run_dir.write_status("finished", step=1, reason="", resumable=False, next_command=None)
    card = model_card(Weights("org/model", None, tmp_path / "run"))
    assert "with Shoal, DPO with the loss ipo." in card and "- dpo" in card


@pytest.mark.parametrize(
    ("loss", "advantage", "name"),
    [
        ("type: grpo", "std: group", "GRPO."),
        ("type: dapo", "std: group", "DAPO."),
        ("{type: grpo, aggregation: seq-mean-token-sum-norm}", "std: none", "Dr. GRPO."),
        ("type: masked", "std: none", "policy gradient with the loss `masked` with group-relative advantages."),
        ("type: grpo", "{std: group, leave_one_out: true}", "GRPO with leave-one-out advantages."),
        (
            "type: 'mine:loss'",
            "std: group",
            "policy gradient with the loss `mine:loss` with group-relative advantages.",
        ),
    ],
)
def test_algorithm_is_named_by_its_loss_and_advantages(tmp_path: Path, loss: str, advantage: str, name: str):
    sections = [text if text.startswith("{") else f"{{{text}}}" for text in (loss, advantage)]
    config = (
        CONFIG.format(planned=1)
        .replace("{type: grpo}", sections[0])
        .replace("orch: {", f"orch: {{advantage: {sections[1]}, ")
    )
    with RunDir.create(tmp_path / "run", config, {}) as run_dir:
        run_dir.write_status("finished", step=1, reason="", resumable=False, next_command=None)
    card = model_card(Weights("org/model", None, tmp_path / "run"))
    assert f"Trained from `org/model` with Shoal, {name}" in card
    assert ("- grpo" in card) == ("type: grpo" in loss)
