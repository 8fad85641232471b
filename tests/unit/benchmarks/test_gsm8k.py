"""The configurations of the GSM8K experiment are valid, and its environment gives a hint after a wrong answer only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.config.load import load_run
from shoal.config.rules import check_run
from shoal.envs.user_code import load_object
from support.pages import ROOT

EXPERIMENT = ROOT / "experiments" / "gsm8k"


@pytest.mark.parametrize("name", ["grpo", "distil", "self_distil"])
def test_configuration_is_valid(name: str) -> None:
    teacher = ["train.teacher.model=m"] if name == "distil" else []
    overrides = ["train.model=m", "orch.env=gsm8k", *teacher]
    found = load_run(str(EXPERIMENT / f"{name}.yaml"), overrides=overrides).config
    assert not check_run(found).errors


def test_hint_is_the_worked_solution(tmp_path: Path) -> None:
    row = json.dumps({"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{row}\n")
    environment = load_object(f"{EXPERIMENT / 'hinted.py'}:Hinted")(path=str(tmp_path))
    (task,) = environment.tasks("train")
    right, wrong = (environment.reward(task, [{"role": "assistant", "content": f"\\boxed{{{n}}}"}]) for n in (4, 5))
    assert (right.total, right.hint) == (1.0, None)
    assert wrong.total == 0.0 and "2 + 2 = 4" in wrong.hint
