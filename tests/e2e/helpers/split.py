"""A split run in tests: three processes in one folder, started in any order, killed at named places and restarted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.ports import free_port

from .processes import Command, Fault, WarmPython, alive, children_of, wait_until
from .runs import Run, base_config, fingerprint

COMPONENTS = ("infer", "train", "orch")
LIMIT_S = 60.0
SPLIT_ONLY = ("deadline_s", "weight_broadcast", "rollout_transport")
InOne = Callable[..., dict[str, Any]]


def split_config(model: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Four steps of eight rollouts with two checkpoints, as three independent sections."""
    config, port = base_config(model), free_port()
    config["infer"] = {"model": str(model), "output_dir": "out", "port": port, "max_model_len": 128, "max_num_seqs": 8}
    config["orch"] |= {
        "model": {"name": str(model)}, "output_dir": "out", "batch_size": 8, "deadline_s": LIMIT_S,
        "client": {"base_url": f"http://127.0.0.1:{port}/v1"},
    }  # fmt: skip
    config["train"] |= {"deadline_s": LIMIT_S}
    for section, values in changes.items():
        config[section] |= values
    return config


def colocated_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same run in one process, without the keys of the split layout."""
    train = {
        key: value
        for key, value in config["train"].items()
        if key not in ("deadline_s", "weight_broadcast", "rollout_transport")
    }
    orch = {key: value for key, value in config["orch"].items() if key != "client"}
    return {"train": train, "orch": orch}


def with_changes(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for section, values in changes.items():
        config[section] |= values
    return config


class SplitRun(Run):
    """The folder of a split run and its processes."""

    def __init__(self, folder: Path, warm: WarmPython, config: Mapping[str, Any]) -> None:
        super().__init__(folder, warm)
        self.write(dict(config))
        self.processes: dict[str, Command] = {}

    def start_one(self, component: str, *arguments: str, **options: Any) -> Command:
        output = self.folder / f"{component}-{len(list(self.folder.glob(f'{component}-*.txt')))}.txt"
        words = [f"grpo-{component}", "run.yaml", *arguments]
        command = self.warm.start(words, self.folder, output=output, **options)
        self.processes[component] = command
        return command

    def start_all(
        self,
        *order: str,
        kill_at: Mapping[str, tuple[str, int]] | None = None,
        faults: Mapping[str, Sequence[Fault]] | None = None,
    ) -> None:
        for component in order or COMPONENTS:
            self.start_one(component, kill_at=(kill_at or {}).get(component), faults=(faults or {}).get(component, ()))

    def end(self, limit_s: float = LIMIT_S) -> dict[str, int]:
        """The exit codes of all processes."""
        return {name: command.wait(limit_s) for name, command in self.processes.items()}

    def texts(self) -> str:
        files = sorted(self.folder.glob("*-*.txt"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def wait_for_step(self, step: int) -> None:
        journal = self.path / "journal.jsonl"
        wait_until(
            lambda: journal.exists() and len(journal.read_text().splitlines()) >= step, LIMIT_S, f"step {step}", 0.01
        )

    def handshake(self, component: str) -> dict[str, Any]:
        return json.loads((self.path / "handshake" / f"{component}.json").read_text())

    def kill_all(self) -> None:
        for command in self.processes.values():
            command.kill()


@contextmanager
def split_run(folder: Path, warm: WarmPython, config: Mapping[str, Any]) -> Iterator[SplitRun]:
    """No process outlives the test."""
    run = SplitRun(folder, warm, config)
    try:
        yield run
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.texts()}") from error
    finally:
        run.kill_all()


def same_but_for_the_proof(found: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without the proof of the served weights: tensors in one process, files between processes."""
    journal = [{key: value for key, value in record.items() if key != "weights"} for record in found["journal"]]
    return {**found, "journal": journal}


def compared(run: Run) -> dict[str, Any]:
    return same_but_for_the_proof(fingerprint(run))


def assert_nobody_left(*pids: int) -> None:
    left = [pid for parent in pids for pid in (parent, *children_of(parent)) if alive(pid)]
    assert not left, f"processes left behind: {left}"
