"""Several training processes with one orchestrator and one server equal one trainer, also with shards."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port

from .helpers.processes import WarmPython, environment, ranks_environment
from .helpers.runs import assert_trained_once
from .helpers.split import LIMIT_S, InOne, SplitRun, split_config, split_run, with_changes

STEPS = 4
KILLED = -9
LORA = {"lora": True, "lora_rank": 4, "learning_rate": 2e-3}
Place = tuple[str, int]
RANKS = ("train-0", "train-1")


def start_ranks(run: SplitRun, kill_at: Place | None = None, killed: Iterable[str] = RANKS) -> None:
    """Two training processes, as torchrun starts them."""
    for name, env in zip(RANKS, ranks_environment(len(RANKS)), strict=True):
        run.processes[name] = run.start_one("train", env=env, kill_at=kill_at if name in killed else None)
    del run.processes["train"]


def finish_ranks(run: SplitRun, wanted: dict[str, Any]) -> None:
    """The same run to rounding."""
    assert run.end() == dict.fromkeys(run.processes, 0)
    assert_trained_once(run, STEPS)
    for found, expected in zip(run.metrics(), wanted["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6), "the same run"


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_processes_train_for_one_orchestrator(
    tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, sharding: str
):
    """The first rank receives the calls, and both train. Shards are gathered to publish, save and export."""
    with split_run(tmp_path, warm, split_config(model, train={"sharding": sharding})) as run:
        run.start_all("infer", "orch")
        start_ranks(run)
        finish_ranks(run, in_one())
        assert len(list((run.path / "checkpoints" / "step_000004").glob("shards/*"))) == (
            2 if sharding == "fsdp" else 0
        )
        final, published = (run.path / name / "model.safetensors" for name in ("final", "weights/v000004"))
        assert final.read_bytes() == published.read_bytes()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_send_shards_over_connections(
    tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kind: str
):
    """The first rank gathers them and sends them over gloo. With LoRA, only adapters are gathered and sent."""
    own = LORA if kind == "lora" else {}
    ways = {"rollout_transport": {"type": "tcp"}, "weight_broadcast": {"type": "nccl", "port": free_port()}}
    config = split_config(model, train={"sharding": "fsdp", **ways, **own})
    served = {"infer": {"enable_lora": True, "max_lora_rank": 4}} if kind == "lora" else {}
    with split_run(tmp_path, warm, with_changes(config, served)) as run:
        run.start_all("infer", "orch")
        start_ranks(run)
        finish_ranks(run, in_one(train=own) if own else in_one())
        assert not (run.path / "weights").exists()
        assert (run.path / "final" / f"{'adapter_' if own else ''}model.safetensors").is_file()


def test_torchrun_starts_the_trainer(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """With the command of docs/scale-out.md and the Slurm script."""
    with split_run(tmp_path, warm, split_config(model)) as run:
        run.start_all("infer", "orch")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
        command = [*launcher, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "shoal", "grpo-train"]
        trainer = subprocess.run(
            [*command, "run.yaml", "train.sharding=fsdp"], cwd=run.folder, env=environment(OMP_NUM_THREADS="1"),
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert trainer.returncode == 0, trainer.stderr[-3000:]
        finish_ranks(run, in_one())
        assert len(list((run.path / "checkpoints" / "step_000004").glob("shards/*"))) == 2


@pytest.mark.parametrize(
    ("place", "killed"),
    [(("service:learned", 3), RANKS), (("service:save", 2), RANKS), (("service:learn", 3), RANKS[1:])],
    ids=["learning", "saving", "one-of-them"],
)
def test_killed_ranks_are_restarted(
    tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, place: Place, killed: tuple[str, ...]
):
    """All ranks are killed, or one, which ends the others. After a restart they continue from the shards of step 2."""
    with split_run(tmp_path, warm, split_config(model, train={"sharding": "fsdp"})) as run:
        run.start_all("infer", "orch")
        start_ranks(run, place, killed)
        codes = {name: run.processes.pop(name).wait() for name in RANKS}
        assert codes == {name: KILLED if name in killed else 3 for name in RANKS}, "the place was reached"
        start_ranks(run)
        finish_ranks(run, in_one())
        assert any("goes back to step 2" in event["message"] for event in run.events("restart"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_the_shards_of_its_last_step(
    tmp_path: Path, warm: WarmPython, model: Path, number: signal.Signals
):
    with split_run(tmp_path, warm, split_config(model, train={"sharding": "fsdp", "max_steps": 1000})) as run:
        run.start_all("infer", "orch")
        start_ranks(run)
        run.wait_for_step(1)
        run.processes["orch"].send(number)
        asked = 128 + number
        assert run.end() == {"infer": asked, "orch": asked, "train-0": asked, "train-1": 3}
        step = run.checkpoints()[-1]
        assert step == len(run.journal()) == run.status()["step"]
        assert len(list((run.path / "checkpoints" / f"step_{step:06d}").glob("shards/*"))) == 2
