"""The held-out reward of folders of weights, by transformers' `generate`: the same code for every system.

Run by compare.py with a job as JSON; prints the reward of each step as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.core.types import Task
from shoal.envs.base import SingleTurn


def held_out_reward(folder: Path, tokenizer: Path, env: SingleTurn, sampling: dict[str, Any]) -> float:
    """The mean reward on the held-out tasks, sampled with a fixed seed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    words: Any = AutoTokenizer.from_pretrained(tokenizer, padding_side="left")
    tasks = list(env.tasks("eval")) * sampling["rollouts"]
    torch.manual_seed(0)
    rewards: list[float] = []
    for at in range(0, len(tasks), sampling["batch"]):
        batch = tasks[at : at + sampling["batch"]]
        for task, text in zip(batch, _answers(model, words, batch, sampling), strict=True):
            messages = [*task.messages, {"role": "assistant", "content": text}]
            rewards.append(float(env.reward(task, messages)))  # type: ignore[arg-type]
    return sum(rewards) / len(rewards)


def _answers(model: Any, words: Any, tasks: Sequence[Task], sampling: dict[str, Any]) -> list[str]:
    texts = [
        words.apply_chat_template(list(task.messages), tokenize=False, add_generation_prompt=True) for task in tasks
    ]
    inputs = words(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.inference_mode():
        found = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=sampling["max_tokens"],
            pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id,
        )  # fmt: skip
    return words.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(job: dict[str, Any]) -> None:
    from shoal.envs.registry import load_environment

    env: Any = load_environment(job["task"]["id"], job["task"]["args"])
    tokenizer = Path(job["tokenizer"])
    rewards = {
        step: round(held_out_reward(Path(path), tokenizer, env, job["sampling"]), 4)
        for step, path in job["weights"].items()
    }
    print(json.dumps(rewards))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
