"""Runs every interface once with a real pretrained model: the quickstart files, GRPOTrainer, the recipe, the launcher.

python benchmarks/doors.py OUT.json SMOLLM2.gguf --gsm8k FOLDER [--steps 10] [--smoke]

Each run is a command as users start it, and its results are read from its run directory. FOLDER contains train.jsonl
and test.jsonl of GSM8K. With --smoke the model is tiny, and a step takes a second on a CPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import print_table, write_result
from workload import parser

from shoal.runs.run_dir import read_metrics, read_status

ROOT = Path(__file__).parents[1]
LIMIT_S = 300
KEPT = ("reward/mean", "reward/std", "mismatch/k3", "policy/entropy", "optim/grad_norm", "time/step", "time/rollout",
        "time/train", "completion/length_mean", "group/mixed_frac")  # fmt: skip
RECIPE = """
import random, sys
from shoal.recipes.rl_loop import Config, DeployConfig, main

draw = random.Random(0)
pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(400)]
rows = [{"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)} for a, b in pairs]


def right(completion, answer, **_):
    return float(answer in completion)


model, out, groups, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
main(
    Config(
        log_path=out, base_model=model, dataset=rows, deployment=DeployConfig(tokenizer_model=model), max_rows=groups,
        completions_per_prompt=8, max_completion_tokens=tokens, prompt_groups_per_step=4, learning_rate=1e-5,
    ),
    right,
)
"""


def commands(model: str, gsm8k: Path, steps: int, small: bool) -> dict[str, tuple[list[str], str]]:
    """The command line of each interface, and the run directory that it creates below its folder."""
    tokens = 8 if small else 64
    files = [word for name in ("train", "infer", "orch") for word in (f"--{name}", f"examples/grpo/{name}.yaml")]
    named = [f"train.model={model}", f"infer.model={model}", f"orch.model.name={model}", "train.output_dir=out"]
    short = [f"train.max_steps={steps}", f"orch.max_steps={steps}"]
    tiny = ["train.recipe=fp32", "orch.batch_size=8", "orch.rollouts_per_example=4", "orch.sampling.max_tokens=8"]
    launched = ["examples/gsm8k/train_grpo.py", "--config", "examples/gsm8k/train_grpo.yaml", f"actor.path={model}"]
    batch, answers = (2, 4) if small else (16, 8)
    return {
        "quickstart": (["-m", "shoal", "grpo", *files, *named, *short, *(tiny if small else [])], "out"),
        "GRPOTrainer": (
            ["examples/grpo_trainer_math.py", "--model", model, "--num-steps", str(steps), "--output-dir", "out",
             "--max-new-tokens", str(tokens)],
            "out",
        ),
        "recipe": (["-c", RECIPE, model, "out", str(4 * steps), str(tokens)], "out"),
        "launcher": (
            ["-m", "shoal.launcher.local", *launched, f"train_dataset.path={gsm8k}", "experiment_name=doors",
             "trial_name=one", "total_train_epochs=1", f"train_dataset.batch_size={batch}",
             f"gconfig.n_samples={answers}", f"gconfig.max_new_tokens={16 if small else 256}"],
            "outputs/doors/one",
        ),
    }  # fmt: skip


def first_rows(source: Path, target: Path, rows: dict[str, int]) -> Path:
    """As many questions as the steps need: the launcher counts epochs."""
    target.mkdir()
    for name, count in rows.items():
        lines = (source / name).read_text("utf-8").splitlines(keepends=True)[:count]
        (target / name).write_text("".join(lines), "utf-8")
    return target


def run(words: list[str], folder: Path, where: str, hidden: dict[str, str]) -> dict[str, Any]:
    start = time.monotonic()
    typed = [sys.executable, *(f"{ROOT}/{word}" if word.startswith("examples/") else word for word in words)]
    done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    found: dict[str, Any] = {"exit": done.returncode, "seconds": time.monotonic() - start}
    if done.returncode:
        found["said"] = (done.stdout + done.stderr)[-1500:]
    if (folder / where / "status.json").exists():
        found["status"] = read_status(folder / where)["state"]
        found["steps"] = [
            {"step": line["step"], **{key: line[key] for key in KEPT if key in line}}
            for line in read_metrics(folder / where)
        ]
    shown = " ".join("RECIPE" if word == RECIPE else word for word in words)
    for text, name in hidden.items():
        shown = shown.replace(text, name)
    return {"command": f"python {shown}", **found}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", help="SmolLM2-135M-Instruct as a GGUF file, or any model")
    made.add_argument("--gsm8k", type=Path, required=True)
    made.add_argument("--steps", type=int, default=10)
    asked = made.parse_args()
    steps = 2 if asked.smoke else asked.steps
    result: dict[str, Any] = {"smoke": asked.smoke, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = asked.model
        if asked.smoke:
            model = str(folder / "tiny")
            subprocess.run([sys.executable, "-m", "shoal", "make-model", "tiny", model], check=True, timeout=LIMIT_S)
        questions = (2 if asked.smoke else 16) * steps
        rows = first_rows(asked.gsm8k, folder / "gsm8k", {"train.jsonl": questions, "test.jsonl": 16})
        hidden = {str(model): Path(model).name, str(rows): "GSM8K"}
        for surface, (words, where) in commands(model, rows, steps, asked.smoke).items():
            place = folder / surface
            place.mkdir()
            result["rows"].append({"surface": surface, **run(words, place, where, hidden)})
            write_result(asked.out, result)
    shown = [
        row | {"done": len(row.get("steps", [])), "reward": (row.get("steps") or [{}])[-1].get("reward/mean")}
        for row in result["rows"]
    ]
    print_table("every surface", shown, ["surface", "exit", "done", "reward", "seconds"])
    if any(row["exit"] for row in result["rows"]):
        raise SystemExit("\n".join(row["said"] for row in result["rows"] if "said" in row))


if __name__ == "__main__":
    main()
