"""`train.gpus: N` on the CPU: real ranks over gloo with full weights and with shards; how they end and restart."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from .helpers.processes import Command, WarmPython, alive, children_of, rank_of, ranks_environment, wait_until
from .helpers.runs import REVERSE_ARGS, Run, assert_trained_once

START_S = 90  # several processes import torch on a busy machine


def config(model: Path, **train: Any) -> dict[str, Any]:
    """Rows contain few rollouts, so ranks have different numbers of rows."""
    settings = {
        "model": str(model), "output_dir": "out", "device": "cpu", "max_steps": 4, "learning_rate": 1e-3,
        "sequence_len": 64, "save_steps": 2, "loss": {"type": "grpo", "kl": {"beta": 0.01}}, **train,
    }  # fmt: skip
    orch = {
        "env": [{"id": "reverse-text", "args": REVERSE_ARGS}], "batch_size": 12, "rollouts_per_example": 4,
        "sampling": {"max_tokens": 8}, "reward": {"function": "my_code:digits"}, "deadline_s": 60,
    }  # fmt: skip
    return {"train": settings, "orch": orch}


def ranks_of(command: Command) -> dict[int, int]:
    """Process ids by rank, once all ranks run."""
    found: dict[int, int] = {}
    for pid in children_of(command.pid):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == command.pid and (rank := rank_of(pid)) is not None:
                found[rank] = pid
    return found


def wait_for_steps(run: Run, steps: int, command: Command) -> None:
    def reached() -> bool:
        file = run.path / "journal.jsonl"
        return not command.running() or (file.exists() and file.read_bytes().count(b"\n") >= steps)

    wait_until(reached, START_S, f"step {steps} of {run.path}: {command.text()}", 0.02)
    assert command.running(), command.text()


def weights_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.path / "checkpoints" / f"step_{step:06d}" / "weights" / "model.safetensors")


def assert_same_training(run: Run, other: Run, steps: int) -> None:
    """The same rollouts in the same order, and the same weights to rounding."""
    drawn = [
        [(r["rollout_id"], r["completion"], r["reward"]) for r in each.rollouts() if r["step"] <= steps]
        for each in (run, other)
    ]
    assert drawn[0] == drawn[1]
    for ours, theirs in zip(run.steps()[:steps], other.steps()[:steps], strict=True):
        for name in ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm", "tokens/completion"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-7), name
    found, expected = weights_of(run, steps), weights_of(other, steps)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def make(warm: WarmPython, raw_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    def new(name: str, **train: Any) -> Run:
        return Run(tmp_path_factory.mktemp(name), warm).write(config(raw_model, **train))

    return new


@pytest.fixture(scope="module")
def one(make: Callable[..., Run]) -> Run:
    """The run to compare with: one process, six steps."""
    run = make("one", max_steps=6, save_total_limit=9)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    return run


@pytest.fixture(scope="module")
def shards(make: Callable[..., Run]) -> Run:
    """Two ranks with sharded weights, four steps, a checkpoint after the second and the last step."""
    run = make("shards", gpus=2, sharding="fsdp")
    command = run.start(spares=2)
    assert command.wait(START_S) == 0, command.text()
    return run


def test_two_ranks_with_shards_train_as_one_does(one: Run, shards: Run):
    assert_trained_once(shards, 4)
    assert_same_training(shards, one, 4)
    final = load_file(shards.path / "final" / "model.safetensors")
    assert all(torch.equal(final[name], tensor) for name, tensor in weights_of(shards, 4).items())
    checkpoint = shards.path / "checkpoints" / "step_000004"
    assert len(list((checkpoint / "shards").iterdir())) == 2
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert {f"shards/{file.name}" for file in (checkpoint / "shards").iterdir()} <= manifest["files"].keys()
    assert not list((shards.path / "checkpoints").glob(".tmp-*"))


def test_sharded_checkpoint_is_exported(shards: Run):
    command = shards.warm.run(["export", "out", "published", "--checkpoint", "2"], shards.folder)
    assert command.wait() == 0, command.text()
    published = load_file(shards.folder / "published" / "model.safetensors")
    assert all(torch.equal(published[name], tensor) for name, tensor in weights_of(shards, 2).items())


def test_sharded_run_continues_with_four_ranks_and_one(one: Run, shards: Run, tmp_path: Path):
    """Two ranks make four steps, four ranks the fifth, and one process without shards the sixth."""
    shutil.copytree(shards.folder, tmp_path / "copy")
    run = Run(tmp_path / "copy", shards.warm)
    for steps, train in ((5, {"gpus": 4, "sharding": "fsdp"}), (6, {"gpus": 1, "sharding": "none"})):
        changes = [f"train.{key}={value}" for key, value in {**train, "max_steps": steps}.items()]
        command = run.start("--resume", *changes, spares=train["gpus"] if train["gpus"] > 1 else 0)
        assert command.wait(2 * START_S) == 0, command.text()
        assert run.status()["step"] == steps
    assert [event["message"] for event in run.events("resume")] == [
        "continuing after step 4",
        "continuing after step 5",
    ]
    assert_trained_once(run, 6)
    assert_same_training(run, one, 6)
    assert len(list((run.path / "checkpoints" / "step_000005" / "shards").iterdir())) == 4
    assert not (run.path / "checkpoints" / "step_000006" / "shards").exists()


def test_damaged_shard_is_not_resumed(shards: Run, tmp_path: Path):
    shutil.copytree(shards.folder, tmp_path / "copy")
    run = Run(tmp_path / "copy", shards.warm)
    shard = sorted((run.path / "checkpoints" / "step_000004" / "shards").iterdir())[1]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    command = run.start("--resume", "train.max_steps=5", "train.gpus=1", "train.sharding=fsdp")
    assert command.wait(START_S) == 0, command.text()
    assert "has changed since it was written" in run.events("checkpoint")[0]["message"]
    assert_trained_once(run, 5)


def test_ranks_that_a_launcher_started(one: Run, make: Callable[..., Run]):
    """Two processes with the variables of torchrun. test_split_ranks.py uses torchrun itself."""
    run = make("launched", sharding="fsdp", lora=True, lora_rank=2, max_steps=2)
    ranks = [run.start(env=variables) for variables in ranks_environment(2, OMP_NUM_THREADS="1")]
    for rank in ranks:
        assert rank.wait(START_S) == 0, rank.text()[-3000:]
    assert_trained_once(run, 2)
    assert [r["rollout_id"] for r in run.rollouts()] == [r["rollout_id"] for r in one.rollouts() if r["step"] <= 2]
    adapter = load_file(run.path / "final" / "adapter_model.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)


def test_two_ranks_train_as_one_does_until_one_of_them_ends(one: Run, make: Callable[..., Run]):
    """Interrupted: exit code 130. After a resume, a killed rank: exit code 3 with the reason. Then the supervisor is
    killed.
    """
    run = make("ending", gpus=2, max_steps=2000, save_steps=1, save_total_limit=9999)
    command = run.start(spares=2)
    wait_for_steps(run, 4, command)
    below = children_of(command.pid)
    command.send(signal.SIGINT)
    assert command.wait(30) == 130, command.text()
    status = run.status()
    assert status["state"] == "interrupted" and status["step"] == len(run.journal()) == run.checkpoints()[-1]
    assert_same_training(run, one, 4)
    wait_until(lambda: not any(map(alive, below)), 10, "the end of all processes")

    command = run.start("--resume", spares=2)
    wait_for_steps(run, status["step"] + 2, command)
    ranks, below = ranks_of(command), children_of(command.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    assert command.wait(30) == 3, command.text()
    assert "rank 1 of 2 was killed by SIGKILL" in command.text().splitlines()[-1]
    assert "rank 1 of 2 was killed by SIGKILL" in run.status()["reason"] and run.status()["resumable"]
    wait_until(lambda: not any(map(alive, below)), 10, "the end of all processes")

    step = run.checkpoints()[-1]
    command = run.start("--resume", spares=2)
    wait_until(lambda: run.checkpoints()[-1] > step, START_S, "the next step", 0.02)
    below = children_of(command.pid)
    command.kill()
    wait_until(lambda: not any(map(alive, below)), 30, "the end of the ranks after the process that started them")
    # Rank 0 notices first either its own signal, or that rank 1 has ended.
    assert run.status()["state"] in ("interrupted", "stopped") and run.status()["resumable"]
    assert_trained_once(run, run.status()["step"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.device=cuda", "train.gpus=2"], "train.gpus: 2 GPUs were asked for and"),
        (["train.device=auto", "train.gpus=64"], "train.gpus: 64 GPUs were asked for and"),
        (["train.gpus=2", "orch.weight_sync_interval=2"], "orch.weight_sync_interval=1"),
        (["train.gpus=2", "train.model=./nowhere"], "nowhere"),
    ],
)
def test_impossible_settings_give_one_line(make: Callable[..., Run], changes: list[str], said: str):
    run = make("refused")
    command = run.start(*changes, spares=2)
    assert command.wait(START_S) == 2, command.text()
    lines = [line for line in command.text().splitlines() if "error" in line]
    assert len(lines) == 1 and said in lines[0], command.text()
    assert not (run.path / "status.json").exists()


def test_same_configuration_file_runs_on_any_number(shards: Run):
    """The configuration records the number of processes, but a resumed run may use another number."""
    written = yaml.safe_load((shards.path / "config.yaml").read_text())
    assert (written["train"]["gpus"], written["train"]["sharding"]) == (2, "fsdp")
    assert not any("gpus" in key or "sharding" in key for key in shards.status()["binding"])


def test_guide_starts_with_a_working_command(warm: WarmPython, tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text(encoding="utf-8")
    block = page.split("```bash\n", 1)[1].split("```", 1)[0].replace("\\\n", " ")
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [words[:2] for words in commands] == [["shoal", "make-model"], ["shoal", "grpo"]]
    for words in commands:
        command = warm.start(words[1:], tmp_path, spares=2 if "train.gpus=2" in words else 0)
        assert command.wait(START_S) == 0, command.text()
    status = json.loads((tmp_path / "outputs" / "two" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 4)
    metrics = [json.loads(line) for line in (tmp_path / "outputs" / "two" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["optim/grad_norm"] > 0 for line in metrics), "there is something to learn"
