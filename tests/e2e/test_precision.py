"""The real command on quantised bases and with 8-bit moments: it trains, is killed, and resumes bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .helpers.runs import Run, assert_same_run, fingerprint

NewRun = Callable[..., Run]
STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    "qlora_fp8": {"lora": True, "qlora_fp8": True},
    "qlora_fp4": {"lora": True, "qlora_fp4": True, "noise_scheduler": {"enabled": True, "num_stages": 2}},
    "qlora_bnb with adamw_8bit": {"lora": True, "lora_rank": 64, "qlora_bnb": True, "optimizer": "adamw_8bit"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed(case: str, new_run: NewRun) -> None:
    if "bnb" in case or "8bit" in case:
        pytest.importorskip("bitsandbytes", reason="an extra")
    train = {"max_steps": STEPS, "learning_rate": 1e-3, **CASES[case]}
    orch = {"batch_size": 8}
    undisturbed = new_run("undisturbed", train=train, orch=orch)
    command = undisturbed.grpo()
    assert command.wait() == 0, command.text()
    mismatch = [step["mismatch/k3"] for step in undisturbed.steps() if step.get("noise/sigma", 0) == 0]
    assert mismatch and all(0 <= value < 1e-8 for value in mismatch), "the sampler reads the weights of the trainer"
    killed = new_run("killed", train=train, orch=orch)
    assert killed.start(kill_at=("appended:journal.jsonl", 3)).wait() == -9
    command = killed.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_same_run(killed, fingerprint(undisturbed))


def test_exported_adapter_names_the_base_without_its_quantization(new_run: NewRun) -> None:
    run = new_run(train={"max_steps": 1, "lora": True, "qlora_fp4": True}, orch={"batch_size": 8})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    config = json.loads((run.path / "final" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] and "quant" not in json.dumps(config).lower().replace("loftq", "")
