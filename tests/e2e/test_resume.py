"""A killed run resumes: bit for bit where documented, and no rollout is trained twice.

The undisturbed run is a new process. Killed and resumed runs are forked from a warm Python, so that even the order of
hashes differs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython, start_fresh, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, base_config, each, fingerprint, hash_of

STEPS = 6
KILLED = -9
Place = tuple[str, int]  # a place of shoal.runs.files.fault, and the number of the pass

# In the order of a run.
PLACES: list[Place] = [
    ("written:config.yaml", 1),  # before the folder counts as used
    ("written:status.json", 1),
    ("appended:metrics.jsonl", 1),  # the evaluation before step 1
    ("written:step_000001.jsonl", 1),  # between the optimizer step and the record of step 1
    ("appended:metrics.jsonl", 2),
    ("appended:journal.jsonl", 1),  # step 1 is recorded, no checkpoint yet
    ("checkpoint:files", 1),  # the checkpoint of step 2, stage by stage
    ("written:manifest.json", 1),
    ("checkpoint:manifest", 1),
    ("folder:synced", 1),
    ("written:status.json", 2),  # the checkpoint exists, the status is not written
    ("appended:journal.jsonl", 3),
    ("checkpoint:files", 2),
    ("appended:journal.jsonl", 6),  # the last step is recorded, its checkpoint is not
    ("prune:renamed", 1),  # the third checkpoint removes the first one
    ("folder:synced", 4),  # the export of final/
    ("written:status.json", 5),  # everything is done but the final status
]
# One of each kind: before the run exists, before, during and after the record of a step, and during the export.
KEPT = [
    ("written:status.json", 1),
    ("written:step_000001.jsonl", 1),
    ("appended:journal.jsonl", 3),
    ("checkpoint:manifest", 1),
    ("folder:synced", 4),
]
# One run that is killed repeatedly, also during the repair after the last kill.
CHAIN: list[Place] = [
    ("appended:journal.jsonl", 1),
    ("written:metrics.jsonl", 1),  # truncation of later records
    ("checkpoint:manifest", 1),
    ("appended:journal.jsonl", 3),
    ("written:journal.jsonl", 1),
    ("written:step_000004.jsonl", 1),
    ("folder:synced", 1),
    ("written:step_000006.jsonl", 1),
    ("folder:synced", 2),
]


def six_steps(folder: Path, warm: WarmPython, model: Path, **changes: dict[str, Any]) -> Run:
    """Six steps, three checkpoints of which two are kept, evaluations at 0, 3 and 6."""
    config = base_config(model)
    config["train"] |= {"max_steps": STEPS, **changes.get("train", {})}
    config["orch"] |= {"batch_size": 8, "eval": {"interval": 3, "num_examples": 2}, **changes.get("orch", {})}
    return Run(folder, warm).write(config)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython, model: Path) -> dict[str, Any]:
    run = six_steps(tmp_path_factory.mktemp("undisturbed"), warm, model)
    command = start_fresh(["grpo", "run.yaml"], run.folder)
    assert command.wait() == 0, command.text()
    assert_trained_once(run, STEPS)
    return fingerprint(run)


def finish(run: Run) -> None:
    command = run.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert run.status()["state"] == "finished" and run.status()["step"] == STEPS
    assert_trained_once(run, STEPS)


@pytest.mark.parametrize(
    "places",
    [KEPT, pytest.param([place for place in PLACES if place not in KEPT], marks=pytest.mark.faults)],
    ids=["kept", "others"],
)
def test_killed_at_every_stage(
    tmp_path: Path, warm: WarmPython, model: Path, undisturbed: dict[str, Any], places: list[Place]
):
    assert set(KEPT) <= set(PLACES)

    def check(place: Place) -> None:
        run = six_steps(tmp_path / f"{place[0].replace(':', '-')}-{place[1]}", warm, model)
        assert run.start(kill_at=place).wait() == KILLED, "the place was reached"
        if (run.path / "status.json").exists():
            status = run.status()
            assert status["resumable"] and status["next_command"].endswith("--resume"), status
        finish(run)
        assert_same_run(run, undisturbed)

    each(places, check)


@pytest.mark.faults
def test_killed_repeatedly(tmp_path: Path, warm: WarmPython, model: Path, undisturbed: dict[str, Any]):
    run = six_steps(tmp_path, warm, model)
    for number, place in enumerate(CHAIN):
        arguments = ["--resume"] if number else []
        assert run.start(*arguments, kill_at=place).wait() == KILLED, place
    finish(run)
    assert_same_run(run, undisturbed)


@pytest.mark.faults
def test_killed_at_any_moment(tmp_path: Path, warm: WarmPython, model: Path, undisturbed: dict[str, Any]):
    """Rollouts, rewards, backward, loading: at random times. Each run is killed twice."""
    rng = random.Random(20)

    def kill(run: Run, arguments: Sequence[str], after_s: float) -> None:
        command = run.start(*arguments)
        wait_until(lambda: (run.path / "status.json").exists() or not command.running(), 60, "the run directory")
        time.sleep(after_s)
        command.kill()

    def check(delays: tuple[float, float]) -> None:
        run = six_steps(tmp_path / f"after-{delays[0]:.3f}", warm, model)
        kill(run, [], delays[0])
        kill(run, ["--resume"], delays[1])
        finish(run)
        assert_same_run(run, undisturbed)

    each([(rng.uniform(0, 1.6), rng.uniform(0, 1.2)) for _ in range(6)], check)


def test_killed_with_adapters(tmp_path: Path, warm: WarmPython, model: Path):
    changes = {"train": {"lora": True, "lora_rank": 4, "learning_rate": 2e-3, "lora_dropout": 0.1}}
    whole = six_steps(tmp_path / "whole", warm, model, **changes)
    assert whole.grpo().wait() == 0
    wanted = fingerprint(whole)

    def check(place: Place) -> None:
        run = six_steps(tmp_path / f"cut-{place[1]}", warm, model, **changes)
        assert run.start(kill_at=place).wait() == KILLED
        finish(run)
        assert_same_run(run, wanted)

    each([("appended:journal.jsonl", 3), ("appended:journal.jsonl", 5)], check)


@pytest.mark.parametrize(
    ("interval", "level"),
    [(2, 0), (0, 0), (1, 1)],
)
def test_asynchronous_modes_train_every_rollout_once(
    tmp_path: Path, warm: WarmPython, model: Path, interval: int, level: int
):
    changes: dict[str, Any] = {"orch": {"weight_sync_interval": interval, "max_async_level": level}}
    if interval == 0:
        changes["orch"]["eval"] = None  # refused: it would score the first weights every time
    run = six_steps(tmp_path, warm, model, **changes)
    for number, place in enumerate([("appended:journal.jsonl", 3), ("checkpoint:manifest", 1), ("folder:synced", 2)]):
        assert run.start(*(["--resume"] if number else []), kill_at=place).wait() == KILLED, place
    finish(run)
    recorded = [rollout["rollout_id"] for rollout in run.rollouts()]
    assert len(recorded) == len(set(recorded)), "a rollout is recorded in one step only"
    assert all(step["batch/used"] == 8 for step in run.steps())
    limit = max(interval, 1) + level - 1 if interval else STEPS
    assert all(step["staleness/max"] <= limit for step in run.steps())


def write_pairs(tasks_file: Path, file: Path) -> Path:
    """The answer of each task is preferred to the answer of another task."""
    rows = [json.loads(line)["messages"] for line in tasks_file.read_text().splitlines()]
    pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
    lines = [{"chosen": row, "rejected": [*row[:-1], other[-1]]} for row, other in pairs]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("verb", ["sft", "dpo", "dpo with adapters"])
def test_killed_supervised_training(warm: WarmPython, raw_model: Path, tasks_file: Path, tmp_path: Path, verb: str):
    """Six steps without sampling: killed twice and resumed, equal to the undisturbed run."""
    data, weights, more = tasks_file, "model.safetensors", []
    if verb != "sft":
        data = write_pairs(tasks_file, tmp_path / "pairs.jsonl")
    if verb == "dpo with adapters":
        weights, more = "adapter_model.safetensors", ["train.lora=true", "train.lora_rank=4", "loss.sft_weight=0.2"]

    def arguments(name: str) -> list[str]:
        flags = ["--model", str(raw_model), "--dataset", str(data), "--output-dir", name, "--max-steps", "6"]
        settings = ["train.save_steps=2", "train.learning_rate=1e-3", "batch_size=16", *more]
        return [verb.split()[0], *flags, *settings]

    def found(name: str) -> tuple[Any, ...]:
        run = Run(tmp_path, warm, name)
        return run.journal(), run.metrics(), hash_of(run.path / "final" / weights)

    whole = warm.run(arguments("whole"), tmp_path)
    assert whole.wait() == 0, whole.text()
    assert warm.run(arguments("cut"), tmp_path, kill_at=("appended:journal.jsonl", 3)).wait() == KILLED
    assert warm.run([*arguments("cut"), "--resume"], tmp_path, kill_at=("checkpoint:manifest", 1)).wait() == KILLED
    resumed = warm.run([*arguments("cut"), "--resume"], tmp_path)
    assert resumed.wait() == 0, resumed.text()
    assert found("cut") == found("whole")
