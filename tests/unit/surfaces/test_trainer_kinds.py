"""Arguments of the wrong kind: one line that names the argument, and a script that ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ArgumentError
from shoal.grpo_trainer import GRPOTrainer

ROWS = [{"prompt": "a"}] * 4


def judge(completion: str, **_: Any) -> float:
    return 1.0


ORDER = "the order is GRPOTrainer(model, train_dataset, reward_funcs)"
WRONG: dict[str, tuple[tuple, dict[str, Any], str]] = {
    "model and data swapped": ((ROWS, "m", judge), {}, f"model: is a list, not a model; {ORDER}"),
    "data and reward swapped": (("m", judge, ROWS), {}, f"train_dataset: is a function, not items; {ORDER}"),
    "reward and model swapped": ((judge, ROWS, "m"), {}, f"model: is a function, not a model; {ORDER}"),
    "no model": ((None, ROWS, judge), {}, "model: must be a folder, a hub id or a transformers model, not None"),
    "a file's name": (("m", "d.jsonl", judge), {}, "train_dataset: is text ('d.jsonl'), not items; load them"),
    "no data": (("m", None, judge), {}, "train_dataset: must be a list of items or a datasets.Dataset, not None"),
    "held-out": (("m", ROWS, judge), {"eval_dataset": 5, "eval_steps": 2}, "eval_dataset: must be a list of items"),
    "a number to judge": (("m", ROWS, 3), {}, "reward_funcs: must be a function, or a list of them, not 3"),
    "one of several": (("m", ROWS, [judge, 3]), {}, "reward_funcs: holds 3, which is not a function"),
    "weights": (("m", ROWS, judge), {"reward_weights": 3}, "reward_weights: must be a list of numbers, not 3"),
    "a list of settings": (("m", ROWS, judge), {"generation_args": [1]}, "generation_args: must be a dictionary"),
    "one beta": (("m", ROWS, judge), {"optimizer_args": {"betas": 0.9}}, "optimizer_args['betas']: are two numbers"),
    "overrides": (("m", ROWS, judge), {"overrides": "train.seed=3"}, "overrides: must be a list such as"),
    "a word": (("m", ROWS, judge), {"log_completions": "x"}, "log_completions: must be True, False or a number"),
    "steps": (("m", ROWS, judge), {"num_steps": "ten"}, 'num_steps: must be a whole number, not "ten"'),
    "group of one": (("m", ROWS, judge), {"group_size": 1}, "group_size: a group of one has nothing to be compared"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_argument_is_named(case: str):
    positional, named, said = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer(*positional, **named)
    assert str(caught.value).startswith(f"GRPOTrainer: {said}") and "\n" not in str(caught.value)


def test_a_script_ends_with_one_line_and_other_errors_keep_their_traceback(tmp_path: Path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from shoal import GRPOTrainer\n\n"
        "try:\n    GRPOTrainer('m', [], None, group_size='two')\nexcept ValueError:\n    print('caught')\n"
        "GRPOTrainer('m', [{'prompt': 'a'}], len, group_size=1)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "caught\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("mine.py:7: GRPOTrainer: group_size: a group of one")
    script.write_text("\n".join([*script.read_text().splitlines()[:-1], "1 / 0"]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
