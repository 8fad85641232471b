"""The largest model that trains on GPUs of 8 to 80 GB: all weights, LoRA, and LoRA on an NF4 base.

    python benchmarks/memory_ladder.py OUT.json [--caps 8 16 24 48 80] [--modes full lora qlora]

A step has 16 prompts of 128 tokens with 8 completions of 512 tokens. The caps are set on one large GPU by
capped_gpu.py. For each cap and mode, a binary search over the shapes of models with random weights finds the largest
one that trains three steps. Every run is recorded with its outcome.

Not run on a GPU yet. On a CPU, tests cover the search and the parsing of outcomes, and `--smoke --modes full lora` has
run the command with the tiny model and without caps.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import print_table, write_result
from workload import parser

from shoal.core.errors import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE
from shoal.runs.run_dir import read_metrics

CAPS_GB = (8, 16, 24, 48, 80)
# From the smallest to the largest. Shapes that are refused on a GPU are left out.
SHAPES = ("smollm2-135m", "qwen2.5-0.5b", "gemma-3-4b", "qwen2.5-7b", "llama-3-8b", "qwen3-30b-a3b", "llama-3-70b")
MODES: dict[str, list[str]] = {
    "full": [],
    "lora": ["train.lora=true", "train.lora_rank=16"],
    "qlora": ["train.lora=true", "train.lora_rank=16", "train.qlora_bnb=true"],
}
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, STEPS = 16, 8, 128, 512, 3
ENVIRONMENT = "benchmarks/random_text.py:Evens"
LIMIT_S = 900
ROOT = Path(__file__).parents[1]
MEMORY_WORDS = ("out of memory", "not enough memory", "does not fit")
Outcome = dict[str, Any]


def largest(shapes: Sequence[str], trains: Callable[[str], bool]) -> str | None:
    """The last shape that trains, by binary search: a model larger than one that does not fit does not fit either."""
    low, high = 0, len(shapes)  # shapes before `low` train, those from `high` do not
    while low < high:
        middle = (low + high) // 2
        if trains(shapes[middle]):
            low = middle + 1
        else:
            high = middle
    return shapes[low - 1] if low else None


def outcome(code: int | None, log: str, steps: Sequence[Outcome]) -> Outcome:
    """What a run has shown. `error`: a failure that has nothing to do with memory, so the search cannot rely on it."""
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "")[:300]
    if code == EXIT_DONE and len(steps) >= STEPS:
        times = [step["time/step"] for step in steps[1:]]
        return {"result": "trains", "step_s": statistics.median(times)}
    if code is None:
        return {"result": "error", "message": f"not done after {LIMIT_S} s"}
    if any(word in log.lower() for word in MEMORY_WORDS):
        kind = {EXIT_USAGE: "refused before loading", EXIT_STOPPED: "stopped"}.get(code, "out of memory")
        return {"result": kind, "message": last}
    return {"result": "error", "message": f"ended with {code}: {last}"}


def arguments(shape: str, mode: str, folder: Path, smoke: bool) -> list[str]:
    from grpo_step import characters_for

    model = f"shape:{shape}"
    prompt, new = (64, 8) if smoke else (PROMPT_TOKENS, NEW_TOKENS)
    characters = characters_for(model, prompt)
    return [
        f"train.model={model}", f"train.output_dir={folder / 'run'}", f"train.max_steps={STEPS}",
        f"train.sequence_len={prompt + new}", "train.loss.type=grpo", "train.learning_rate=1e-6",
        "train.save_seconds=100000", *MODES[mode], *(["train.device=cpu"] if smoke else []),
        f"orch.env=[{{id: '{ENVIRONMENT}', args: {{characters: {characters}}}}}]",
        f"orch.batch_size={2 * GROUP if smoke else PROMPTS * GROUP}", f"orch.rollouts_per_example={GROUP}",
        f"orch.sampling.max_tokens={new}",
    ]  # fmt: skip


def run(shape: str, mode: str, cap: float | None) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["grpo", *arguments(shape, mode, folder, smoke=cap is None)]
        capped = [str(ROOT / "benchmarks" / "capped_gpu.py"), str(cap), str(folder / "peak.json"), "shoal"]
        command = [sys.executable, *(["-m", "shoal"] if cap is None else capped), *words]
        with (folder / "log").open("wb") as log:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        run_dir, peak = folder / "run", folder / "peak.json"
        steps = [line for line in read_metrics(run_dir) if line["step"] > 0] if run_dir.exists() else []
        found = outcome(code, (folder / "log").read_text("utf-8", "replace"), steps)
        found |= {"memory": json.loads(peak.read_text("utf-8"))} if peak.exists() else {}
    return {"cap_gb": cap, "mode": mode, "shape": shape, **found}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--caps", type=float, nargs="+", default=list(CAPS_GB), metavar="GB")
    made.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    asked = made.parse_args()
    shapes = ["tiny"] if asked.smoke else list(SHAPES)
    result: Outcome = {"smoke": asked.smoke, "rows": [], "runs": []}
    for cap in [None] if asked.smoke else asked.caps:
        for mode in asked.modes:
            tried: dict[str, Outcome] = {}

            def trains(
                shape: str, cap: float | None = cap, mode: str = mode, tried: dict[str, Outcome] = tried
            ) -> bool:
                tried[shape] = run(shape, mode, cap)
                result["runs"].append(tried[shape])
                print(json.dumps(tried[shape]), flush=True)
                return tried[shape]["result"] == "trains"

            best = largest(shapes, trains)
            errors = [shape for shape, found in tried.items() if found["result"] == "error"]
            row = {"cap_gb": cap, "mode": mode, "largest": best, "errors": errors}
            result["rows"].append(row | ({"step_s": tried[best]["step_s"]} if best else {}))
            write_result(asked.out, result)
    print_table("the largest model that trains", result["rows"], ["cap_gb", "mode", "largest", "step_s"])


if __name__ == "__main__":
    main()
