"""The launcher example on a tiny model in separate processes: it trains like `shoal grpo`, resumes, and hides keys."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from .helpers.processes import WarmPython, start_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
SMALL = ["gconfig.max_new_tokens=16", "actor.mb_spec.max_tokens_per_mb=300", "train_dataset.batch_size=4"]
# A model with random weights never writes the right number, so the tests reward digits.
DENSE = """
from shoal.envs import answer_of
from shoal.launcher import load_config, run, train


def digits(task, messages):
    answer = answer_of(messages)
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def main(args):
    train(load_config(args, reward=digits))
"""


def run(warm: WarmPython, cwd: Path, *words: str, code: int = 0, fresh: bool = False) -> str:
    command = start_python(words, cwd) if fresh else warm.run(words, cwd, python=True)
    assert command.wait() == code, command.text()[-4000:]
    return command.text()


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines]


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A folder with data in the format of GSM8K, a model, and a script with a reward that random weights can earn."""
    (tmp_path / "data").mkdir()
    for split, count in (("train", 12), ("test", 4)):
        rows = [
            {
                "question": f"Ann has {n} pens and buys {n + 1:,} more. How many?",
                "answer": f"{n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1}\n#### {2 * n + 1:,}",
            }
            for n in range(600, 600 + count)
        ]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "dense.py").write_text(DENSE)
    return tmp_path


def launch(warm: WarmPython, place: Path, *words: str, script: str = "dense.py", **how: Any) -> str:
    base = ["--config", str(EXAMPLE / "train_grpo.yaml"), "actor.path=model", "train_dataset.path=data", *SMALL]
    return run(warm, place, "-m", "shoal.launcher.local", script, *base, *words, **how)


def test_shipped_example_runs_unchanged(warm: WarmPython, place: Path):
    """The command of the guide with a small model, small data and short answers. Every checkpoint has the same score
    format.
    """
    secret = "canary-0123456789"
    said = launch(
        warm, place, "experiment_name=gsm8k-grpo-local", "trial_name=trial0", "total_train_epochs=1",
        f"stats_logger.wandb.wandb_api_key={secret}", script=str(EXAMPLE / "train_grpo.py"), fresh=True,
    )  # fmt: skip
    folder = place / "outputs" / "gsm8k-grpo-local" / "trial0"
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert [record["step"] for record in metrics(folder)] == [0, 1, 2, 3]
    # The configuration causes no warning. Later findings about a random model are possible.
    assert "process list" in said and "warning" not in said.lower().split("training ")[0]
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert secret not in said and not any(secret.encode() in content for content in written)
    for script, output in (("train_local_simple.py", "sft"), ("train_hf_trainer.py", "hf")):
        run(
            warm, place, str(EXAMPLE / script), "--model", "model", "--data", "data", "--output-dir", output,
            "--max-steps", "2", "--batch-size", "4",
        )  # fmt: skip
    scored = run(
        warm, place, str(EXAMPLE / "evaluate.py"), str(folder), "--against", "sft", "--data", "data",
        "--num-examples", "4", "--samples", "2", "--temperature", "1", "--max-new-tokens", "16",
    )  # fmt: skip
    assert "avg@2" in scored and "pass@2" in scored and "paired" in scored
    few = ["--num-examples", "2", "--max-new-tokens", "8"]
    run(warm, place, str(EXAMPLE / "evaluate.py"), "hf", "--data", "data", *few)


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("train_local_simple.py", ["--model", "./nothing"], '--model: "./nothing" does not exist'),
        ("train_local_simple.py", ["--max-length", "3"], "--max-length: all 12 examples"),
        ("train_hf_trainer.py", ["--data", "bad"], "--data: bad: no usable row (1 bad)"),
        ("train_hf_trainer.py", ["--output-dir", "dense.py"], "--output-dir: 'dense.py' is a file"),
        ("train_local_simple.py", ["--output-dir", "model"], "--output-dir: 'model' is not empty"),
        ("evaluate.py", ["model", "--against", "nobody/nothing"], "--against: 'nobody/nothing' is not a local folder"),
        ("evaluate.py", ["model", "--samples", "none"], "--samples: must be a whole number of at least 1, not 'none'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_wrong_script_argument_gives_one_line(warm: WarmPython, place: Path, script: str, words: list[str], says: str):
    (place / "bad").mkdir()
    (place / "bad" / "train.jsonl").write_text("{nonsense\n")
    sound = ["--data", "data"] if script == "evaluate.py" else ["--data", "data", "--model", "model"]
    said = run(warm, place, str(EXAMPLE / script), *sound, *words, code=2)
    told = [line for line in said.splitlines() if not line.startswith("  bad/train.jsonl:1: not JSON")]
    assert len(told) == 1 and told[0].startswith("shoal: error: command line: ") and says in told[0], said


def test_launcher_run_equals_shoal_grpo(warm: WarmPython, place: Path):
    """The same task, seed and settings through both interfaces: equal metrics and weights, bit for bit."""
    launch(
        warm, place, "experiment_name=a", "seed=3", "total_train_steps=3", "saver.freq_epochs=null", "actor.lr=1e-3",
        "evaluator.freq_steps=2", "evaluator.freq_epochs=null",
    )  # fmt: skip
    config = {
        "train": {
            "model": "model", "output_dir": "outputs/b", "seed": 3, "max_steps": 3, "learning_rate": 1e-3,
            "sequence_len": 300, "recompute_old": True,
            "loss": {"type": "decoupled", "clip_low": 0.4, "clip_high": 0.4, "cap": 5.0},
        },
        "orch": {
            "env": "gsm8k", "dataset": {"path": "data"}, "batch_size": 16, "rollouts_per_example": 4,
            "sampling": {"max_tokens": 16}, "reward": {"scale": 10.0, "function": "dense.py:digits", "workers": 1},
            "advantage": {"mean": "group", "std": "batch"}, "eval": {"interval": 2},
        },
        "infer": {"max_num_seqs": 32},
    }  # fmt: skip
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    run(warm, place, "-m", "shoal", "grpo", "run.yaml")
    ours, theirs = place / "outputs" / "a" / "trial0", place / "outputs" / "b"
    assert metrics(ours) == metrics(theirs)
    assert any(record.get("optim/grad_norm", 0) > 0 for record in metrics(ours)), "it trains"
    weights = "final/model.safetensors"
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()


def test_recover_continues_and_used_trial_is_refused_with_launcher_keys(warm: WarmPython, place: Path):
    words = ["experiment_name=c", "saver.freq_epochs=null", "saver.freq_steps=1", "evaluator.mode=disabled"]
    launch(warm, place, *words, "total_train_steps=1")
    said = launch(warm, place, *words, "total_train_steps=2", code=2)
    assert "already holds a run" in said and "trial_name=" in said and "train.output_dir" not in said
    launch(warm, place, *words, "total_train_steps=2", "recover.mode=auto")
    assert [record["step"] for record in metrics(place / "outputs" / "c" / "trial0")] == [1, 2]


def test_page_and_the_readme_start_with_the_command_that_is_tested_here():
    """The first command of both pages is that of the shipped example, and the launcher parses it."""
    from shoal.launcher import load_config

    root = EXAMPLE.parents[1]
    for page in (root / "docs" / "launcher.md", EXAMPLE / "README.md"):
        block = page.read_text().split("```bash\n", 1)[1].split("```", 1)[0]
        words = shlex.split(block.replace("\\\n", " "))
        assert words[:3] == ["python", "-m", "shoal.launcher.local"] and (root / words[3]).is_file()
        arguments = [str(root / word) if word.endswith(".yaml") else word for word in words[4:]]
        assert load_config(arguments).run.train.output_dir == "outputs/gsm8k-grpo-local/trial0"


def test_container_copies_existing_files():
    root, lines = EXAMPLE.parents[1], (EXAMPLE / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((root / word).exists() for word in copied)
    assert f"-f {(EXAMPLE / 'Dockerfile').relative_to(root)} ." in (EXAMPLE / "DOCKER_WINDOWS_SETUP.md").read_text()


@pytest.mark.shared
@pytest.mark.skipif("SHOAL_SHARED" not in os.environ, reason="SHOAL_SHARED is not set")
def test_real_questions_train(warm: WarmPython, place: Path):
    real = Path(os.environ["SHOAL_SHARED"]) / "data" / "gsm8k"
    launch(
        warm, place, "experiment_name=real", f"train_dataset.path={real}", "total_train_steps=1",
        "evaluator.mode=disabled", "actor.mb_spec.max_tokens_per_mb=1500", script=str(EXAMPLE / "train_grpo.py"),
    )  # fmt: skip
    rollouts = (place / "outputs" / "real" / "trial0" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert len(rollouts) == 16 and all("boxed" in json.loads(line)["prompt"] for line in rollouts)
