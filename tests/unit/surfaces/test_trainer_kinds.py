"""Arguments of the wrong type: one line that names the argument, and the end of the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal import GRPOConfig
from shoal.core.errors import ArgumentError
from shoal.grpo_trainer import GRPOTrainer

ROWS = [{"prompt": "a"}] * 4


def judge(completion: str, **_: Any) -> float:
    return 1.0


class Judge:
    prompt = "a"

    def get_reward(self, completion: str) -> float:
        return 1.0


TRL = "is not an argument; TRL's"
ROOM = "which leaves no room for a prompt in seq_len (8); set it below 8,"
ORDER = "the order is GRPOTrainer(model, train_dataset, reward_funcs)"
WRONG: dict[str, tuple[tuple, dict[str, Any], str]] = {
    "model and data swapped": ((ROWS, "m", judge), {}, f"model: is a list, not a model; {ORDER}"),
    "data and reward swapped": (("m", judge, ROWS), {}, f"train_dataset: is a function, not items; {ORDER}"),
    "reward and model swapped": ((judge, ROWS, "m"), {}, f"model: is a function, not a model; {ORDER}"),
    "no model": ((None, ROWS, judge), {}, "model: is required: a folder, a hub id or a transformers model"),
    "a file's name": (("m", "d.jsonl", judge), {}, "train_dataset: is text ('d.jsonl'), not items; load them"),
    "no data": (("m", None, judge), {}, "train_dataset: is required: a list of items or a datasets.Dataset"),
    "held-out": (("m", ROWS, judge), {"eval_dataset": 5, "eval_steps": 2}, "eval_dataset: must be a list of items"),
    "a number to judge": (("m", ROWS, 3), {}, "reward_funcs: must be a function, or a list of them, not 3"),
    "one of several": (("m", ROWS, [judge, 3]), {}, "reward_funcs: holds 3, which is not a function"),
    "a reward model": (("m", ROWS, "org/judge"), {}, "reward_funcs: 'org/judge' does not name a function; write mod"),
    "weights": (("m", ROWS, judge), {"reward_weights": 3}, "reward_weights: must be a list of numbers, not 3"),
    "a list of settings": (("m", ROWS, judge), {"generation_args": [1]}, "generation_args: must be a dictionary"),
    "one beta": (("m", ROWS, judge), {"optimizer_args": {"betas": 0.9}}, "optimizer_args['betas']: must be two"),
    "overrides": (("m", ROWS, judge), {"overrides": "train.seed=3"}, "overrides: must be a list such as"),
    "a word": (("m", ROWS, judge), {"log_completions": "x"}, "log_completions: must be True, False or a number"),
    "steps": (("m", ROWS, judge), {"num_steps": "ten"}, 'num_steps: must be a whole number, not "ten"'),
    "no items": (("m", [], judge), {}, "train_dataset: is empty"),
    "another column": (("m", [{"text": "a"}], judge), {}, "train_dataset: item 0: dict has no prompt; it has text"),
    "held-out rows": (
        ("m", [Judge()]),
        {"eval_dataset": ROWS, "eval_steps": 1},
        "eval_dataset: item 0: dict has no method get_reward(completion)",
    ),
    "TRL's rate": (("m", ROWS, judge), {"learning_rate": 1e-5}, f"learning_rate: {TRL} learning_rate is optimizer"),
    "TRL's group": (("m", ROWS, judge), {"num_generations": 4}, f"num_generations: {TRL} num_generations is group"),
    "TRL's loss": (("m", ROWS, judge), {"delta": 2}, f"delta: {TRL} delta is overrides=['train.loss.dual_clip=…']"),
    "TRL's callbacks": (("m", ROWS, judge), {"callbacks": []}, f"callbacks: {TRL} callbacks is not supported"),
    "lr": (("m", ROWS, judge), {"lr": 1e-5}, "lr: is not an argument; use optimizer_args={'lr': …}, or learn"),
    "no room": (("m", ROWS, judge), {"max_seq_len": 8}, f"max_new_tokens: is 256, {ROOM} or raise max_seq_len"),
    "group of one": (("m", ROWS, judge), {"group_size": 1}, "group_size: is 1, and in a group of one"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_argument_is_named(case: str):
    positional, named, said = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer(*positional, **named)
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"GRPOTrainer: {said}") and (others == [] or "swapped" in case)


def test_all_wrong_arguments_are_reported_at_once():
    """Unknown names, wrong types and contradictions, each with the nearest name and the default of this interface."""
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer("m", "d.jsonl", judge, groupsize=4, clip_eps=-1.0, ppo_steps="two", eval_steps=5, max_new_tokens=0)  # type: ignore[arg-type]
    said = {line.split(": ")[1]: line for line in str(caught.value).splitlines()}
    assert set(said) == {"train_dataset", "groupsize", "clip_eps", "ppo_steps", "eval_steps", "max_new_tokens"}
    assert "group_size (default 4)" in said["groupsize"]
    assert all(f"the default is {value}" in said[name] for name, value in (("clip_eps", 0.2), ("max_new_tokens", 256)))


def test_required_arguments_are_reported_with_the_others():
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer(reward_funcs=judge, groupsize=4, clip_eps=-1.0)
    said = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert sorted(said) == ["clip_eps", "groupsize", "model", "train_dataset"]
    with pytest.raises(ArgumentError, match=r"^GRPOTrainer: train_dataset: is required: a list of items or a [^\n]*$"):
        GRPOTrainer("m", reward_funcs=judge, args=GRPOConfig())


def test_script_ends_with_one_line_and_other_errors_keep_their_traceback(tmp_path: Path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from shoal import GRPOTrainer\n\n"
        "try:\n    GRPOTrainer('m', [], None, group_size='two')\nexcept ValueError:\n    print('caught')\n"
        "GRPOTrainer('m', [{'prompt': 'a'}], len, group_size=1)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "caught\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("mine.py:7: GRPOTrainer: group_size: is 1, and in a group of one")
    for line, said in (("GRPOConfig(learning_rat=1e-5)", "learning_rate"), ("recipe.Config(tis=3)", "log_path")):
        script.write_text(f"from shoal import GRPOConfig\nfrom shoal.recipes import config as recipe\n{line}\n")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        (told,) = done.stderr.splitlines()
        assert told.startswith("mine.py:3: ") and said in told
    script.write_text("1 / 0\n" + script.read_text())
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_output_dir_may_be_a_path_and_unused_eval_items_are_reported():
    trainer = GRPOTrainer(Path("some/model"), ROWS, judge, eval_dataset=ROWS, output_dir=Path("runs/one"))
    assert (trainer.config.train.model, trainer.config.train.output_dir) == ("some/model", "runs/one")
    assert any(line.startswith("eval_dataset: is only used by test()") for line in trainer.notices)


def test_refused_start_gives_one_line(tmp_path: Path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from shoal import GRPOTrainer\n\n"
        "def judge(completion):\n    return 1.0\n\n"
        "GRPOTrainer('m', [{'prompt': 'a'}], judge, output_dir=__file__).train()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert line == f"mine.py:6: GRPOTrainer: output_dir: {str(script)!r} is a file; use a folder"


def test_test_items_are_named_in_errors(tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"^GRPOTrainer\.test: dataset: item 0: dict has no method get_reward"):
        GRPOTrainer("m", [Judge()], output_dir=tmp_path).test(ROWS)
