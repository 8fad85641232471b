"""Two real processes train one model as under `accelerate launch`: data parallel over gloo on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .helpers.processes import WarmPython, ranks_environment

ROOT = Path(__file__).parents[2]
SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path
from transformers import AutoModelForCausalLM
from shoal import GRPOTrainer

model, out, batch_size, steps, use_accelerate, slow = sys.argv[1:7]


class Shout:
    def __init__(self, word, wait=0.0):
        self.prompt = f"Shout {word}"
        self.wait = wait

    def get_reward(self, completion):
        time.sleep(self.wait)
        return sum(c.isupper() for c in completion) / max(len(completion), 1)


words = "shoal river stone cloud ember maple otter linen".split()
policy = AutoModelForCausalLM.from_pretrained(model)
trainer = GRPOTrainer(
    policy, [Shout(word) for word in words], eval_dataset=[Shout(word, float(slow)) for word in words], eval_steps=9,
    num_steps=int(steps), batch_size=int(batch_size), max_new_tokens=6, max_seq_len=64, optimizer_args={"lr": 1e-3},
    output_dir=out, saving_steps=2, use_accelerate=use_accelerate == "yes", resume_from_checkpoint=True,
    overrides=["orch.deadline_s=7"],
)
trainer.train()
rank = os.environ.get("RANK", "0")
weights = b"".join(p.detach().numpy().tobytes() for p in policy.parameters())
found = {"weights": hashlib.md5(weights).hexdigest(), "test": trainer.test([Shout("x")]), "pid": os.getpid()}
Path(f"{out}-rank{rank}.json").write_text(json.dumps(found))
"""


def launch(warm: WarmPython, folder: Path, model: Path, *arguments: str) -> None:
    """Start two processes with the variables of `accelerate launch`. The example below uses the launcher itself."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["script.py", str(model), *arguments]
    given = ranks_environment(2, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="false", ACCELERATE_MIXED_PRECISION="no")
    ranks = [warm.start(words, folder, python=True, env=variables) for variables in given]
    for rank in ranks:
        assert rank.wait() == 0, rank.text()[-4000:]


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(warm: WarmPython, raw_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same four steps by two processes with one prompt each, and by one process with two prompts.

    An evaluation takes longer than the deadline of a wait: eight rewards of 2.2 s in two workers, and a deadline of 7
    s.
    """
    folder = tmp_path_factory.mktemp("accelerate")
    launch(warm, folder, raw_model, "two", "1", "4", "yes", "2.2")
    one = warm.run(["script.py", str(raw_model), "one", "2", "4", "yes", "0"], folder, python=True)
    assert one.wait() == 0, one.text()[-4000:]
    return folder


def test_two_processes_train_one_model(runs: Path):
    ranks = [json.loads((runs / f"two-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["test"]["mean"] >= 0 and ranks[1]["test"] == {}


def test_main_process_alone_writes(runs: Path):
    folder = runs / "two"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "finished" and status["step"] == 4
    assert status["pid"] == json.loads((runs / "two-rank0.json").read_text())["pid"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    metrics = read(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert "eval/dataset/mean" in metrics[0] and metrics[4]["time/eval"] > 7
    assert (folder / "final" / "model.safetensors").is_file() and (folder / "report.html").is_file()


def test_two_processes_are_one_process_with_twice_the_prompts(runs: Path):
    """The same rollouts, and the same weights to rounding, because gradients are summed in another order."""
    for step in range(1, 5):
        ours, theirs = (read(runs / name, f"rollouts/step_{step:06d}.jsonl") for name in ("two", "one"))
        assert [r["rollout_id"] for r in ours] == [r["rollout_id"] for r in theirs]
        assert [r["completion"] for r in ours] == [r["completion"] for r in theirs]
    for ours, theirs in zip(
        read(runs / "two", "metrics.jsonl")[1:], read(runs / "one", "metrics.jsonl")[1:], strict=True
    ):
        for name in ("reward/mean", "policy/entropy", "optim/grad_norm", "tokens/completion"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    one, two = (load_file(runs / name / "final" / "model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)


def test_run_of_two_processes_continues(warm: WarmPython, runs: Path, raw_model: Path):
    launch(warm, runs, raw_model, "two", "1", "5", "yes", "0")
    assert [line["step"] for line in read(runs / "two", "journal.jsonl")] == [1, 2, 3, 4, 5]
    ranks = [json.loads((runs / f"two-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_undeclared_world_size_is_refused(warm: WarmPython, raw_model: Path, tmp_path: Path):
    """Two processes with the variables of a launcher, but without `use_accelerate`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["script.py", str(raw_model), "out", "1", "2", "no", "0"]
    ranks = [warm.start(words, tmp_path, python=True, env=variables) for variables in ranks_environment(2)]
    for rank in ranks:
        assert rank.wait() == 1
        assert "GRPOTrainer: use_accelerate: 2 processes were started" in rank.text()
    assert not (tmp_path / "out").exists()


def test_example_runs_under_the_launcher(raw_model: Path, tmp_path: Path):
    """The command of the guide as printed. Without GPUs, accelerate starts one process, which starts two."""
    options = ["--num_processes", "2"]
    example = [str(ROOT / "examples" / "grpo_trainer_math.py"), "--model", str(raw_model), "--num-steps", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, *example, "--max-new-tokens", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("held-out reward") == 1  # the main process evaluates
    folder = tmp_path / "outputs" / "grpo_trainer_math"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    assert max(line["batch/rollouts"] for line in read(folder, "metrics.jsonl")[1:]) >= 32  # 2 processes × 4 × 4
