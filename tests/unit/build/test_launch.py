"""The number of processes of a run, the refusals, and the cause if several processes end."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.build.load import PythonObjects, Run
from shoal.build.ranks import _conclude, _write_start, as_rank, ranks_to_start, read_start, write_end
from shoal.config.resolve import as_yaml
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, HardwareError, Interrupted, ShoalError

LAUNCHED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("fields", "found", "started"),
    [
        ({}, 8, 0),
        ({"gpus": 4}, 8, 4),
        ({"gpus": 0}, 8, 8),
        ({"gpus": 0}, 1, 0),
        ({"gpus": 0}, 0, 0),
        ({"gpus": 3, "device": "cpu"}, 0, 3),
        ({"gpus": 0, "device": "cpu"}, 8, 0),
    ],
    ids=str,
)
def test_number_of_processes(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], found: int, started: int):
    gpus(monkeypatch, found)
    assert ranks_to_start(TrainConfig(**fields), None) == started


def test_rank_starts_no_ranks_and_knows_its_number(monkeypatch: pytest.MonkeyPatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert ranks_to_start(TrainConfig(gpus=2, device="cpu"), None) == 0
    assert (as_rank(None).processes, as_rank(None).local_rank) == (4, 1)
    assert as_rank(PythonObjects(processes=2)).processes == 2  # a process that received a message keeps it


@pytest.mark.parametrize(
    ("visible", "found", "said"),
    [(None, 1, "this machine has 1; use train.gpus=1"), ("0", 1, "CUDA_VISIBLE_DEVICES=0 shows 1; use train.gpus=1"),
     (None, 0, "this machine has none; use train.device=cpu, which starts 2 processes on the CPU")],
)  # fmt: skip
def test_more_examples_than_available(monkeypatch: pytest.MonkeyPatch, visible: str | None, found: int, said: str):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus(monkeypatch, found)
    with pytest.raises(HardwareError, match=said):
        ranks_to_start(TrainConfig(gpus=2), None)


def test_python_objects_stay_in_their_process():
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        ranks_to_start(TrainConfig(gpus=2, device="cpu"), PythonObjects(tokenizer=object()))


def config(folder: Path) -> RunConfig:
    train = {"model": "tiny", "max_steps": 1, "output_dir": str(folder / "out")}
    env = [{"id": "arithmetic", "args": {"api_key": "s3cret"}}]
    return RunConfig.model_validate({"train": train, "orch": {"env": env}})


def test_rank_reads_its_input_once(tmp_path: Path):
    start = {"resume": True, "notices": ["a note"], "next_command": "shoal grpo --resume"}
    files = {"config.yaml": as_yaml(config(tmp_path), secrets=True), "start.json": json.dumps(start)}
    _write_start(tmp_path, 1, files)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {0o600}
    run = read_start(tmp_path, 1)
    assert isinstance(run, Run) and run.config.orch.env[0].args == {"api_key": "s3cret"}
    assert (run.resume, run.notices, run.command) == (True, ("a note",), "shoal grpo --resume")
    assert not list(tmp_path.iterdir())


def test_rank_of_another_command_gets_the_command_only(tmp_path: Path):
    command = ["grpo-train", "train.yaml", "train.gpus=2"]
    _write_start(tmp_path, 0, {"start.json": json.dumps({"command": command})})
    assert read_start(tmp_path, 0) == command
    assert not list(tmp_path.iterdir())


class Ended:
    """Processes that ended with these codes, in this order."""

    def __init__(self, codes: dict[int, int], signalled: bool = False) -> None:
        self.ended, self.signalled = codes, signalled


@pytest.mark.parametrize(
    ("codes", "told", "code", "says"),
    [
        ({0: 3, 1: -9}, {0: ("lost", True)}, 3, "rank 1 of 2 was killed by SIGKILL"),
        ({0: 3, 1: 3}, {0: ("lost", True), 1: ("out of memory", False)}, 3, "rank 1 of 2 out of memory"),
        ({1: 3, 0: 4}, {1: ("lost", True), 0: ("disk full", False)}, 4, "disk full"),
        ({1: 70, 0: 3}, {1: ("a bug", False), 0: ("lost", True)}, 70, "rank 1 of 2 a bug"),
        ({0: 1, 1: 3}, {1: ("lost", True)}, 70, "ended with exit code 1"),
    ],
)
def test_error_reason_is_that_of_the_failed_rank(
    tmp_path: Path, codes: dict[int, int], told: dict[int, tuple[str, bool]], code: int, says: str
):
    for rank, (message, lost) in told.items():
        write_end(tmp_path, rank, message, lost=lost)
    watched: Any = Ended(codes)
    end = _conclude(watched, tmp_path, os.getpid())
    assert end is not None and end.main_pid == os.getpid()
    with pytest.raises(ShoalError, match=says) as error:
        end.throw(killed=3)
    assert error.value.exit_code == code


@pytest.mark.parametrize(("signalled", "killed", "code"), [(False, 70, 70), (True, 143, 143)])
def test_killed_rank_gives_the_exit_code_of_its_launcher(tmp_path: Path, signalled: bool, killed: int, code: int):
    watched: Any = Ended({0: -15, 1: -15}, signalled=signalled)
    end = _conclude(watched, tmp_path, 1)
    assert end is not None and (end.code, end.signalled) == (-15, signalled)
    with pytest.raises(Interrupted if signalled else ShoalError, match="killed by SIGTERM") as error:
        end.throw(killed)
    assert error.value.exit_code == code


def test_first_rank_reports_a_signal(tmp_path: Path):
    write_end(tmp_path, 0, "interrupted; saved", lost=False)
    watched: Any = Ended({1: 3, 0: 130}, signalled=True)
    end = _conclude(watched, tmp_path, 1)
    assert end is not None
    with pytest.raises(Interrupted, match="interrupted; saved") as error:
        end.throw(killed=3)
    assert error.value.exit_code == 130
    assert json.loads((tmp_path / "rank0.json").read_text())["lost"] is False


def test_no_findings(tmp_path: Path):
    watched: Any = Ended({0: 0, 1: 0})
    assert _conclude(watched, tmp_path, 1) is None
