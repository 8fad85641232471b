"""Writes the data of the experiment: python experiments/gsm8k/prepare.py DATA OUT

DATA has `train.jsonl` and `test.jsonl` of GSM8K. In OUT:

- `sft.jsonl`: the worked solutions of the training problems, in the form that the reward grades,
- `train/`: the training problems, and 500 held-out problems of the training set as `test.jsonl`. Settings and
  checkpoints are chosen on these,
- `test/`: the same training problems, and the 1,319 test problems as `test.jsonl`. They are used once, at the end.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from shoal.envs.gsm8k import Gsm8k

HELD_OUT = 500


def write(data: Path, out: Path) -> None:
    lines = {split: (data / f"{split}.jsonl").read_text("utf-8").splitlines() for split in ("train", "test")}
    held_out = set(random.Random(0).sample(range(len(lines["train"])), HELD_OUT))
    train = [line for number, line in enumerate(lines["train"]) if number not in held_out]
    parts = {"train": [lines["train"][number] for number in sorted(held_out)], "test": lines["test"]}
    for name, test in parts.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        (out / name / "train.jsonl").write_text("\n".join(train) + "\n", "utf-8")
        (out / name / "test.jsonl").write_text("\n".join(test) + "\n", "utf-8")
    env = Gsm8k(path=str(out / "train"))
    rows = [
        {"prompt": [dict(message) for message in task.messages], "completion": env.solution(task)}
        for task in env.tasks("train")
    ]
    (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(f"{out}: {len(rows)} problems to train on, {HELD_OUT} held out, {len(lines['test'])} test problems")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
