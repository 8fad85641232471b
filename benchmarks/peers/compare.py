"""Trains the same model with TRL and with Shoal on the same task, and measures time, memory and held-out reward.

    python benchmarks/peers/compare.py OUT.json [--profile cpu] [--seeds 1 2 3] [--minutes M] [--smoke]
    python benchmarks/peers/compare.py OUT.json --profile h200 --model SMOLLM2_FOLDER --vllm-packages FOLDER

`settings.yaml` has the profiles: task, model, and the settings that are tried for each system. The systems take turns,
so that other programs on the machine disturb all of them equally. Each run is a new process, measured from outside.
The weights of every few steps are saved, and afterwards all of them are evaluated by the same code (held_out.py). A
repeated command continues with the missing runs. `install.py` creates the Python of TRL.

The profile `cpu` and `--smoke` have been run. The profile `h200` has not been run. A test checks its keys of Shoal;
TRL has not checked its arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from install import FOLDER, TRL, install  # noqa: E402
from machine import write_result  # noqa: E402
from processes import Measured, measure  # noqa: E402
from vllm_environment import VLLM_ENVIRONMENT  # noqa: E402

VLLM = "trl-vllm"
SETTINGS = Path(__file__).with_name("settings.yaml")
CLOCKS = ("wall", "cpu")  # the order of times
PHASES = ("rollout", "reward", "train", "save")
Result = dict[str, Any]


def read_profile(name: str, smoke: bool = False) -> Result:
    """A profile; a system that is `like` another one has its settings, with further common keys."""
    profile = yaml.safe_load(SETTINGS.read_text("utf-8"))[name]
    systems = profile["systems"]
    for system in systems.values():
        if like := system.pop("like", None):
            without = system.pop("without", [])
            system["common"] = systems[like]["common"] | system["common"]
            kept = systems[like]["settings"].items()
            system["settings"] = {key: value for key, value in kept if not any(word in key for word in without)}
    if smoke:
        profile |= {"steps": 2, "save_steps": 1, "held_out": {**profile["held_out"], "rollouts": 1}}
        if "warm_up" in profile:
            profile["warm_up"] |= {"steps": 4, "rows": 600}
        for system in systems.values():
            system["settings"] = dict(list(system["settings"].items())[:1])
    return profile


def load_env(profile: Result) -> Any:
    from shoal.envs.registry import load_environment

    return load_environment(profile["task"]["id"], profile["task"]["args"])


def warm_model(profile: Result, folder: Path) -> Path:
    """The tiny model of the demo after a supervised warm-up on training tasks."""
    from shoal import api
    from shoal.config.load import load_supervised
    from shoal.config.resolve import resolve_supervised
    from shoal.config.rules import check_supervised
    from shoal.config.schema import SftConfig
    from shoal.models.random_models import make_model

    asked = profile["warm_up"]
    make_model(profile["model"], folder / "model", asked["seed"])
    env = load_env({"task": {**profile["task"], "args": {**profile["task"]["args"], "num_train": asked["rows"]}}})
    with (folder / "warm-up.jsonl").open("w", encoding="utf-8") as file:
        for task in env.tasks("train"):
            answer = {"role": "assistant", "content": env.solution(task)}
            file.write(json.dumps({"messages": [*task.messages, answer]}) + "\n")
    config = {
        "train": {
            "model": str(folder / "model"), "output_dir": str(folder / "sft"), "seed": asked["seed"],
            "max_steps": asked["steps"], "learning_rate": asked["learning_rate"], "lr_scheduler_type": "constant",
            "warmup_steps": min(20, asked["steps"]), "adam_beta2": 0.98, "sequence_len": 256, "device": "cpu",
            "per_device_train_batch_size": 64, "logging_steps": 50, "save_steps": 0,
        },
        "dataset": {"path": str(folder / "warm-up.jsonl")},
        "batch_size": 64,
    }  # fmt: skip
    (folder / "sft.yaml").write_text(yaml.safe_dump(config), "utf-8")
    loaded = load_supervised(SftConfig, str(folder / "sft.yaml"))
    check_supervised(loaded.config).raise_errors(loaded.origins)
    api.sft(resolve_supervised(loaded.config))
    return folder / "sft" / "final"


def write_rows(profile: Result, file: Path) -> None:
    """The training tasks as TRL reads them."""
    with file.open("w", encoding="utf-8") as stream:
        for task in load_env(profile).tasks("train"):
            row = {"prompt": [dict(message) for message in task.messages], "answer": str(task.data["answer"])}
            stream.write(json.dumps(row) + "\n")


def trl_command(
    profile: Result, system: Result, name: str, model: Path, folder: Path, rows: Path, seed: int
) -> list[str]:
    arguments = {**system["common"], **system["settings"][name]}
    updates = arguments.pop("updates", 1)
    job = {
        "model": str(model), "rows": str(rows), "folder": str(folder), "seed": seed, "updates": updates,
        "steps": profile["steps"], "save_steps": profile["save_steps"], "arguments": arguments,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), "utf-8")
    return [str(Path(__file__).with_name("trl_run.py")), str(folder / "job.json")]


def shoal_command(profile: Result, system: Result, name: str, model: Path, folder: Path, seed: int) -> list[str]:
    return [
        str(ROOT / "benchmarks" / "peak_memory.py"), str(folder / "peak.json"),
        "shoal", "grpo", f"train.model={model}", f"train.output_dir={folder / 'run'}", f"train.seed={seed}",
        f"train.max_steps={profile['steps']}", f"train.save_steps={profile['save_steps']}",
        "train.save_total_limit=1000", "train.logging_steps=20", f"orch.env=[{json.dumps(profile['task'])}]",
        *system["common"], *system["settings"][name],
    ]  # fmt: skip


def run_once(profile: Result, kind: str, name: str, seed: int, model: Path, python: Path, folder: Path) -> Result:
    """One training run of a system, and the held-out reward of its checkpoints."""
    system = profile["systems"][kind]
    rows = folder / "rows.jsonl"
    if kind == "shoal":
        command = [sys.executable, *shoal_command(profile, system, name, model, folder, seed)]
        lines = folder / "run" / "metrics.jsonl"
    else:
        write_rows(profile, rows)
        command = [str(python), *trl_command(profile, system, name, model, folder, rows, seed)]
        lines = folder / "steps.jsonl"
    load = os.getloadavg()[0]
    measured = measure(command, folder / "log.txt", lines, environment(profile, kind == VLLM), profile["limit_s"])
    found: Result = {"system": kind, "setting": name, "seed": seed, "load_average": round(load, 1)}
    if measured.code:
        tail = (folder / "log.txt").read_text("utf-8", "replace").splitlines()[-3:]
        return {**found, "error": f"ended with {measured.code}: " + " | ".join(tail)[-400:]}
    steps = list(shoal_steps(lines) if kind == "shoal" else trl_steps(lines))
    weights = shoal_weights(folder) if kind == "shoal" else trl_weights(folder, system, name)
    found |= figures(steps, measured, held_out(profile, weights, model))
    if (peak := folder / "peak.json").exists():  # on a GPU
        found["device_memory"] = json.loads(peak.read_text("utf-8"))
    return found


def shoal_steps(file: Path) -> Iterator[Result]:
    for text in file.read_text("utf-8").splitlines():
        line = json.loads(text)
        if line["step"] > 0:
            phases = {phase: line.get(f"time/{phase}", 0.0) for phase in PHASES}
            rate = line.get("throughput/rollout_tok_s", 0.0)
            yield {"step_s": line["time/step"], **phases, "tokens": rate * phases["rollout"]}


def trl_steps(file: Path) -> Iterator[Result]:
    """The file has sums since the start. The first step has no predecessor; its phases are complete."""
    lines = [json.loads(text) for text in file.read_text("utf-8").splitlines()]
    before: Result = {"spent": dict.fromkeys(PHASES, 0.0), "tokens": 0}
    for line in lines:
        phases = {phase: line["spent"][phase] - before["spent"][phase] for phase in PHASES}
        # The time between two lines has the save of the earlier step.
        whole = line["time"] - before["time"] if "time" in before else sum(phases.values())
        yield {"step_s": whole, **phases, "tokens": line["tokens"] - before["tokens"]}
        before = line


def shoal_weights(folder: Path) -> dict[int, Path]:
    found = {int(path.name[5:]): path / "weights" for path in (folder / "run" / "checkpoints").glob("step_*")}
    last = max(found, default=0)
    return dict(sorted(found.items())) if last else {}


def trl_weights(folder: Path, system: Result, name: str) -> dict[int, Path]:
    updates = {**system["common"], **system["settings"][name]}.get("updates", 1)
    paths = (folder / "checkpoints").glob("checkpoint-*")
    return dict(sorted((int(path.name.split("-")[1]) // updates, path) for path in paths))


def held_out(profile: Result, weights: Mapping[int, Path], model: Path) -> dict[int, float]:
    """By a process of its own, so that several runs can be evaluated at the same time."""
    job = {"task": profile["task"], "sampling": profile["held_out"], "tokenizer": str(model)}
    job["weights"] = {step: str(path) for step, path in weights.items()}
    command = [sys.executable, str(Path(__file__).with_name("held_out.py")), json.dumps(job)]
    done = subprocess.run(command, env=environment(profile), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the evaluation ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {int(step): reward for step, reward in json.loads(done.stdout.splitlines()[-1]).items()}


def environment(profile: Result, vllm: bool = False) -> dict[str, str]:
    """With `vllm` its packages come first, as in benchmarks/rollout.py."""
    sources = [profile["vllm_packages"]] if vllm else []
    return {
        **os.environ,
        **(VLLM_ENVIRONMENT if vllm else {}),
        "PYTHONPATH": os.pathsep.join([*sources, str(ROOT / "src")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(profile["threads"]),
    }


def figures(steps: Sequence[Result], measured: Measured, rewards: Mapping[int, float]) -> Result:
    """`marks` has one line more than `steps` if the file has an evaluation before the first step."""
    marks = measured.marks[-len(steps) :]
    quiet = steps[1:] or steps  # without the first step, which warms up
    phases = {phase: statistics.median(step[phase] for step in quiet) for phase in ("rollout", "reward", "train")}
    whole = statistics.median(step["step_s"] - step["save"] for step in quiet)
    sampled = sum(step["tokens"] for step in quiet)
    return {
        "held_out": dict(rewards),
        "first_step_s": round(marks[0][0], 2),
        "first_step_cpu_s": round(marks[0][1], 2),
        "step_s": round(whole, 4),
        "phases_s": {phase: round(value, 4) for phase, value in phases.items()},
        "step_cpu_s": round((marks[-1][1] - marks[0][1]) / max(1, len(marks) - 1), 4),
        "rollout_tokens_per_s": round(sampled / max(1e-9, sum(step["rollout"] for step in quiet))),
        "peak_mib": round(measured.peak_bytes / 2**20),
        "seconds": round(measured.seconds, 1),
        "cpu_s": round(measured.cpu_s, 1),
        "marks": {step: [round(value, 2) for value in marks[step - 1]] for step in rewards},
    }


def times_to(run: Result, targets: Sequence[float]) -> dict[str, list[float] | None]:
    """Wall-clock and CPU seconds from the start of the command to the first checkpoint with at least this reward."""
    found: dict[str, list[float] | None] = {}
    for target in targets:
        reached = [step for step, value in run.get("held_out", {}).items() if value >= target]
        found[f"{target:g}"] = run["marks"][reached[0]] if reached else None
    return found


def best_setting(
    runs: Sequence[Result], system: str, seed: int, targets: Sequence[float], clock: str = "cpu"
) -> str | None:
    """The setting with the least time (`wall` or `cpu`) to the highest target that any setting reaches."""
    tried = [run for run in runs if run["system"] == system and run["seed"] == seed and "error" not in run]
    for target in reversed(targets):
        reached = [(times[CLOCKS.index(clock)], run["setting"]) for run in tried if (times := run["to"][f"{target:g}"])]
        if reached:
            return min(reached)[1]
    return max(tried, key=lambda run: max(run["held_out"].values()))["setting"] if tried else None


def best_settings(runs: Sequence[Result], profile: Result, seed: int) -> dict[str, str | None]:
    return {kind: best_setting(runs, kind, seed, profile["targets"], profile["clock"]) for kind in profile["systems"]}


def command() -> str:
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/peers/compare.py", *words])


def interleaved(systems: Mapping[str, Result]) -> Iterator[tuple[str, str]]:
    """All settings, the systems in turn: A B A B."""
    names = {kind: list(system["settings"]) for kind, system in systems.items()}
    for place in range(max(map(len, names.values()))):
        for kind, settings in names.items():
            if place < len(settings):
                yield kind, settings[place]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--profile", choices=["cpu", "h200"], default="cpu")
    made.add_argument("--model", type=Path, help="folder of the model, for the profile h200")
    made.add_argument("--vllm-packages", type=Path, help="folder with vLLM, which only its runs import from")
    made.add_argument("--env", type=Path, default=FOLDER, help="folder of install.py")
    made.add_argument("--systems", nargs="+", metavar="SYSTEM", help="only these")
    made.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    made.add_argument("--minutes", type=float, default=600.0, help="start no run after this time")
    made.add_argument("--at-once", type=int, default=1, help="runs at the same time, for a machine that is busy anyway")
    made.add_argument("--note", help="recorded with the result")
    made.add_argument("--smoke", action="store_true", help="two steps of one setting per system; not a measurement")
    asked = made.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    profile = read_profile(asked.profile, asked.smoke)
    if asked.systems:
        profile["systems"] = {kind: profile["systems"][kind] for kind in asked.systems}
    if VLLM in profile["systems"]:
        if asked.vllm_packages is None:
            raise SystemExit(f"the system {VLLM} needs --vllm-packages; or name other systems with --systems")
        profile["vllm_packages"] = str(asked.vllm_packages)
    if asked.model is None and profile["model"] is None:
        raise SystemExit(f"the profile {asked.profile} needs --model")
    python = install(asked.env.expanduser())
    earlier = json.loads(asked.out.read_text("utf-8")) if asked.out.exists() else {"runs": []}
    if earlier.get("profile", profile) != profile:
        raise SystemExit(f"{asked.out} was measured with other settings; remove it or name another file")
    runs: list[Result] = earlier["runs"]
    result: Result = {
        "smoke": asked.smoke,
        "command": command(),
        "versions": {"trl": TRL},
        "profile": profile,
        "at_once": asked.at_once,
        "note": asked.note or earlier.get("note"),
        "runs": runs,
    }
    done = {(run["system"], run["setting"], run["seed"]) for run in runs}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = asked.model or warm_model(profile, work)
        result["start_reward"] = held_out(profile, {0: model}, model)[0]
        print("held-out reward of the initial model:", result["start_reward"], flush=True)

        def run(kind: str, setting: str, seed: int) -> None:
            if (kind, setting, seed) in done or time.monotonic() > end:
                return
            with tempfile.TemporaryDirectory(dir=work) as folder:
                found = run_once(profile, kind, setting, seed, model, python, Path(folder))
            found["to"] = times_to(found, profile["targets"])
            runs.append(found)
            result["best"] = best_settings(runs, profile, asked.seeds[0])
            write_result(asked.out, result)
            print(kind, setting, seed, json.dumps({k: v for k, v in found.items() if k != "marks"}), flush=True)

        with ThreadPoolExecutor(asked.at_once) as pool:
            list(pool.map(lambda pair: run(*pair, asked.seeds[0]), interleaved(profile["systems"])))
            found = best_settings(runs, profile, asked.seeds[0])
            best = [(kind, setting) for kind, setting in found.items() if setting is not None]
            again = [(kind, setting, seed) for seed in asked.seeds[1:] for kind, setting in best]
            list(pool.map(lambda one: run(*one), again))


if __name__ == "__main__":
    main()
