"""The gain of asynchronous training: rollouts per second and idle time at levels 0, 1 and 4.

python benchmarks/asynchronous.py OUT.json [--layouts …] [--split] [--gpu SHAPE] [--quiet SECONDS] [--smoke]

Simulated: the real loop with an engine and a policy with fixed delays. Measured: a tiny model on the CPU, co-located
(`shoal grpo`, sampling and training alternate on one device) and with the embedded engine in a separate process, one
thread each. For the latter, the simulation with the delays measured at level 0 gives the expected gain. `--split` adds
`shoal grpo --layout split`. `--quiet` waits up to this long before each run for an idle machine. `--gpu` measures a
random model of that shape on one GPU instead, which the processes of a split run share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from machine import print_table, wait_until_quiet, write_result
from overlapped import run_overlapped
from simulated import Outcome, Shape, simulate

from shoal.core.types import Request
from shoal.runs.run_dir import read_metrics

ROOT = Path(__file__).parents[1]
LEVELS = (0, 1, 4)
LAYOUTS = ("simulated", "engine process", "co-located")
EQUAL_S = 0.4
LIMIT_S = 900
REPEATS = 3  # repetitions on a machine with other work; the fastest counts


def even(request: Request) -> float:
    return EQUAL_S


def tailed(request: Request) -> float:
    """Half of the time for most rollouts, twice the time for a few: the batch waits for its last rollout."""
    place = request.sampling.seed % 1000 / 1000
    return EQUAL_S * (0.5 + 1.5 * place**8)


SIMULATED = {"generation = training": even, "generation = training, few long answers": tailed}


def simulated_rows(steps: int) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in SIMULATED.items():
        for level in LEVELS:
            shape = Shape(32, 4, steps, EQUAL_S, seconds, level=level)
            rows.append({"layout": "simulated", "name": name, "level": level, **_figures(_simulated(shape))})
    return _with_gain(rows)


def _simulated(shape: Shape, virtual: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(shape, Path(folder) / "run", virtual=virtual)


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "rollouts_per_s": outcome.rollouts_per_s,
        "wall_s": outcome.wall_s,
        "sampler_idle": outcome.sampler_idle,
        "trainer_idle": outcome.trainer_idle,
    }


def _with_gain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the gain over level 0 of the same layout and name."""
    base = {(row["layout"], row["name"]): row["rollouts_per_s"] for row in rows if row["level"] == 0}
    return [{**row, "gain": row["rollouts_per_s"] / base[row["layout"], row["name"]]} for row in rows]


@dataclass(frozen=True)
class Bench:
    """The measured layouts and the device."""

    folder: Path
    smoke: bool
    quiet_s: float
    shape: str | None  # the shape of a model on a GPU; None = the tiny model on the CPU

    @property
    def name(self) -> str:
        return f"{self.shape}, GPU" if self.shape else "tiny model, CPU"

    @property
    def repeats(self) -> int:
        return 1 if self.smoke or self.shape else REPEATS

    def make_model(self) -> None:
        where = str(self.folder / "model")
        words = [where, "--shape", self.shape] if self.shape else ["tiny", where]
        subprocess.run([sys.executable, "-m", "shoal", "make-model", *words], check=True)


def make_config(bench: Bench) -> dict[str, Any]:
    """Answers of one length, so that the rollouts of a step end together.

    With a vocabulary of real size, random weights rarely sample the end token. The tiny model needs min_tokens.
    """
    tokens = 16 if bench.smoke else 256 if bench.shape else 96
    least = {} if bench.shape else {"min_tokens": tokens}
    rollouts = 128 if bench.shape else 32
    environment = {"id": f"{ROOT}/benchmarks/random_text.py:Evens", "args": {"characters": 40}}
    return {
        "train": {
            "model": str(bench.folder / "model"), "max_steps": 2 if bench.smoke else 12, "learning_rate": 1e-5,
            "device": "cuda" if bench.shape else "cpu", "sequence_len": 2304 if bench.shape else 1024,
            "save_steps": 0, "recompute_old": True, "loss": {"type": "grpo"},
        },
        "orch": {
            "env": [environment], "batch_size": rollouts, "rollouts_per_example": 8, "groups": {"uniform": "keep"},
            "sampling": {"max_tokens": tokens, **least},
        },
        "infer": {"max_num_seqs": rollouts},
    }  # fmt: skip


def measured_rows(layout: str, bench: Bench) -> Iterator[dict[str, Any]]:
    """Yields one row per level when it is done."""
    runs = {"co-located": run_command, "split": run_command, "engine process": run_overlapped}
    rows = []
    for level in LEVELS:
        found = []
        for attempt in range(bench.repeats):
            config, folder = make_config(bench), bench.folder
            config["orch"]["max_async_level"] = level
            config["train"]["output_dir"] = str(folder / f"{layout.replace(' ', '-')}-{level}-{attempt}")
            idle_before = wait_until_quiet(bench.quiet_s) if bench.quiet_s else None
            found.append({**runs[layout](config, folder, layout), "idle_before": idle_before})
        best = max(found, key=lambda row: row["rollouts_per_s"])
        all_rates = [round(row["rollouts_per_s"], 2) for row in found]
        rows.append({"layout": layout, "name": bench.name, "level": level, **best, "repeats": all_rates})
        yield _with_gain(rows)[-1]


def run_command(config: dict[str, Any], folder: Path, layout: str) -> dict[str, Any]:
    """`shoal grpo` on both cores. Idle is the share of time in which a part had nothing to do."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "shoal", "grpo", str(file)]
    command += ["--layout", "split"] if layout == "split" else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    steps = read_metrics(Path(config["train"]["output_dir"]))
    wall_s = sum(step["time/step"] for step in steps)
    busy = {name: sum(step.get(f"time/{name}", 0.0) for step in steps) for name in ("rollout", "train")}
    return {
        "rollouts_per_s": sum(step["batch/used"] for step in steps) / wall_s,
        "wall_s": wall_s,
        "sampler_idle": max(0.0, 1 - busy["rollout"] / wall_s),
        "trainer_idle": max(0.0, 1 - busy["train"] / wall_s),
        "sync_s": sum(step.get("time/sync", 0.0) for step in steps) / len(steps),
    }


def predicted_rows(measured: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The simulation with the delays of level 0 and a virtual clock, next to the measurement."""
    base = next(row for row in measured if row["level"] == 0)
    shape = Shape(32, 8, steps, base["train_s"], lambda _: base["generate_s"], tokens=96)
    rows = []
    for row in measured:
        expected = _simulated(replace(shape, level=row["level"]), virtual=True).rollouts_per_s
        rows.append({**row, "predicted_rollouts_per_s": expected, "of_predicted": row["rollouts_per_s"] / expected})
    return rows


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    made.add_argument("--split", action="store_true", help="also measure `shoal grpo --layout split`")
    made.add_argument("--gpu", metavar="SHAPE", help="a model of this shape on the GPU, such as qwen2.5-0.5b")
    made.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="wait for an idle machine")
    made.add_argument("--smoke", action="store_true", help="few short steps, to see that it runs")
    asked = made.parse_args()
    rows = simulated_rows(3 if asked.smoke else 20) if "simulated" in asked.layouts else []

    def write() -> None:
        write_result(asked.out, {"smoke": asked.smoke, "rows": rows})

    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), asked.smoke, asked.quiet, asked.gpu)
        bench.make_model()
        write()
        for layout in [*asked.layouts, *(["split"] if asked.split else [])]:
            if layout != "simulated":
                first = len(rows)
                for row in measured_rows(layout, bench):
                    rows.append(row)
                    write()
                if layout == "engine process":
                    rows[first:] = predicted_rows(rows[first:], make_config(bench)["train"]["max_steps"])
                    write()
    columns = ["layout", "level", "rollouts_per_s", "gain", "sampler_idle", "trainer_idle", "sync_s", "of_predicted"]
    print_table("running ahead", rows, columns)


if __name__ == "__main__":
    main()
