"""Complete GRPO steps through the real command, `shoal grpo`, read from the run directory afterwards.

python benchmarks/grpo_step.py OUT.json [--cases 0.5b 7b-lora] [--smollm GGUF] [--smoke]

Each case runs twice, cold (with empty caches, a few steps) and warm, or only cold. The steady state is the median step
of the second half of the last run. The limit of a step is the sum of the limits of its rollouts and its training.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from limits import ModelShape, Rates, Work
from machine import print_table, write_result
from random_text import Evens
from workload import parser

from shoal.config.model_names import shape_of as shape_name
from shoal.models.random_models import shape_config
from shoal.models.tokenizer import load_tokenizer
from shoal.runs.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
ENVIRONMENT = "benchmarks/random_text.py:Evens"
PHASES = ("rollout", "reward", "train", "sync", "idle", "save")
COLD_STEPS = 2
COUNTED = 64  # prompts whose tokens are counted
LIMIT_S = 540
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
)  # compiled kernels, and compiled Python if needed


@dataclass(frozen=True)
class Case:
    name: str
    model: str  # a shape, `shape:NAME` without files, "tiny", or a file
    prompts: int = 16
    group: int = 8
    prompt_tokens: int = 128
    new: int = 256
    steps: int = 12
    rows: int | None = None  # packed rows of one micro-batch; None = by the memory plan
    characters: int | None = None  # of a prompt; by default derived from its number of tokens
    lora_rank: int | None = None
    precision: str = "bf16"
    quoted: str | None = None

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def is_file(self) -> bool:
        return self.model.endswith(".gguf")

    def arguments(self, model: str, run: Path, steps: int) -> list[str]:
        length = self.prompt_tokens + self.group * self.new  # a row contains a group, whose prompt is computed once
        rows = [f"train.per_device_train_batch_size={self.rows}"] if self.rows else []
        characters = self.characters or characters_for(model, self.prompt_tokens)
        adapters = [f"train.lora_rank={self.lora_rank}", "train.lora=true"] if self.lora_rank else []
        return [
            f"train.model={model}", f"train.output_dir={run}", f"train.max_steps={steps}",
            f"train.recipe={self.precision}", f"train.sequence_len={length}",
            *rows, "train.loss.type=grpo", "train.learning_rate=1e-6", "train.save_seconds=100000", *adapters,
            f"orch.env=[{{id: '{ENVIRONMENT}', args: {{characters: {characters}}}}}]",
            f"orch.batch_size={self.sequences}", f"orch.rollouts_per_example={self.group}",
            f"orch.sampling.max_tokens={self.new}",
        ]  # fmt: skip


TRL = "TRL 1.16 on an H200, same setting: 11.4–12.3 s per step, 57 GiB; with its continuous batching 23.7 s"
CASES = {
    "0.5b": Case("0.5b", "qwen2.5-0.5b"),
    "7b-lora": Case("7b-lora", "qwen2.5-7b", prompt_tokens=256, new=512, steps=3, lora_rank=16),
    "qwen3.5-0.8b": Case("qwen3.5-0.8b", "shape:qwen3.5-0.8b", steps=4),
    "gemma-3-4b": Case("gemma-3-4b", "shape:gemma-3-4b", steps=4),
    "gpt-oss-20b-lora": Case("gpt-oss-20b-lora", "shape:gpt-oss-20b", steps=3, lora_rank=16),
    "qwen3-30b-a3b-lora": Case("qwen3-30b-a3b-lora", "shape:qwen3-30b-a3b", steps=3, lora_rank=16),
}
DEFAULT = ("0.5b", "7b-lora")
SMOLLM = Case("smollm2-135m", "", characters=325, quoted=TRL)
SMOKE = Case("tiny", "tiny", prompts=2, group=4, prompt_tokens=64, new=8, steps=4, rows=4, precision="fp32")
SMOKE_SHAPE = replace(SMOKE, name="tiny-shape", model="shape:tiny", lora_rank=2)
SMOKE_SMOLLM = replace(SMOLLM, prompts=2, group=2, new=4, steps=2, rows=2, precision="fp32")


@cache
def characters_for(model: str, tokens: int) -> int:
    """The number of characters for prompts with this many tokens on average, including the chat template."""
    tokenizer = load_tokenizer(model)

    def mean(characters: int) -> float:
        texts = [
            tokenizer.apply_chat_template([dict(m) for m in task.messages], tokenize=False, add_generation_prompt=True)
            for task in Evens(characters).tasks("train")[:COUNTED]
        ]
        return statistics.mean(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))

    found = bisect_left(range(1, 8 * tokens), tokens, key=mean) + 1
    if abs(mean(found) - tokens) > 1:
        raise SystemExit(f"no prompt of {model} has {tokens} tokens: the template alone, or {found} characters, differ")
    return found


class Failed(RuntimeError):
    """A run failed. The other cases continue."""


def run(case: Case, model: str, folder: Path, steps: int) -> dict[str, Any]:
    """One command in a new run directory. `first_step_s`: from the command to the record of the first step."""
    out, peak = folder / "run", folder / "peak.json"
    shutil.rmtree(out, ignore_errors=True)
    caches = {name: str(folder / "cache" / name) for name in CACHES}
    arguments = case.arguments(model, out, steps)
    command = [sys.executable, str(Path(__file__).with_name("peak_memory.py")), str(peak), "shoal", "grpo", *arguments]
    start, first_step_s = time.monotonic(), None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **caches}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                if first_step_s is None and _has_line(out / "metrics.jsonl"):
                    first_step_s = time.monotonic() - start
                if time.monotonic() - start > LIMIT_S:
                    raise Failed(f"{case.name}: not done after {LIMIT_S} s:\n{_tail(folder / 'log')}")
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise Failed(f"{case.name}: shoal grpo ended with {process.returncode}:\n{_tail(folder / 'log')}")
    hidden = {f"train.model={model}": f"train.model={Path(case.model).name}", f"train.output_dir={out}": None}
    shown = [hidden.get(word, word) for word in arguments]
    return {
        "command": " ".join(["shoal", "grpo", *(word for word in shown if word)]),
        "first_step_s": first_step_s,
        "start_s": _event(out, "ready")["seconds"],
        "seconds": time.monotonic() - start,
        "memory": {**json.loads(peak.read_text("utf-8")), **_planned(out)} if peak.exists() else None,
        "steps": [_kept(line) for line in read_metrics(out)],
    }


def _event(run_dir: Path, kind: str) -> dict[str, Any]:
    """The first event of this kind."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text("utf-8").splitlines()]
    return next((event["data"] for event in events if event.get("kind") == kind), {})


def _planned(run_dir: Path) -> dict[str, float]:
    """The memory plan as reported before the first step. None on a CPU."""
    plan = _event(run_dir, "memory-plan").get("bytes")
    return {"planned_gib": sum(plan.values()) / 2**30} if plan else {}


def _has_line(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def _tail(path: Path) -> str:
    return path.read_text("utf-8", "replace")[-3000:]


def _kept(line: dict[str, Any]) -> dict[str, Any]:
    areas = ("time/", "throughput/", "tokens/", "batch/", "completion/length_mean", "reward/mean", "reward/std")
    return {key: value for key, value in line.items() if key == "step" or key.startswith(areas)}


def steady(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The median step of the second half, its phases, and its sampled tokens."""
    half = steps[len(steps) // 2 :]
    split = {phase: statistics.median(line.get(f"time/{phase}", 0.0) for line in half) for phase in PHASES}
    return {
        "step_s": statistics.median(line["time/step"] for line in half),
        "split_s": split,
        "prompt_tokens": statistics.median(line["tokens/prompt"] / line["batch/rollouts"] for line in half),
        "completion_tokens": statistics.median(line["completion/length_mean"] for line in half),
        "rollouts": statistics.median(line["batch/rollouts"] for line in half),
        "rollout_tokens_per_s": statistics.median(line["throughput/rollout_tok_s"] for line in half),
        "train_tokens_per_s": statistics.median(line["throughput/train_tok_s"] for line in half),
    }


def limits(case: Case, shape: ModelShape, found: dict[str, Any], rates: Rates) -> dict[str, Any]:
    """Shares of both limits: bytes and operations of rollouts and training, divided by the time of the step."""
    prompt, new, count = round(found["prompt_tokens"]), round(found["completion_tokens"]), case.sequences
    rollout = shape.prefill([prompt] * case.prompts, count) + shape.decode([(prompt, new)] * count, count)
    adapters = _adapter_parameters(case, shape)
    train = shape.train(count * (prompt + new), adapters)
    optimizer = Work(shape.optimizer_bytes(adapters or shape.parameters))
    least = {"rollout": rollout.least_s(rates), "train": train.least_s(rates) + optimizer.least_s(rates)}
    whole = rollout + train + optimizer
    return {
        "least_s": least,
        "fraction": sum(least.values()) / found["step_s"],
        "fraction_bytes": whole.bytes / rates.bytes_per_s / found["step_s"],
        "fraction_operations": whole.operations / rates.operations_per_s / found["step_s"],
    }


def _adapter_parameters(case: Case, shape: ModelShape) -> int:
    return (case.lora_rank or 0) * shape.adapter_numbers


def memory(case: Case, shape: ModelShape, peak: dict[str, float] | None) -> dict[str, float] | None:
    """The peak, and the part of it that is not weights, gradient, masters, moments, keys and values."""
    if peak is None:
        return None
    trained = _adapter_parameters(case, shape) or shape.parameters
    state = shape.parameters * shape.element_bytes + trained * (4 + 4 + 8)  # gradient sum, master, two moments
    cache = case.sequences * (case.prompt_tokens + case.group * case.new) * shape.cache_bytes
    known = (state + cache) / 2**30
    return {**peak, "weights_and_optimizer_gib": state / 2**30, "cache_gib": cache / 2**30,
            "beyond_gib": peak["allocated_gib"] - known}  # fmt: skip


def make_model(case: Case, folder: Path) -> str:
    """A folder written by the command, or the given file or `shape:NAME`. A large shape is created on the GPU."""
    if case.is_file or shape_name(case.model):
        return case.model
    target = folder / "model"
    if case.model == "qwen2.5-7b":
        code = (
            "import sys, torch; from pathlib import Path; from shoal.models.random_models import make_model\n"
            "torch.set_default_device('cuda'); make_model(sys.argv[1], Path(sys.argv[2]))"
        )
        subprocess.run([sys.executable, "-c", code, case.model, str(target)], check=True, timeout=LIMIT_S)
        return str(target)
    words = ["tiny", str(target)] if case.model == "tiny" else [str(target), "--shape", case.model]
    subprocess.run([sys.executable, "-m", "shoal", "make-model", *words], check=True, timeout=LIMIT_S)
    return str(target)


def shape_of(case: Case, model: str, run_dir: Path) -> ModelShape:
    from transformers import AutoConfig

    if name := shape_name(case.model):
        return ModelShape.of(shape_config(name))
    folder = run_dir / "final" if case.is_file else Path(model)
    return ModelShape.of(AutoConfig.from_pretrained(folder), 4 if case.precision == "fp32" else 2)


def measure(case: Case, rates: Rates, cold_too: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(case, folder)
        cold = run(case, model, folder, min(COLD_STEPS, case.steps)) if cold_too else None
        warm = run(case, model, folder, case.steps)
        shape = shape_of(case, model, folder / "run")
    found = steady(warm["steps"])
    return {
        "name": case.name,
        **found,
        **limits(case, shape, found, rates),
        "memory": memory(case, shape, warm["memory"]),
        # The measured run uses the caches of the previous one, if there was one.
        "first_step_s": {"cold": (cold or warm)["first_step_s"], "warm": warm["first_step_s"] if cold else None},
        "start_s": warm["start_s"],
        "quoted": case.quoted,
        "command": warm["command"],
        "steps": warm["steps"],
    }


def rates_apart(smoke: bool) -> Rates:
    """Measured by another process, so that this process uses no device memory."""
    import torch

    if not smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; --smoke runs it on the CPU with a tiny model")
    words = [sys.executable, str(Path(__file__).with_name("limits.py")), *(["--smoke"] if smoke else [])]
    return Rates(**json.loads(subprocess.run(words, check=True, capture_output=True, timeout=120).stdout))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--cases", nargs="*", choices=list(CASES), default=list(DEFAULT))
    made.add_argument("--once", "--warm-only", action="store_true", help="no short run before: caches are empty")
    made.add_argument("--smollm", metavar="GGUF", help="SmolLM2-135M, for the case that others have measured")
    asked = made.parse_args()
    cases = [SMOKE, SMOKE_SHAPE] if asked.smoke else [CASES[name] for name in asked.cases]
    if asked.smollm:
        cases.append(replace(SMOKE_SMOLLM if asked.smoke else SMOLLM, model=asked.smollm))
    rates = rates_apart(asked.smoke)
    result: dict[str, Any] = {"smoke": asked.smoke, "rates": rates.__dict__, "rows": [], "problems": []}
    for case in cases:
        try:
            result["rows"].append(measure(case, rates, not asked.once))
        except Failed as error:
            print(error, file=sys.stderr, flush=True)
            result["problems"].append(str(error).splitlines()[0])
        write_result(asked.out, result)
    shown = [
        row | row["split_s"] | {f"first_{k}_s": v for k, v in row["first_step_s"].items()} for row in result["rows"]
    ]
    columns = ["name", "step_s", *PHASES, "fraction", "fraction_bytes", "fraction_operations", "first_cold_s",
               "first_warm_s", "completion_tokens"]  # fmt: skip
    print_table("whole GRPO steps", shown, columns)
    if result["problems"]:
        raise SystemExit("\n".join(result["problems"]))


if __name__ == "__main__":
    main()
