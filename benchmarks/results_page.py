"""Writes docs/results.md: what runs of Shoal learned, with intervals, curves, hardware, versions and commands.

    python benchmarks/results_page.py [--results DIR] [--page docs/results.md] [--no-plots]

Every figure comes from the JSON in benchmarks/results/. A test compares the page with the output of this script.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ablations_tables import BASE, SAME, THRESHOLD, Row, after_start, arms_table, reward, rows
from performance_tables import table

ROOT = Path(__file__).parents[1]
Result = dict[str, Any]

INTRO = """<!-- Written by benchmarks/results_page.py. Do not edit. -->
# Results

This page shows how much runs of Shoal learned. Each figure comes from a recorded file, and each section has the
hardware, the versions and the command that repeats the measurement. [performance.md](performance.md) has the speed on
a GPU, and [reliability.md](reliability.md) has the faults that runs survive. This command writes the page:

```bash
python benchmarks/results_page.py
```"""

ABLATIONS = """The base run trains the tiny model of `make demo` for {steps} steps of {batch} rollouts. Each arm changes
one thing, which [arms.yaml](../experiments/ablations/arms.yaml) lists. The task is to reverse three or four random
letters, with the reward 1 or 0. All arms of a seed start from the same supervised warm-up, after which the model copies
the letters about as often as it reverses them. [experiments/ablations](../experiments/ablations/README.md) has the task
and the configuration.

- **last evaluation**: reward on {examples} held-out prompts at temperature 1 after step {steps}. The mean over the
  seeds, with the lowest and the highest seed in brackets.
- **mean of the evaluations**: the mean over the evaluations after steps {evaluated}. A run that learns earlier has a
  higher mean, and the mean has less noise than the last evaluation.
- **difference to base**: the difference of this mean, paired by seed, with the 95 % interval of Student's t
  distribution. A difference is bold if its interval does not contain 0. Losses with 8 updates per step are compared
  with `masked, 8 updates`, which itself is compared with the base run.
- **steps to {threshold}**: the first evaluation with at least this reward, for each seed; – = not reached.
- **rollouts per step**: including those that replace zero-variance groups.
- **CPU seconds**: CPU time of one run on one thread, including loading and evaluations. Wall time cannot be compared,
  because other programs were running."""

READING = """### What one can conclude

- {noise}
- {clear}
- {equal}
{fewer}- The arms with `max_async_level` above 0 or `weight_sync_interval` above 1 sample and train at the same time, so
  repeating them may give different figures.
- {stale}
- `skip`, `keep` and the arms with batch statistics replace no groups, so they sample fewer rollouts than the base run.
  Batch statistics imply `keep`: compare them with `keep`. The second LoRA arm also changes the learning rate.
- The ablations show whether an option runs and whether it prevents learning. They do not show which option is best for
  a real model. The model is tiny, a completion has about seven tokens, a run has {steps} steps, and no arm has a
  learning rate of its own. Stale rollouts, long completions and sparse rewards matter more in real runs."""

MISSING = (
    "GSM8K with a pretrained model on one GPU, three seeds with intervals: `python benchmarks/gsm8k.py`",
    "TRL on one GPU: `python benchmarks/peers/compare.py OUT.json --profile h200`",
    "the same task in verl, prime-rl and Unsloth on the same machine",
    "the largest model that trains on GPUs of 8, 16, 24, 48 and 80 GB: `python benchmarks/memory_ladder.py`",
    "seeds, intervals and ablations on a GPU: every GPU result on this page is one run",
)


def read(folder: Path, name: str) -> Result | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def source(name: str, result: Result, *commands: str) -> str:
    """The recorded file, the machine and the exact commands."""
    found = result["machine"]
    device = found.get("gpu", "no GPU")
    packages = ("torch", "transformers", "peft", "triton")
    versions = ", ".join(f"{package} {found[package]}" for package in packages if package in found)
    lines = "\n".join(commands)
    return (
        f"[`{name}.json`](../benchmarks/results/{name}.json): {device}, {found['cores']} CPU cores, "
        f"python {found['python']}, {versions}, {found['date']}.\n\n```text\n{lines}\n```"
    )


def ablations(result: Result) -> Iterator[str]:
    found = rows(result)
    config = result["config"]
    seeds = sorted({run["seed"] for run in result["runs"]})
    evaluated = [step for step in found[0].runs[0]["held_out"] if step != "0"]
    steps = config["train"]["max_steps"]
    yield ABLATIONS.format(
        steps=steps, batch=config["orch"]["batch_size"], examples=config["orch"]["eval"]["num_examples"],
        evaluated=", ".join(evaluated), threshold=f"{THRESHOLD:g}",
    )  # fmt: skip
    yield arms_table(found)
    if errors := [run for run in result["runs"] if "error" in run]:
        yield "\n".join(f"- `{run['arm']}`, seed {run['seed']}, failed: {run['error']}" for run in errors)
    yield "![Held-out reward of the arms over the steps](images/results_ablations.svg)"
    yield "The lines are means over the seeds, and the areas reach from the lowest to the highest seed."
    yield READING.format(
        noise=noise(found), clear=clear(found), equal=equal(found), fewer=fewer(found, len(seeds)), stale=stale(found),
        steps=steps,
    )  # fmt: skip
    yield result.get("note", "")
    words = shlex.join(["--seeds", *map(str, seeds)])
    yield source("ablations_cpu", result, f"OMP_NUM_THREADS={result['threads']} python benchmarks/ablations.py {words}")


def noise(found: list[Row]) -> str:
    """How far runs of one configuration and one warm-up differ."""
    same = [row for row in found if row.group in (BASE, SAME)]
    by_seed: dict[int, list[float]] = {}
    for row in same:
        for run in row.runs:
            by_seed.setdefault(run["seed"], []).append(after_start(run))
    spreads = [max(values) - min(values) for values in by_seed.values()]
    return wrap(
        f"The base run and {len(same) - 1} repetitions with other sampling seeds differ by up to "
        f"{reward(max(spreads))} within a seed, although nothing else changes. A difference of this size, or one whose "
        "interval contains 0, is not statistically significant."
    )


def clear(found: list[Row]) -> str:
    """With one seed there is no interval."""
    compared = [row for row in found if row.difference and len(row.runs) > 1]
    chance = f"{0.05 * len(compared):.1f}"
    return wrap(
        f"Of {len(compared)} intervals, {chance} are expected to exclude 0 by chance. These exclude it: "
        f"{names([row for row in compared if row.difference and row.difference.excludes_zero])}."
    )


def equal(found: list[Row]) -> str:
    base = {run["seed"]: run["held_out"] for run in found[0].runs}
    same = [row for row in found[1:] if all(run["held_out"] == base.get(run["seed"]) for run in row.runs)]
    return wrap(
        f"These arms have exactly the held-out rewards of the base run: {names(same)}. With two updates per step "
        "almost no ratio reaches a bound, and within the bounds these losses have the same gradient."
    )


def fewer(found: list[Row], seeds: int) -> str:
    few = [row for row in found if len(row.runs) < seeds]
    return f"- {wrap(f'These arms have results for fewer than {seeds} seeds: {names(few)}.')}\n" if few else ""


def stale(found: list[Row]) -> str:
    """The age that the rollouts really had; it was not recorded for every run."""
    ages = [
        f"{run['staleness_mean']:.1f} with `{row.name}` (seed {run['seed']})"
        for row in found
        for run in row.runs
        if run.get("staleness_mean")
    ]
    return wrap(
        "`max_async_level` is an upper bound. On one busy core, sampling rarely runs that far ahead. The mean age of "
        f"the trained tokens, in weight versions, was {', '.join(ages) or 'not recorded'}."
    )


def names(found: list[Row]) -> str:
    return ", ".join(f"`{row.name}`" for row in found) or "none"


def wrap(text: str) -> str:
    """A list item."""
    return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def demo(result: Result) -> Iterator[str]:
    yield (
        "`shoal demo` trains a tiny model on `reverse-text`, first with supervised steps and then with GRPO "
        "([start.md](start.md#the-demo))."
    )
    steps = list(next(iter(result["seeds"].values()))["curve"])
    lines = [
        [seed, *(reward(run["curve"][step]) for step in steps), f"+{reward(run['lift'])}", f"{run['seconds']:.0f} s"]
        for seed, run in result["seeds"].items()
    ]
    yield table(["seed", *(f"held-out, step {step}" for step in steps), "GRPO added", "whole run"], lines)
    lifts = [run["lift"] for run in result["seeds"].values()]
    yield (
        f"GRPO added {reward(statistics.mean(lifts))} on average over {len(lifts)} seeds "
        f"({reward(min(lifts))} to {reward(max(lifts))})."
    )
    yield source("demo_cpu", result, "python benchmarks/demo_cpu.py " + " ".join(result["seeds"]))


def tutorial(result: Result) -> Iterator[str]:
    before, after = result["held_out"][0], result["held_out"][-1]
    yield (
        f"The run of the [tutorial](tutorial.md) trains SmolLM2-135M-Instruct on a CPU. In {len(result['steps'])} "
        f"steps the held-out reward rose from {reward(before)} to {reward(after)}. The steps took "
        f"{result['seconds']:.0f} s. This is one run with one seed."
    )
    rewards = [[str(step["step"]), reward(step["reward/mean"])] for step in result["steps"]]
    yield table(["step", "reward"], rewards)
    yield result["note"]
    yield source("tutorial_cpu", result, result["command"])


def arithmetic(result: Result) -> Iterator[str]:
    yield (
        "SmolLM2-135M-Instruct learns the built-in task `arithmetic` with the loss `grpo`. Each line is one run with "
        "one seed."
    )
    heads = sorted({step["step"] for run in result["runs"].values() for step in held_out_steps(run)})
    lines = []
    for name, run in result["runs"].items():
        values = {step["step"]: step["eval/arithmetic/mean"] for step in held_out_steps(run)}
        lines.append([name, *(reward(values[step]) if step in values else "" for step in heads)])
    yield table(["learning rate", *(f"step {step}" for step in heads)], lines)
    yield result["note"]
    yield source("smollm2_arithmetic_h200", result, *(shlex.join(run["command"]) for run in result["runs"].values()))


def held_out_steps(run: Result) -> list[Result]:
    return [step for step in run["steps"] if "eval/arithmetic/mean" in step]


def arithmetic_graphs(result: Result) -> Iterator[str]:
    values = [f"{reward(step['eval/arithmetic/mean'])} (step {step['step']})" for step in held_out_steps(result)]
    yield (
        f"The run with a learning rate of 1e-5, repeated with CUDA graphs for training passes, took "
        f"{result['seconds']:.0f} s with loading. Held-out rewards: {', '.join(values)}. {result['note']}"
    )
    yield source("smollm2_arithmetic_graphs_h200", result, shlex.join(result["command"]))


PEERS = """TRL {trl} (`GRPOTrainer`) and Shoal train the same model on the same task: `arithmetic` with two numbers of
two digits, and the tiny model of `make demo` after {warm_up} supervised steps, which starts with a held-out reward of
{start}. Both use 16 prompts with 8 rollouts per step, the loss `dapo`, fp32, a constant learning rate and one thread.
[settings.yaml](../benchmarks/peers/settings.yaml) lists all parameters. First, each setting was run with one seed.
The table shows which settings were repeated with other seeds. The best setting of each system is bold.

- **CPU seconds** count all threads and processes from the start of the command, because the machine was busy.
  `peers_cpu.json` has the wall-clock seconds as well.
- **to .8**, **.85**, **.9**: the CPU seconds until the first evaluated checkpoint with this held-out reward. The
  weights are saved every {save} steps, and afterwards the same code evaluates the checkpoints of both systems. A dash
  means: not reached in {steps} steps.
- **first step**: from the command to the end of the first optimizer step.
- **peak memory**: the sum of the proportional set sizes of all processes."""


def peers(result: Result) -> Iterator[str]:
    profile = result["profile"]
    yield PEERS.format(
        trl=result["versions"]["trl"], warm_up=profile["warm_up"]["steps"], start=reward(result["start_reward"]),
        save=profile["save_steps"], steps=profile["steps"],
    )  # fmt: skip
    targets = [f"{target:g}" for target in profile["targets"]]
    lines = []
    for kind in profile["systems"]:
        for run in sorted((run for run in result["runs"] if run["system"] == kind), key=order_of(result, kind)):
            best = run["setting"] == result["best"][kind]
            name = f"**{run['setting']}**" if best else run["setting"]
            if "error" in run:
                lines.append([SYSTEM_NAMES[kind], name, str(run["seed"]), "failed"])
                continue
            times = [run["to"][target] for target in targets]
            lines.append([
                SYSTEM_NAMES[kind], name, str(run["seed"]), reward(list(run["held_out"].values())[-1]),
                *(f"{time[1]:.0f}" if time else "–" for time in times), f"{run['step_cpu_s']:.2f}",
                f"{run['first_step_cpu_s']:.1f}", f"{run['peak_mib']} MiB",
            ])  # fmt: skip
    heads = ["system", "setting", "seed", "last held-out reward", *(f"CPU s to {name[1:]}" for name in targets)]
    yield table([*heads, "CPU s per step", "CPU s to first step", "peak memory"], [pad(line, 10) for line in lines])
    if errors := [run for run in result["runs"] if "error" in run]:
        yield "\n".join(
            wrap(f"- {SYSTEM_NAMES[run['system']]}, {run['setting']}, failed: `{run['error']}`") for run in errors
        )
    yield phases(result)
    yield result["note"] or ""
    yield source("peers_cpu", result, *INSTALL_PEERS, result["command"])


SYSTEM_NAMES = {"trl": "TRL", "shoal": "Shoal"}
INSTALL_PEERS = ("python benchmarks/peers/install.py",)


def order_of(result: Result, kind: str) -> Callable[[Result], tuple[int, int]]:
    names = list(result["profile"]["systems"][kind]["settings"])
    return lambda run: (names.index(run["setting"]), run["seed"])


def pad(cells: list[str], width: int) -> list[str]:
    return cells + [""] * (width - len(cells))


def phases(result: Result) -> str:
    """Wall-clock seconds, so the shares of one system are more useful than the seconds."""
    lines = []
    for kind, setting in result["best"].items():
        runs = [run for run in result["runs"] if (run["system"], run["setting"]) == (kind, setting) and "step_s" in run]
        if runs:
            medians = [statistics.median(run["phases_s"][phase] for run in runs) for phase in PEER_PHASES]
            step = statistics.median(run["step_s"] for run in runs)
            rate = statistics.median(run["rollout_tokens_per_s"] for run in runs)
            lines.append([SYSTEM_NAMES[kind], *(f"{value:.2f} s" for value in (step, *medians)), f"{rate:,.0f}"])
    heads = ["best setting, wall clock", "step", *PEER_PHASES, "sampled tokens/s"]
    return table(heads, lines)


PEER_PHASES = ("rollout", "reward", "train")


def tasks(result: Result) -> Iterator[str]:
    yield (
        "The tiny model of `make demo` learns tasks after a supervised warm-up. Each folder in "
        "[experiments](../experiments) has the warm-up, the configuration and the GPU command of one task. Cells have "
        "the step, the CPU seconds and the wall-clock minutes to a held-out reward; – = not reached."
    )
    names = [f"{target:g}" for target in (0.6, 0.8, 0.9)]
    lines = []
    for run in sorted(result["runs"], key=lambda run: (list(result["configs"]).index(run["task"]), run["seed"])):
        task = f"[{run['task']}](../experiments/{run['task']}/README.md)"
        if "error" in run:
            lines.append(pad([task, str(run["seed"]), "failed"], 7))
            continue
        steps = str(result["configs"][run["task"]]["grpo"]["train"]["max_steps"])
        cells = [
            f"step {at[0]}, {at[3]:.0f} CPU s, {at[2] / 60:.1f} min" if at else "–" for at in map(run["to"].get, names)
        ]
        first, last = run["curve"][0][1], run["curve"][-1][1]
        lines.append([task, str(run["seed"]), f"{reward(first)} → {reward(last)}", steps, *cells])
    yield table(["task", "seed", "held-out reward", "steps", *(f"to {name[1:]}" for name in names)], lines)
    yield result["note"] or ""
    yield source("tasks_cpu", result, result["command"])


# Title, recorded file, and how to measure it if the file does not exist.
SECTIONS: tuple[tuple[str, str, Callable[[Result], Iterator[str]], str], ...] = (
    ("## Ablations on a CPU", "ablations_cpu", ablations, "python benchmarks/ablations.py"),
    ("## TRL and Shoal on a CPU", "peers_cpu", peers, "python benchmarks/peers/compare.py OUT.json"),
    ("## Five tasks on a CPU", "tasks_cpu", tasks, "python benchmarks/tasks.py"),
    ("## The demo on a CPU", "demo_cpu", demo, "python benchmarks/demo_cpu.py"),
    ("## The tutorial on a CPU", "tutorial_cpu", tutorial, "python benchmarks/tutorial.py RUN"),
    ("## Arithmetic on one H200", "smollm2_arithmetic_h200", arithmetic, "python benchmarks/gpu_learning.py"),
    ("### With CUDA graphs", "smollm2_arithmetic_graphs_h200", arithmetic_graphs, "python benchmarks/gpu_learning.py"),
)


def page(folder: Path) -> str:
    parts = [INTRO]
    for title, name, write, command in SECTIONS:
        result = read(folder, name)
        parts.append(title)
        parts += write(result) if result else [f"Not measured yet: `{command}`."]
    parts += ["## Not measured yet", "\n".join(f"- {text}" for text in MISSING)]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    made.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    made.add_argument("--no-plots", action="store_true")
    asked = made.parse_args()
    asked.page.write_text(page(asked.results), "utf-8")
    result = read(asked.results, "ablations_cpu")
    if result and not asked.no_plots:
        import ablations_plots

        ablations_plots.write(rows(result), asked.page.parent / "images" / "results_ablations.svg")


if __name__ == "__main__":
    main()
