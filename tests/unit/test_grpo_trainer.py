"""GRPOTrainer on a tiny model: items, rewards, evaluation, resume, objects, and refusals."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal import GRPOConfig, GRPOTrainer
from shoal.core.errors import ArgumentError, ConfigError, ModelError
from shoal.watch.trackers import TRACKERS, Tracker
from support.folders import write_model

WORDS = ["shoal", "river", "stone", "cloud", "ember", "maple", "otter", "linen"]
SHORT: dict[str, Any] = {"max_new_tokens": 6, "max_seq_len": 64, "optimizer_args": {"lr": 1e-3}, "batch_size": 2}


@dataclass
class Shout:
    prompt: str

    def get_reward(self, completion: str) -> float | None:
        """Completions with a digit are excluded from their group."""
        if any(c.isdigit() for c in completion):
            return None
        return sum(c.isupper() for c in completion) / max(len(completion), 1)


ITEMS = [Shout(f"Shout {word}") for word in WORDS]


def capitals(completion: str) -> float:
    return sum(c.isupper() for c in completion) / max(len(completion), 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in metrics]


def test_training_and_evaluation_use_all_items(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trainer = GRPOTrainer(
        model, ITEMS, eval_dataset=ITEMS[:2], eval_steps=2, num_steps=3, output_dir=str(tmp_path / "run"),
        log_completions=1, **SHORT,
    )  # fmt: skip
    folder = trainer.train()
    assert [line["step"] for line in trainer.metrics] == [0, 1, 2, 3]
    assert ["eval/dataset/mean" in line for line in trainer.metrics] == [True, False, True, True]
    rollouts = [line for step in (1, 2, 3) for line in lines(folder, f"rollouts/step_{step:06d}.jsonl")]
    excluded = [line for line in rollouts if line["status"] == "excluded"]
    assert excluded and all(any(c.isdigit() for c in line["completion"]) for line in excluded)
    assert all(line["reward"] is None and line["advantage"] is None for line in excluded)
    shown = capsys.readouterr().out
    assert sum(" → " in line for line in shown.splitlines()) == 3  # log_completions=1: one under each of three steps
    tested = trainer.test(ITEMS)
    assert 0 <= tested["mean"] <= 1 and tested["error_frac"] < 1


def test_resumed_run_equals_an_undisturbed_one(model: str, tmp_path: Path):
    arguments = {**SHORT, "saving_steps": 1}
    whole = GRPOTrainer(model, ITEMS, num_steps=3, output_dir=str(tmp_path / "whole"), **arguments)
    whole.train()
    first = GRPOTrainer(model, ITEMS, num_steps=2, output_dir=str(tmp_path / "parts"), **arguments)
    first.train()
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: output_dir: .* already holds a run; continue it"):
        GRPOTrainer(model, ITEMS, num_steps=3, output_dir=str(tmp_path / "parts"), **arguments).train()
    second = GRPOTrainer(
        model, ITEMS, num_steps=3, output_dir=str(tmp_path / "parts"), resume_from_checkpoint=True, **arguments
    )
    second.train()
    assert untimed(second.metrics) == untimed(whole.metrics)
    state = "checkpoints/step_000003/trainer.safetensors"
    ours, theirs = load_file(tmp_path / "parts" / state), load_file(tmp_path / "whole" / state)
    assert ours.keys() == theirs.keys() and any(name.startswith("exp_avg") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_other_data_cannot_be_resumed(model: str, tmp_path: Path):
    GRPOTrainer(model, ITEMS, num_steps=1, output_dir=str(tmp_path), **SHORT).train()
    other = [Shout("Whisper"), *ITEMS[1:]]
    with pytest.raises(ConfigError, match=r"other settings: the data has changed"):
        GRPOTrainer(model, other, num_steps=2, output_dir=str(tmp_path), resume_from_checkpoint=True, **SHORT).train()
    fewer = {**SHORT, "batch_size": 1}
    with pytest.raises(ConfigError, match=r"\(8 before, 7 now\); batch_size was 8, is now 4 rollouts"):
        GRPOTrainer(model, ITEMS[1:], num_steps=2, output_dir=tmp_path, resume_from_checkpoint=True, **fewer).train()


def test_model_object_and_trl_rewards(model: str, tmp_path: Path):
    """Trained in place and restored afterwards. Its own tokenizer is not needed if one is given."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    loaded.name_or_path = ""
    loaded.lm_head.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    rows = Dataset.from_list([{"prompt": f"Shout {word}", "word": word} for word in WORDS])

    def loud(prompts, completions, word, **kwargs):
        assert prompts[0].endswith(word[0])
        return [capitals(text) for text in completions]

    with pytest.raises(ArgumentError, match=r"GRPOTrainer: tokenizer: is required"):
        GRPOTrainer(loaded, rows, capitals)
    trainer = GRPOTrainer(
        loaded, rows, [loud, capitals], reward_weights=[1.0, 0.5], tokenizer=AutoTokenizer.from_pretrained(model),
        num_steps=2, output_dir=str(tmp_path), **SHORT,
    )  # fmt: skip
    folder = trainer.train()
    metrics = trainer.metrics[-1]
    assert metrics["reward/mean"] == pytest.approx(1.5 * metrics["reward/part/loud"])
    assert metrics["reward/part/loud"] == pytest.approx(metrics["reward/part/capitals"])
    moved = [name for name, p in loaded.named_parameters() if not torch.equal(p, before[name])]
    frozen = [name for name, p in loaded.named_parameters() if not p.requires_grad]
    assert moved and frozen and not set(frozen) & set(moved)  # frozen weights are unchanged, and still frozen
    final: Any = AutoModelForCausalLM.from_pretrained(folder / "final")
    ids = torch.arange(3, 13)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, final(input_ids=ids).logits)
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 12)


def test_trls_constructor_trains(model: str, tmp_path: Path):
    """As in TRL's documentation: one complete group per reward call, TRL's KL, and a resume as in TRL."""
    groups: list[int] = []

    def loud(completions, **kwargs):
        groups.append(len(completions))
        return [capitals(text) for text in completions]

    def make(steps: int) -> GRPOTrainer:
        return GRPOTrainer(
            model=model,
            reward_funcs=[loud, capitals],
            args=GRPOConfig(
                output_dir=str(tmp_path), max_steps=steps, learning_rate=1e-3, num_generations=4, beta=0.04,
                per_device_train_batch_size=8, max_completion_length=6, vllm_max_model_length=64, logging_steps=1,
                save_steps=1, reward_weights=[1.0, 0.5],
            ),
            train_dataset=Dataset.from_list([{"prompt": f"Shout {word}"} for word in WORDS]),
            processing_class=AutoTokenizer.from_pretrained(model),
            overrides=["orch.reward.workers=1"],
        )  # fmt: skip

    make(1).train()
    trainer = make(2)
    trainer.train(resume_from_checkpoint=True)
    last = trainer.metrics[-1]
    assert [line["step"] for line in trainer.metrics] == [1, 2] and "policy/kl_ref" in last
    assert last["reward/mean"] == pytest.approx(1.5 * last["reward/part/loud"])
    rollouts = lines(tmp_path, "rollouts/step_000002.jsonl")
    assert len(rollouts) == 8 and all(line["advantage"] is not None for line in rollouts)


def test_trls_entropy_vespo_and_objectives(model: str, tmp_path: Path):
    """One function does not apply to all completions. The advantages are those of TRL's formula."""

    def loud(completions, **_):
        return [capitals(text) for text in completions]

    def dense(completions, **_):
        return [None if "e" in text else len(set(text)) / 6 for text in completions]

    trainer = GRPOTrainer(
        model=model, reward_funcs=[loud, dense],
        args=GRPOConfig(
            output_dir=str(tmp_path), max_steps=2, learning_rate=1e-3, num_generations=4, max_completion_length=6,
            per_device_train_batch_size=8, vllm_max_model_length=64, reward_weights=[1.0, 0.5], loss_type="vespo",
            multi_objective_aggregation="normalize_then_sum", entropy_coef=0.01, use_adaptive_entropy=True,
            entropy_target=50.0, save_strategy="no",
        ),
        train_dataset=[{"prompt": f"Shout {word}"} for word in WORDS], overrides=["orch.reward.workers=1"],
    )  # fmt: skip
    trainer.train()
    assert [line["policy/entropy_coef"] for line in trainer.metrics] == pytest.approx([0.0, 0.015])
    assert all(line["policy/gate"] == pytest.approx(1.0, abs=1e-4) for line in trainer.metrics)
    missing = 0
    for step in (1, 2):
        rollouts = sorted(lines(tmp_path, f"rollouts/step_{step:06d}.jsonl"), key=lambda rollout: rollout["group"])
        rewards = [[rollout["parts"].get(name, math.nan) for name in ("loud", "dense")] for rollout in rollouts]
        table = torch.tensor(rewards, dtype=torch.float64).view(-1, 4, 2)
        missing += int(table.isnan().sum())
        away = table - table.nanmean(1, keepdim=True)
        count = (~table.isnan()).sum(1, keepdim=True)
        std = (away.square().nansum(1, keepdim=True) / (count - 1)).sqrt()
        total = (away / (std + 1e-4) * torch.tensor([1.0, 0.5])).nansum(2).flatten()
        wanted = (total - total.mean()) / (total.std() + 1e-4)
        assert [rollout["advantage"] for rollout in rollouts] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert missing


def test_lora_does_not_modify_the_model_object(model: str, tmp_path: Path):
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    before = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    trainer = GRPOTrainer(
        loaded, ITEMS, num_steps=2, lora=True, lora_rank=4, kl_penalty=0.01, output_dir=str(tmp_path), **SHORT
    )
    folder = trainer.train()
    assert {name: p.shape for name, p in loaded.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in loaded.named_parameters())
    assert json.loads((folder / "final" / "adapter_config.json").read_text())["r"] == 4
    assert "policy/kl_ref" in trainer.metrics[-1]
    assert 0 <= trainer.test(ITEMS[:2])["mean"] <= 1


def test_start_adapter_must_exist(model: str):
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: adapter_path: .*nowhere.* adapter_config"):
        GRPOTrainer(model, ITEMS, lora=True, adapter_path="nowhere")


def test_arguments_that_are_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    rows = [{"prompt": "a"}]
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: reward_funcs: the items of train_dataset .dict. have no"):
        GRPOTrainer(model, rows)
    with pytest.raises(ArgumentError, match=r"reward_funcs: cannot be combined with items that have get_reward"):
        GRPOTrainer(model, ITEMS, capitals)
    with pytest.raises(ArgumentError, match=r"reward_weights: is not used without reward_funcs"):
        GRPOTrainer(model, ITEMS, reward_weights=[1.0])
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: groupsize: is not an argument; did you mean group_size"):
        GRPOTrainer(model, ITEMS, groupsize=4)
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: args: must be a shoal.GRPOConfig"):
        GRPOTrainer(model, ITEMS, args=object())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"GRPOTrainer.test: dataset: is empty"):
        GRPOTrainer(model, ITEMS).test()
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: model: must be a folder, .*, not 3"):
        GRPOTrainer(3, ITEMS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match=r"GRPOTrainer: use_accelerate: 2 processes were started"):
        GRPOTrainer(model, ITEMS)


def test_wrapped_model_is_refused(model: str, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(task_type="CAUSAL_LM"))
    trainer = GRPOTrainer(wrapped, ITEMS, num_steps=1, output_dir=str(tmp_path), **SHORT)
    with pytest.raises(ModelError, match=r"wrapped by PEFT; pass the plain model"):
        trainer.train()


def test_vllm_that_is_not_installed_says_what_to_do(model: str):
    with pytest.raises(ArgumentError) as caught:
        GRPOTrainer(model, ITEMS, use_vllm=True)
    with pytest.raises(ArgumentError, match=r"vllm_args\['gpu_memory_utilisation'\]: is not known; did you mean"):
        GRPOTrainer(model, ITEMS, use_vllm=True, vllm_args={"gpu_memory_utilisation": 0.5})  # before "not installed"
    said = str(caught.value)
    assert said.startswith("GRPOTrainer: use_vllm: ") and "pip install vllm" in said and "remove use_vllm" in said


def test_importing_the_package_loads_no_torch():
    script = (
        "import sys, shoal; assert 'torch' not in sys.modules; shoal.GRPOTrainer; assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert result.returncode == 0, result.stderr


def test_training_works_inside_an_event_loop(model: str, tmp_path: Path):
    """As in a notebook."""

    async def cell() -> float:
        trainer = GRPOTrainer(model, ITEMS, num_steps=1, output_dir=str(tmp_path), **SHORT)
        trainer.train()
        return trainer.test(ITEMS[:2])["mean"]

    assert 0 <= asyncio.run(cell()) <= 1


def test_wandb_gets_the_project(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A test tracker records the project, the configuration and every step."""
    told: list[Any] = []

    class Recorder:
        def __init__(self, run: Any) -> None:
            told.append((run.project, run.config["train"]["max_steps"]))

        def log(self, step: int, metrics: Any) -> None:
            told.append(step)

        def log_completions(self, step: int, rows: Any) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(TRACKERS, "wandb", Tracker("json", "", Recorder))
    GRPOTrainer(
        model, ITEMS, num_steps=2, output_dir=str(tmp_path), enable_wandb=True, wandb_project="fish", **SHORT
    ).train()
    assert told == [("fish", 2), 1, 2]
