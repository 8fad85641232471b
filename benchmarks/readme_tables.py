"""Writes the generated parts of README.md: the comparison with other systems and the measurements per device.

    python benchmarks/readme_tables.py [--results DIR] [--page README.md]

Each part stands between `<!-- NAME: begin … -->` and `<!-- NAME: end -->`. Figures come from the JSON in
benchmarks/results/. A cell without a recorded result stays empty. A test compares the page with what this writes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from performance_tables import table

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]
Cell = Callable[[Result], str]

SYSTEMS = ("Shoal", "TRL", "verl", "prime-rl", "Unsloth")
# The repositories and commits that were read, July and August 2026.
READ = {
    "trl": "huggingface/trl/blob/f2cd577",
    "verl": "verl-project/verl/blob/1dda039",
    "prime-rl": "PrimeIntellect-ai/prime-rl/blob/559b447",
}


def source(system: str, path: str) -> str:
    """A link to the file in which the feature was found."""
    return f"[yes](https://github.com/{READ[system]}/{path})"


# In the order of SYSTEMS. Empty: not checked.
FACTS: tuple[tuple[str, ...], ...] = (
    ("GRPO on a CPU, with exact resume", "[yes](docs/architecture.md#resume)", "", "", "", ""),
    (
        "Hybrid models such as Qwen3.5",
        "[on a CPU](docs/models.md)",
        source("trl", "docs/source/grpo_trainer.md"),
        source("verl", "README.md"),
        source("prime-rl", "README.md"),
        "[yes](https://github.com/unslothai/unsloth/issues/10891)",
    ),
    (
        "Images in prompts",
        "**no**",
        source("trl", "examples/scripts/grpo_vlm.py"),
        "yes",
        source("prime-rl", "docs/advanced.md"),
        "yes",
    ),
    (
        "On-policy distillation",
        "[yes](docs/learning-signals.md), not run on a GPU yet",
        "[yes](https://github.com/huggingface/trl/issues/6449)",
        source("verl", "docs/algo/opd.md"),
        "yes",
        "not found",
    ),
    ("DPO", "[yes](docs/preference-data.md), not run on a GPU yet", "yes", "partly", "not found", "yes"),
    ("Context parallelism for RL", "**no**", "partly", "yes", "yes", "not found"),
    ("Optimizer state or weights in CPU memory", "**no**", "yes", "yes", "yes", "yes"),
)


def time_and_memory(result: Result) -> str:
    row = result["rows"][0]
    return f"{row['step_s']:.2f} s, {row['memory']['allocated_gib']:.0f} GiB"


def step_time(result: Result) -> str:
    return f"{result['rows'][0]['step_s']:.2f} s"


def demo_time(result: Result) -> str:
    times = [seed["seconds"] for seed in result["seeds"].values()]
    return f"{min(times):.0f} to {max(times):.0f} s"


def tutorial_time(result: Result) -> str:
    return f"{result['seconds']:.0f} s"


def killed(result: Result) -> str:
    runs = sum(row["runs"] for row in result["rows"])
    return f"{result['kills']:,} kills in {runs} runs, {result['failed']} failed"


def best_runs(result: Result, system: str) -> list[Result]:
    """The runs of the best setting of a system in benchmarks/peers, one per seed."""
    setting = result["best"].get(system)
    return [
        run for run in result["runs"] if (run["system"], run["setting"]) == (system, setting) and "error" not in run
    ]


def to_target(system: str) -> Cell:
    """The median over the seeds that have reached the reward, and their number."""

    def cell(result: Result) -> str:
        runs = best_runs(result, system)
        times = [at[1] for run in runs if (at := run["to"][PEERS_TARGET])]
        if not times:
            return f"not in {result['profile']['steps']} steps"
        return f"{statistics.median(times):.0f} CPU s ({len(times)} of {len(runs)} seeds)"

    return cell


def median_of(system: str, key: str, unit: str) -> Cell:
    return lambda result: f"{statistics.median(run[key] for run in best_runs(result, system)):.3g} {unit}"


PEERS = "peers_cpu"
PEERS_TARGET = "0.85"  # the highest one that both systems have reached


def peers(make: Callable[[str], Cell]) -> tuple[Cell | None, ...]:
    return (make("shoal"), make("trl"), None, None, None)


# Label, recorded file, then one reader per system; None: not measured.
MEASURED: tuple[tuple[str, str, tuple[Cell | None, ...]], ...] = (
    ("Resume after `kill -9`, tested at many points", "kills", (killed, None, None, None, None)),
    (
        f"Tiny model on a CPU: time from the command to a held-out reward of {PEERS_TARGET[1:]} on `arithmetic`",
        PEERS,
        peers(to_target),
    ),
    (
        "The same run: time from the command to the end of the first optimizer step",
        PEERS,
        peers(lambda system: median_of(system, "first_step_cpu_s", "CPU s")),
    ),
    ("The same run: time per step", PEERS, peers(lambda system: median_of(system, "step_cpu_s", "CPU s"))),
    ("The same run: peak memory", PEERS, peers(lambda system: median_of(system, "peak_mib", "MiB"))),
    ("One step, 0.5B model on one H200", "grpo_step", (step_time, None, None, None, None)),
    ("One step, 7B model with LoRA on one H200", "grpo_step_7b", (step_time, None, None, None, None)),
)

COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("`make demo`, the whole run", "demo_cpu", demo_time),
    ("tutorial, ten steps of 32 rollouts", "tutorial_cpu", tutorial_time),
    ("SmolLM2-135M, one step", "grpo_step_smollm2", time_and_memory),
    ("Qwen2.5-0.5B shape, one step", "grpo_step", time_and_memory),
    ("Qwen2.5-7B shape with LoRA, one step", "grpo_step_7b", time_and_memory),
)
# What a reader sees, and the part of the recorded device name that identifies it; None: no GPU.
DEVICES: tuple[tuple[str, str | None], ...] = (
    ("2 CPU cores", None),
    ("NVIDIA T4, 16 GB", "T4"),
    ("NVIDIA RTX 4090, 24 GB", "4090"),
    ("NVIDIA A100, 80 GB", "A100"),
    ("NVIDIA H100, 80 GB", "H100"),
    ("NVIDIA H200, 141 GB", "H200"),
)


def read(folder: Path, name: str) -> Result | None:
    """A recorded result; runs with --smoke are not measurements."""
    path = folder / f"{name}.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else None
    return None if found is None or found.get("smoke") else found


def link(name: str, text: str) -> str:
    return f"[{text}](benchmarks/results/{name}.json)"


def comparison(folder: Path) -> str:
    rows = [list(fact) for fact in FACTS]
    for label, name, cells in MEASURED:
        result = read(folder, name)
        if result is None and name == PEERS:
            continue  # a row without any cell
        rows.append([label, *(link(name, cell(result)) if cell and result else "" for cell in cells)])
    return table(["", *SYSTEMS], rows)


def ran_on(result: Result, device: str | None) -> bool:
    gpu = result["machine"].get("gpu")
    return gpu is None if device is None else device in (gpu or "")


def hardware(folder: Path) -> str:
    rows = []
    for title, device in DEVICES:
        cells = []
        for _, name, cell in COLUMNS:
            result = read(folder, name)
            cells.append(link(name, cell(result)) if result and ran_on(result, device) else "")
        rows.append([title, *cells])
    return table(["", *(title for title, _, _ in COLUMNS)], rows)


def sampling(folder: Path) -> str:
    """One sentence: vLLM is the sampler of the other systems, and was measured in the same run."""
    result = read(folder, "rollout_vllm")
    if result is None:
        return ""
    row = max(result["rows"], key=lambda row: row["sequences"])
    rate = f"{row['tokens_per_s']:,.0f} tokens/s"
    return (
        f"On one {result['machine']['gpu']}, Shoal's engine sampled {row['sequences']} sequences of the {row['shape']} "
        f"shape with log-probs at {link('rollout_vllm', rate)}. vLLM {row['vllm_version']} sampled them at "
        f"{row['vllm_logprobs_tokens_per_s']:,.0f} tokens/s, and at {row['vllm_tokens_per_s']:,.0f} tokens/s without "
        f"log-probs."
    )


def models(folder: Path) -> str:
    import models_page  # it imports this file

    return models_page.readme_table(folder)


TABLES: dict[str, Callable[[Path], str]] = {
    "comparison": comparison, "hardware": hardware, "sampling": sampling, "models": models,
}  # fmt: skip


def fill(page: str, folder: Path) -> str:
    for name, write in TABLES.items():
        block = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if len(block.findall(page)) != 1:
            raise SystemExit(f"the page has no pair of markers for the table {name!r}")
        text = write(folder)
        page = block.sub(lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}", page)
    return page


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    made.add_argument("--page", type=Path, default=ROOT / "README.md")
    asked = made.parse_args()
    asked.page.write_text(fill(asked.page.read_text("utf-8"), asked.results), "utf-8")


if __name__ == "__main__":
    main()
