"""Five experiments with learning signals on tiny models: how many steps each signal needs, and the same without it.

    python benchmarks/signals.py              # runs what is not recorded yet; 45 minutes on one core
    python benchmarks/signals.py --page       # writes the table into docs/learning-signals.md

Both arms of an experiment start from the same weights and have the same batch, optimizer and limit of steps. Each arm
takes the learning rate of `GRID` that does best with seed 0; seeds 1 to 3 are reported. An experiment has a target for
the mean of one metric over the last `WINDOW` steps, and a run stops at the step that reaches it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import write_result
from performance_tables import table

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "signals_cpu.json"
PAGE = ROOT / "docs" / "learning-signals.md"
TASKS = ROOT / "benchmarks" / "signals_tasks.py"

SEARCH_SEED, SEEDS = 0, (1, 2, 3)
GRID = (2e-4, 5e-4, 1e-3)
WINDOW = 5
KEEP = {"groups": {"uniform": "keep"}}  # the bonus also acts on groups that are solved
BONUS = {"target": 0.6, "gain": 1.0}  # the other keys have their defaults
Curve = list[float]


@dataclass(frozen=True)
class Arm:
    name: str
    env: str
    train: dict[str, Any] = field(default_factory=dict)
    orch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """`arms`: first the signal, then the same without it."""

    name: str
    title: str
    task: str
    arms: tuple[Arm, Arm]
    limit: int  # steps
    target: float | None  # of `metric`, with a teacher the share of its reward; None: every run takes all steps
    metric: str = "reward/raw_mean"
    floor: float | None = None  # for the entropy, in nats
    needs_teacher: bool = False
    max_tokens: int = 8
    batch_size: int = 64
    length: int = 2  # letters of a code


EXPERIMENTS = (
    Experiment(
        "distillation", "Teacher", "two letters, both right",
        (
            Arm("distillation", "Exact", {"teacher": {"model": "TEACHER", "reward_weight": 0}}),
            Arm("GRPO", "Exact"),
        ),
        limit=260, target=0.9, needs_teacher=True,
    ),
    Experiment(
        "turns", "Rewards per turn", "two turns, and only the first one matters",
        (
            Arm("`credit: turn`", "FirstTurn", orch={"advantage": {"credit": "turn"}}),
            Arm("`credit: outcome`", "FirstTurn"),
        ),
        limit=60, target=0.35, max_tokens=36, batch_size=16,
    ),
    Experiment(
        "chance", "Rewards per turn", "two turns, and the reward of the second one is chance",
        (
            Arm("`credit: turn`", "ChanceTurn", orch={"advantage": {"credit": "turn"}}),
            Arm("`credit: outcome`", "ChanceTurn"),
        ),
        limit=60, target=0.35, metric="reward/part/first", max_tokens=36, batch_size=16,
    ),
    Experiment(
        "ranking", "Ranking reward", "a judge compares the answers of a group",
        (Arm("ranking", "Ranked"), Arm("constant", "Constant")),
        limit=40, target=0.5, metric="reward/part/quality",
    ),
    Experiment(
        "entropy", "Entropy bonus", "two letters, each of them one of four",
        (
            Arm("bonus", "AnyOf", {"loss": {"type": "grpo", "entropy": BONUS}}, KEEP),
            Arm("plain", "AnyOf", {}, KEEP),
        ),
        limit=60, target=None, floor=0.1,
    ),
    Experiment(
        "feedback", "Self-distillation", "two letters, both right, with the answer as feedback",
        (
            Arm("self-distillation", "Feedback", {"teacher": {"self": True, "tau": 0.05}}),
            Arm("GRPO", "Feedback"),
        ),
        limit=120, target=0.5,
    ),
)  # fmt: skip


@asynccontextmanager
async def watched(build: Any, run: Any, workspace: Any, steps: list[dict[str, float]], done: Callable[[], bool]):
    """The loop of a run, which appends the metrics of each step to `steps` and is interrupted when `done`."""
    async with build(run, workspace) as loop:
        log = loop.parts.observer.log

        def observe(step: int, metrics: dict[str, float]) -> None:
            log(step, metrics)
            steps.append(dict(metrics))
            if done():
                loop.interrupt()

        loop.parts.observer.log = observe
        yield loop


def train(config: dict[str, Any], done: Callable[[list[dict[str, float]]], bool]) -> tuple[list[dict[str, float]], str]:
    """Metrics per step, and how the run ended."""
    from shoal import api
    from shoal.build.load import Run, load
    from shoal.build.parts import build_colocated
    from shoal.config.load import load_data
    from shoal.core.errors import Interrupted, StoppedByPolicy

    steps: list[dict[str, float]] = []
    run: Run = load(load_data(config))
    try:
        api.train(run, lambda run, workspace: watched(build_colocated, run, workspace, steps, lambda: done(steps)))
    except Interrupted:
        if not done(steps):
            raise  # by a signal
        return steps, "target"
    except StoppedByPolicy as error:
        return steps, str(error).split(";")[0]
    return steps, "limit"


def supervise(model: Path, folder: Path, seed: int, steps: int, rows: Iterable[str], learning_rate: float) -> Path:
    """Supervised training; returns the trained weights, also those of an earlier call."""
    from shoal import api
    from shoal.config.resolve import resolve_supervised
    from shoal.config.schema import SftConfig

    if not (folder / "final").exists():
        data = folder.with_name(f"{folder.name}-data")
        data.mkdir()
        (data / "train.jsonl").write_text("".join(rows))
        unseen = [{"role": "user", "content": "unseen"}, {"role": "assistant", "content": "a"}]
        (data / "eval.jsonl").write_text(json.dumps({"messages": unseen}) + "\n")  # no key is held out
        settings = {
            "train": {
                **common(model, folder, seed, steps, learning_rate),
                "lr_scheduler_type": "linear", "warmup_steps": 10, "adam_beta2": 0.98, "logging_steps": steps,
            },
            "dataset": {"path": str(data)},
            "batch_size": 64,
        }  # fmt: skip
        api.sft(resolve_supervised(SftConfig.model_validate(settings)))
    return folder / "final"


def common(model: Path, folder: Path, seed: int, steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "model": str(model), "output_dir": str(folder), "seed": seed, "max_steps": steps, "save_steps": steps,
        "learning_rate": learning_rate, "device": "cpu", "sequence_len": 512, "per_device_train_batch_size": 64,
    }  # fmt: skip


def make_student(work: Path, seed: int, length: int) -> Path:
    """Random weights, then supervised steps: it repeats an answer after a hint, and else answers random letters."""
    from signals_tasks import warm_up_rows

    from shoal import api

    if not (work / f"random-{seed}").exists():
        api.make_model("tiny", work / f"random-{seed}", seed)
    hints = warm_up_rows(seed, 60 * 64, length, hinted=1.0)
    hinted = supervise(work / f"random-{seed}", work / f"hints-{length}-{seed}", seed, 60, hints, 3e-3)
    mixed = warm_up_rows(seed, 40 * 64, length, hinted=0.5)
    return supervise(hinted, work / f"student-{length}-{seed}", seed, 40, mixed, 1e-3)


def make_teacher(work: Path, seed: int, length: int) -> Path:
    from signals_tasks import Exact, solved_rows

    rows = solved_rows(Exact(length, seed), 60 * 64)
    return supervise(make_student(work, seed, length), work / f"teacher-{length}-{seed}", seed, 60, rows, 1e-3)


def teacher_reward(work: Path, seed: int, length: int) -> float:
    """At temperature 1, over 32 answers per key."""
    from shoal import api

    found = api.evaluate(
        model=str(make_teacher(work, seed, length)), env=f"{TASKS}:Exact", env_args={"length": length, "seed": seed},
        num_examples=8, rollouts_per_example=32, temperature=1.0, max_tokens=8, device="cpu",
    )  # fmt: skip
    return next(value for name, value in found.items() if name.endswith("/mean"))


def config_of(experiment: Experiment, arm: Arm, seed: int, learning_rate: float, work: Path) -> dict[str, Any]:
    changes = json.loads(
        json.dumps(arm.train).replace("TEACHER", str(work / f"teacher-{experiment.length}-{seed}" / "final"))
    )
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=work)) / "run"
    settings = common(make_student(work, seed, experiment.length), folder, seed, experiment.limit, learning_rate)
    return {
        "train": {
            **settings, "lr_scheduler_type": "constant", "warmup_steps": 5, "weight_decay": 0.0, "logging_steps": 50,
            "loss": {"type": "grpo"}, **changes,
        },
        "orch": {
            "env": [{"id": f"{TASKS}:{arm.env}", "args": {"length": experiment.length, "seed": seed}}],
            "batch_size": experiment.batch_size, "rollouts_per_example": 8,
            "sampling": {"max_tokens": experiment.max_tokens}, **arm.orch,
        },
    }  # fmt: skip


def moving_mean(values: Curve) -> Curve:
    """The mean of the last WINDOW values, from the first full window on."""
    return [sum(values[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(values) + 1)]


def measure(experiment: Experiment, arm: Arm, seed: int, learning_rate: float, work: Path) -> dict[str, Any]:
    """One run: its steps, the step that reached the target, and the curves."""
    target, name = experiment.target, experiment.metric
    if target is not None and experiment.needs_teacher:
        target = round(target * teacher_reward(work, seed, experiment.length), 4)

    def reached(steps: list[dict[str, float]]) -> bool:
        means = moving_mean([metrics[name] for metrics in steps])
        return target is not None and bool(means) and means[-1] >= target

    start = time.monotonic()
    steps, end = train(config_of(experiment, arm, seed, learning_rate, work), reached)
    curves = {key: [round(metrics[key], 4) for metrics in steps if key in metrics] for key in (name, "policy/entropy")}
    return {
        "target": target,
        "end": end,
        "steps": len(steps),
        "reached": len(steps) if end == "target" else None,
        "final": last(curves[name]),
        "lowest_entropy": round(min(moving_mean(curves["policy/entropy"]), default=0.0), 4),
        "rollouts": int(sum(metrics["batch/rollouts"] for metrics in steps)),
        "seconds": round(time.monotonic() - start, 1),
        "curves": curves,
    }


def last(curve: Curve) -> float:
    return round(sum(curve[-WINDOW:]) / len(curve[-WINDOW:]), 4)


def rank(run: dict[str, Any]) -> tuple[float, float]:
    """For the search: the fewest steps to the target, then the highest value at the end."""
    return (-(run["reached"] or float("inf")), run["final"])


def key(arm: Arm, seed: int, learning_rate: float) -> str:
    return f"{arm.name}, seed {seed}, {learning_rate:g}"


def record(work: Path, only: list[str], out: Path) -> None:
    """Run what `out` does not have yet; it is written after each run."""
    found = json.loads(out.read_text()) if out.exists() else {}
    settings = {"grid": GRID, "window": WINDOW, "search_seed": SEARCH_SEED, "seeds": SEEDS}
    runs: dict[str, Any] = found.get("runs", {})
    for experiment in (one for one in EXPERIMENTS if not only or one.name in only):
        for arm in experiment.arms:
            of_arm = runs.setdefault(experiment.name, {})

            def run(seed: int, rate: float, experiment=experiment, arm=arm, of_arm=of_arm) -> dict[str, Any]:
                name = key(arm, seed, rate)
                if name not in of_arm:
                    of_arm[name] = measure(experiment, arm, seed, rate, work)
                    described = {one.name: asdict(one) for one in EXPERIMENTS}
                    write_result(out, {**settings, "experiments": described, "runs": runs})
                    shown = {k: v for k, v in of_arm[name].items() if k != "curves"}
                    print(f"RECORDED {experiment.name}: {name}: {shown}", file=sys.stderr, flush=True)
                return of_arm[name]

            for rate in GRID:
                run(SEARCH_SEED, rate)
            for seed in SEEDS:
                run(seed, best_rate(of_arm, arm))


def best_rate(runs: dict[str, Any], arm: Arm) -> float:
    return max(GRID, key=lambda rate: rank(runs[key(arm, SEARCH_SEED, rate)]))


def reported(runs: dict[str, Any], arm: Arm) -> list[dict[str, Any]]:
    return [runs[key(arm, seed, best_rate(runs, arm))] for seed in SEEDS]


def ratio(experiment: Experiment, runs: dict[str, Any]) -> str:
    """Mean steps of the second arm over mean steps of the first. A run that misses the target counts as the limit."""
    first, second = (reported(runs, arm) for arm in experiment.arms)
    if experiment.target is None or not all(run["reached"] for run in first):
        return ""
    missed = not all(run["reached"] for run in second)
    steps = [sum(run["reached"] or experiment.limit for run in arm) for arm in (first, second)]
    return f"{'> ' if missed else ''}{steps[1] / steps[0]:.1f}"


def rows_of(experiment: Experiment, runs: dict[str, Any]) -> list[list[str]]:
    rows = []
    for at, arm in enumerate(experiment.arms):
        of_seeds = reported(runs, arm)
        steps = [str(run["reached"] or f"– ({run['steps']})") for run in of_seeds]
        rows.append(
            [
                "" if at else f"{experiment.title}: {experiment.task}",
                "" if at else goal(experiment),
                arm.name,
                f"{best_rate(runs, arm):g}",
                "" if experiment.target is None else ", ".join(steps),
                "" if at else ratio(experiment, runs),
                ", ".join(f"{run['final']:.2f}" for run in of_seeds),
                ", ".join(
                    f"{run['lowest_entropy']:.2f}" if run["curves"]["policy/entropy"] else "–" for run in of_seeds
                ),
            ]
        )
    return rows


def goal(experiment: Experiment) -> str:
    if experiment.target is None:
        return f"none, {experiment.limit} steps"
    of = " of the teacher" if experiment.needs_teacher else ""
    return f"{experiment.target:g}{of} within {experiment.limit} steps"


def section(result: dict[str, Any]) -> str:
    """The generated part of the page."""
    machine, runs = result["machine"], result["runs"]
    heads = [
        "Experiment", "Target", "Arm", "Learning rate", "Steps to the target", "Ratio", "Value at the end",
        "Lowest entropy",
    ]  # fmt: skip
    return "\n".join(
        [
            table(heads, [row for one in EXPERIMENTS for row in rows_of(one, runs[one.name])]),
            "",
            f"Measured on {machine['date']} with one thread per run and torch {machine['torch']}",
            f"([signals_cpu.json](../benchmarks/results/{RESULT.name})).",
        ]
    )


def write_page(page: str, result: dict[str, Any]) -> str:
    block = re.compile(r"(<!-- signals: begin[^>]*-->\n).*?(<!-- signals: end -->)", re.DOTALL)
    if len(block.findall(page)) != 1:
        raise SystemExit("docs/learning-signals.md has no pair of markers for the table")
    return block.sub(lambda found: f"{found[1]}\n{section(result)}\n\n{found[2]}", page)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("experiment", nargs="*", help="only these")
    made.add_argument("--page", action="store_true", help="only write the table")
    made.add_argument("--out", type=Path, default=RESULT)
    made.add_argument("--work", type=Path, help="folder for models and runs; default: a temporary one")
    asked = made.parse_args()
    if asked.page:
        PAGE.write_text(write_page(PAGE.read_text("utf-8"), json.loads(RESULT.read_text())), "utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        work = asked.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        record(work, asked.experiment, asked.out)


if __name__ == "__main__":
    main()
