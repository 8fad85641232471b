"""Run directories in tests: the default run, its files, and the comparison of two runs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .processes import Command, WarmPython, wait_until

REVERSE_ARGS = {"system_prompt": "Reverse.", "min_len": 3, "max_len": 6, "num_train": 200, "num_eval": 20}
SUM_ARGS = {"num_train": 200, "num_eval": 20}


def base_config(model: Path) -> dict[str, Any]:
    """Four steps of sixteen rollouts: about a second of work."""
    return {
        "train": {
            "model": str(model), "output_dir": "out", "max_steps": 4, "learning_rate": 2e-4, "sequence_len": 128,
            "save_steps": 2, "loss": {"type": "grpo"},
        },
        "orch": {
            "env": [{"id": "reverse-text", "args": REVERSE_ARGS}],
            "batch_size": 16, "rollouts_per_example": 4, "sampling": {"max_tokens": 10},
        },
    }  # fmt: skip


@dataclass
class Run:
    """One run directory and the folder in which its command starts."""

    folder: Path
    warm: WarmPython
    name: str = "out"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def grpo(self, *arguments: str, **options: Any) -> Command:
        """Run `shoal grpo run.yaml …` to its end."""
        return self.warm.run(["grpo", "run.yaml", *arguments], self.folder, **options)

    def start(self, *arguments: str, **options: Any) -> Command:
        return self.warm.start(["grpo", "run.yaml", *arguments], self.folder, **options)

    def status(self) -> dict[str, Any]:
        return json.loads((self.path / "status.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics without times."""
        timed = ("time/", "throughput/")
        lines = self.lines("metrics.jsonl")
        return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if line["step"] > 0]

    def journal(self) -> list[dict[str, Any]]:
        return self.lines("journal.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Also of a run that has just started and has no file yet."""
        lines = self.lines("events.jsonl") if (self.path / "events.jsonl").exists() else []
        return [event for event in lines if event["kind"] == kind]

    def rollouts(self) -> list[dict[str, Any]]:
        """All rollouts of the run, each with the step that recorded it."""
        files = sorted((self.path / "rollouts").glob("step_*.jsonl"))
        return [
            {"step": int(file.stem.removeprefix("step_")), **json.loads(line)}
            for file in files
            for line in file.read_text().splitlines()
        ]

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    def checkpoints(self) -> list[int]:
        found = (self.path / "checkpoints").glob("step_*")
        return sorted(int(folder.name.removeprefix("step_")) for folder in found)

    def write(self, config: dict[str, Any]) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return self


def hash_of(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes()).hexdigest()


def fingerprint(run: Run) -> dict[str, Any]:
    """Everything that a kill and a resume must not change. The model card contains the planned steps."""
    final = [file for file in sorted((run.path / "final").iterdir()) if file.name != "README.md"]
    return {
        "metrics": run.metrics(),
        "journal": run.journal(),
        "rollouts": {file.name: hash_of(file) for file in sorted((run.path / "rollouts").iterdir())},
        "weights": {file.name: hash_of(file) for file in final},
        "optimizer": hash_of(run.path / "checkpoints" / f"step_{run.checkpoints()[-1]:06d}" / "trainer.safetensors"),
    }


def assert_same_run(run: Run, wanted: dict[str, Any]) -> None:
    found = fingerprint(run)
    for name, value in wanted.items():
        assert found[name] == value, f"{name} of {run.path} differs"


def assert_trained_once(run: Run, steps: int) -> None:
    """Every step once and in order, and no rollout in two steps."""
    journal = run.journal()
    assert [record["step"] for record in journal] == list(range(1, steps + 1))
    counts = Counter(rollout_id for record in journal for rollout_id in record["rollout_ids"])
    assert counts and max(counts.values()) == 1, counts.most_common(3)


def wait_for_steps(run: Run, steps: int, command: Command) -> None:
    def reached() -> bool:
        file = run.path / "journal.jsonl"
        return not command.running() or (file.exists() and file.read_bytes().count(b"\n") >= steps)

    wait_until(reached, 60, f"step {steps} of {run.path}")
    assert command.running(), command.text()


def overrides(**values: Any) -> Sequence[str]:
    """train__max_steps=6 → train.max_steps=6; values as YAML flow."""
    return [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]


def each(cases: Iterable[Any], check: Callable[[Any], None], at_once: int = 1) -> None:
    """Check every case and report all failures. `at_once`: concurrent cases, for cases that mostly wait."""
    cases = list(cases)

    def attempt(case: Any) -> str | None:
        try:
            check(case)
        except AssertionError as error:
            return f"{case}: {error}"
        return None

    with ThreadPoolExecutor(at_once) as pool:
        failures = [told for told in pool.map(attempt, cases) if told is not None]
    assert not failures, "\n\n".join(failures)
