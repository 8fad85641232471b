"""Run by the TRL Python: `trl_run.py JOB.json`. Trains with GRPOTrainer and writes one line per step.

JOB has the model, the file of the task's rows, the folder, the length of the run and the arguments of GRPOConfig.
After each step `steps.jsonl` gets the wall-clock seconds spent so far in generation, rewards, training and saving.
Checkpoints have weights only. The trainer is unchanged except for the timers around its methods.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from shoal.rewards.numeric import last_number, same_number


def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """The reward of `arithmetic` and `gsm8k`: the last number of the answer is compared exactly."""
    numbers = [last_number(completion[-1]["content"]) for completion in completions]
    return [
        float(number is not None and same_number(number, expected))
        for number, expected in zip(numbers, answer, strict=True)
    ]


class Timed(GRPOTrainer):
    """Measures the phases. `train` is everything of a training step that is neither generation nor rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.spent = dict.fromkeys(("rollout", "reward", "train", "save"), 0.0)
        self.tokens = 0
        super().__init__(*args, **kwargs)

    def _timed(self, phase: str, call: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return call()
        finally:
            self.spent[phase] += time.monotonic() - start

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        found = self._timed("rollout", lambda: super(Timed, self)._generate_single_turn(*args, **kwargs))
        self.tokens += sum(len(ids) for ids in found[0])
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("reward", lambda: super(Timed, self)._calculate_rewards(*args, **kwargs))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self.spent["rollout"] + self.spent["reward"]
        found = self._timed("train", lambda: super(Timed, self).training_step(*args, **kwargs))
        self.spent["train"] -= self.spent["rollout"] + self.spent["reward"] - before
        return found

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("save", lambda: super(Timed, self)._save_checkpoint(*args, **kwargs))


class Steps(TrainerCallback):
    """Writes a line after each optimizer step of the rollouts of a batch."""

    def __init__(self, file: Path, updates: int) -> None:
        self.file, self.updates, self.trainer = file, updates, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if trainer is None or state.global_step % self.updates:
            return
        line = {"step": state.global_step // self.updates, "time": time.time(), "tokens": trainer.tokens}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"spent": trainer.spent}) + "\n")


def main(job: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(job["rows"]).read_text("utf-8").splitlines()]
    folder, updates = Path(job["folder"]), job["updates"]
    config = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=job["steps"] * updates,
        seed=job["seed"],
        save_strategy="steps",
        save_steps=job["save_steps"] * updates,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **job["arguments"],
    )
    steps = Steps(folder / "steps.jsonl", updates)
    trainer = Timed(
        model=job["model"], reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[steps]
    )
    steps.trainer = trainer
    trainer.train()
    if torch.cuda.is_available():
        peak = {
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }
        (folder / "peak.json").write_text(json.dumps(peak), "utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
