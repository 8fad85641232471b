"""SmolLM2 on GSM8K: the choice of the supervised settings, GRPO with three seeds, and the accuracy with intervals.

    python benchmarks/gsm8k.py OUT.json MODEL PREPARED [--seeds 0 1 2] [--work FOLDER] [--grpo KEY=VALUE ...]

PREPARED is the folder that experiments/gsm8k/prepare.py writes. The settings of the supervised fine-tuning
(sft_choices.yaml) are compared on the 500 held-out training problems; the test problems are used once, at the end. The
difference of each seed to the supervised model has a paired bootstrap interval. A repeated command with the same work
folder continues with the missing parts. With --smoke the model is tiny, and everything runs on the CPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from bootstrap import paired_bootstrap
from machine import print_table, write_result
from real_run import EXPERIMENT, grpo_command, sft_command, shoal, split_of
from workload import parser

HELD_OUT, TEST, MAX_TOKENS = 500, 1319, 256
SMOKE_EXAMPLES, SMOKE_TOKENS = 8, 8
Result = dict[str, Any]


def read_choices(smoke: bool) -> dict[str, list[str]]:
    choices = yaml.safe_load((EXPERIMENT / "sft_choices.yaml").read_text("utf-8"))
    if smoke:
        return {name: [*words, "train.max_steps=2"] for name, words in list(choices.items())[:2]}
    return choices


def train(words: list[str], run: Path) -> Result:
    """Train unless this command is complete; an incomplete run starts again, so that its time split is complete."""
    record = run.with_name(f"{run.name}.json")
    if not record.exists() or json.loads(record.read_text("utf-8"))["command"] != words:
        shutil.rmtree(run, ignore_errors=True)
        for old in run.parent.glob(f"{run.name}-*"):  # answers of the earlier run
            shutil.rmtree(old, ignore_errors=True)
        started, seconds = shoal(*words, log=run.with_name(f"{run.name}.log"))
        record.write_text(json.dumps({"command": words, **split_of(run, started, seconds)}), "utf-8")
    return json.loads(record.read_text("utf-8"))


def answers(run: Path, problems: Path, count: int, smoke: bool) -> dict[str, float]:
    """The reward of each problem, greedy, as `shoal eval` records it."""
    out = run.with_name(f"{run.name}-{problems.name}")
    record = out / "rollouts" / "eval_000000.jsonl"
    if not record.exists():
        shutil.rmtree(out, ignore_errors=True)
        tokens = SMOKE_TOKENS if smoke else MAX_TOKENS
        words = ["eval", str(run), "--env", "gsm8k", "--arg", f"path={problems}", "--num-examples", str(count),
                 "--max-tokens", str(tokens), "--out", str(out)]  # fmt: skip
        shoal(*words, *(["--device", "cpu"] if smoke else []), log=out.with_name(f"{out.name}.log"))
    lines = [json.loads(text) for text in record.read_text("utf-8").splitlines()]
    found = {line["prompt_id"]: float(line["reward"]) for line in lines if line["error"] is None}
    if len(found) != count:
        raise SystemExit(f"{record} has {len(found)} graded answers, not {count}")
    return found


def accuracy(found: dict[str, float]) -> float:
    return sum(found.values()) / len(found)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", help="SmolLM2 as a GGUF file or folder")
    made.add_argument("data", type=Path, help="folder written by experiments/gsm8k/prepare.py")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--work", type=Path, default=Path("/tmp/shoal-gsm8k"), help="run directories are written here")
    made.add_argument("--grpo", nargs="*", default=[], metavar="KEY=VALUE")
    asked = made.parse_args()
    smoke = asked.smoke
    work = asked.work / "smoke" if smoke else asked.work
    work.mkdir(parents=True, exist_ok=True)
    held_out, test = (SMOKE_EXAMPLES, SMOKE_EXAMPLES) if smoke else (HELD_OUT, TEST)
    result: Result = {"smoke": smoke, "sft": [], "grpo": []}
    for number, (name, words) in enumerate(read_choices(smoke).items()):
        run = work / f"sft-{number}"
        split = train([*sft_command(asked.model, asked.data, run, smoke), *words], run)
        score = accuracy(answers(run, asked.data / "train", held_out, smoke))
        result["sft"].append({"setting": name, "folder": run.name, "held_out": score, "run": split})
        write_result(asked.out, result)
    best = max(result["sft"], key=lambda tried: tried["held_out"])
    supervised = work / best["folder"]
    before = answers(supervised, asked.data / "test", test, smoke)
    result |= {"best": best["setting"], "sft_test": accuracy(before)}
    for seed in asked.seeds:
        run = work / f"grpo-{seed}"
        split = train([*grpo_command(supervised / "final", asked.data, run, seed, smoke), *asked.grpo], run)
        after = answers(run, asked.data / "test", test, smoke)
        gap = paired_bootstrap(after, before)
        result["grpo"].append({"seed": seed, "test": accuracy(after), "difference": gap._asdict(), "run": split})
        write_result(asked.out, result)
    print_table("SFT on held-out training problems", result["sft"], ["setting", "held_out"])
    rows = [{"seed": row["seed"], "test": row["test"], **row["difference"]} for row in result["grpo"]]
    print_table(f"GRPO on test problems; SFT: {result['sft_test']:.4f}", rows, ["seed", "test", "value", "low", "high"])


if __name__ == "__main__":
    main()
