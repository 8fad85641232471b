"""A run trains all weights or adapters, the quickstart files run, and the result loads in transformers and PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .helpers.processes import Command, WarmPython, start_fresh
from .helpers.runs import REVERSE_ARGS, Run, assert_trained_once, hash_of, overrides

EXAMPLES = Path(__file__).parents[2] / "examples" / "grpo"
NewRun = Callable[..., Run]
LORA = {"lora": True, "lora_rank": 4, "lora_alpha": 8, "learning_rate": 2e-3}


def plain_logprobs(folder: Path, base: Path | None, rollout: dict[str, Any]) -> np.ndarray:
    """Log-probs of a recorded rollout with the weights of a folder, by transformers and PEFT alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shoal.envs.registry import load_environment

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    task = load_environment("reverse-text", REVERSE_ARGS).tasks("train")[int(rollout["prompt_id"].split("/")[1])]
    prompt = tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_dict=False)
    assert len(prompt) == rollout["prompt_tokens"]
    ids = torch.tensor([[*prompt, *rollout["token_ids"]]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[at, ids[0, at + 1]].numpy()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_trained_model_loads_in_transformers(new_run: NewRun, model: Path, tmp_path: Path, kind: str):
    run = new_run(train=LORA if kind == "lora" else {})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert run.status()["state"] == "finished" and run.status()["step"] == 4 and not run.status()["resumable"]
    assert_trained_once(run, 4)
    assert all(step["optim/grad_norm"] > 0 and step["optim/skipped"] == 0 for step in run.steps())
    assert all(step["mismatch/k3"] < 1e-9 for step in run.steps()), "sampler and trainer use the same model"
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    last = run.path / "checkpoints" / "step_000004" / "weights" / weights
    assert hash_of(run.path / "final" / weights) == hash_of(last)
    assert "adapter_model.safetensors" in [file.name for file in (run.path / "final").iterdir()] or kind == "full"

    # One further step samples with exactly the weights in `final`.
    final = tmp_path / "kept"
    shutil.copytree(run.path / "final", final)
    assert run.grpo("--resume", "train.max_steps=5").wait() == 0
    drawn = [rollout for rollout in run.rollouts() if rollout["step"] == 5][:4]
    base = model if kind == "lora" else None
    for rollout in drawn:
        np.testing.assert_allclose(plain_logprobs(final, base, rollout), rollout["sampler_logprobs"], atol=2e-5)
    assert plain_logprobs(model, None, drawn[0]) != pytest.approx(drawn[0]["sampler_logprobs"], abs=1e-4), "it changed"


@pytest.mark.parametrize("lora", [True, False])
def test_quickstart_files_train_a_small_local_model(warm: WarmPython, model: Path, tmp_path: Path, lora: bool):
    """The model keys and the recipe differ. Batch and steps are smaller to save time."""
    for file in ("train.yaml", "infer.yaml", "orch.yaml"):
        shutil.copy(EXAMPLES / file, tmp_path / file)
    files = ["--train", "train.yaml", "--infer", "infer.yaml", "--orch", "orch.yaml"]
    keys = overrides(
        train__model=str(model), infer__model=str(model), orch__model__name=str(model), train__recipe="fp32"
    )
    smaller = ["orch.batch_size=16", "orch.rollouts_per_example=4", "train.max_steps=4", "orch.max_steps=4"]
    own = [] if lora else ["train.lora=false"]
    command = warm.run(["grpo", *files, *keys, *smaller, "train.output_dir=out", *own], tmp_path)
    assert command.wait() == 0, command.text()
    run = Run(tmp_path, warm)
    assert_trained_once(run, 4)
    assert [step["noise/sigma"] > 0 for step in run.steps()] == [False, True, True, True]
    for step in run.steps():
        assert step["noise/applied"] == pytest.approx(step["noise/sigma"], rel=0.2), "fp32 has no rounding difference"
    assert all(np.isfinite(step["policy/loss"]) and step["optim/grad_norm"] > 0 for step in run.steps())
    assert all("masked" in step for step in run.steps()), "the quickstart's loss reports the dropped tokens"
    assert (run.path / "final" / "adapter_config.json").exists() == lora
    note = "is false, so these keys have no effect" in command.text()
    assert note != lora, "keys without effect unless LoRA is on are named"


def scores_in(command: Command) -> dict[str, str]:
    """The first two columns of the table of `shoal eval`."""
    rows = (line.split()[:2] for line in command.text().splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_fresh_process_without_network_trains_and_evaluates(new_run: NewRun, model: Path):
    """No warm process: `python -m shoal` as a user starts it, then `shoal eval` on the result."""
    run = new_run(train={**LORA, "max_steps": 2})
    command = start_fresh(["grpo", "run.yaml"], run.folder)
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 2)
    arguments = [str(model), "--env", "reverse-text", "--num-examples", "8", "--max-tokens", "10"]
    arguments += [f"--arg={key}={value}" for key, value in REVERSE_ARGS.items()]
    before = start_fresh(["eval", *arguments], run.folder)
    after = run.warm.run(["eval", *arguments, "--adapter", "out/final"], run.folder)
    assert before.wait() == 0 and after.wait() == 0, before.text() + after.text()
    for command in (before, after):
        scores = scores_in(command)
        assert 0 <= float(scores["avg@1"]) <= 1
        assert float(scores["eval/reverse-text/error_frac"]) == 0


def test_evaluating_the_final_model_equals_the_last_evaluation_of_the_run(new_run: NewRun):
    held_out = {"interval": 2, "num_examples": 8, "sampling": {"temperature": 0.0}}
    run = new_run(orch={"eval": held_out})
    assert run.grpo().wait() == 0
    evaluated = {
        line["step"]: line["eval/reverse-text/mean"] for line in run.metrics() if "eval/reverse-text/mean" in line
    }
    assert sorted(evaluated) == [0, 2, 4]
    arguments = ["out/final", "--env", "reverse-text", "--num-examples", "8", "--max-tokens", "10"]
    command = run.warm.run(["eval", *arguments, *(f"--arg={k}={v}" for k, v in REVERSE_ARGS.items())], run.folder)
    assert command.wait() == 0, command.text()
    assert float(scores_in(command)["avg@1"]) == pytest.approx(evaluated[4], abs=1e-3)


def test_minibatches_times_epochs_optimizer_steps(new_run: NewRun):
    train = {"minibatches": 2, "ppo_epochs": 2, "max_steps": 3, "lr_scheduler_type": "linear"}
    run = new_run(train=train)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 3)
    rates = [step["optim/lr"] for step in run.steps()]
    assert rates == pytest.approx([2e-4 * (13 - 4 * n) / 12 for n in (1, 2, 3)]), "twelve optimizer steps in total"
    assert all(step["mismatch/k3"] < 1e-9 for step in run.steps()), "measured before the weights change"


@pytest.mark.parametrize("train", [{}, LORA], ids=["frozen copy", "adapter off"])
def test_kl_reference_is_the_start_of_the_run(new_run: NewRun, train: dict[str, Any]):
    """Step 1 has no change yet. Later steps have one."""
    run = new_run(train={**train, "max_steps": 3, "loss": {"type": "grpo", "kl": {"beta": 0.05}}})
    command = run.grpo()
    assert command.wait() == 0, command.text()
    first, *rest = [step["policy/kl_ref"] for step in run.steps()]
    assert abs(first) < 1e-9 < 1e-6 < min(rest)
