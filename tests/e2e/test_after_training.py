"""After a run: GRPO from an SFT adapter, export, the score of any checkpoint, and the comparison of two checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run

NewRun = Callable[..., Run]
LORA = {"lora": True, "lora_rank": 4, "lora_alpha": 8, "learning_rate": 2e-3}


LETTERS = """
from shoal.envs import SingleTurn, answer_of, ask


class Letters(SingleTurn):
    def tasks(self, split):
        first = 0 if split == "train" else 100
        return [ask(f"say {n}") for n in range(first, first + 20)]

    def reward(self, task, messages):
        text = answer_of(messages)
        return sum(letter in "abcdefgh" for letter in text) / max(len(text), 1)
"""


def run(warm: WarmPython, folder: Path, *words: str, code: int = 0) -> str:
    command = warm.run(list(words), folder)
    assert command.wait() == code, command.text()
    return command.text()


def logits(model: Any, ids: list[int]):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_from_an_sft_adapter_to_a_folder_to_publish(new_run: NewRun, model: Path, warm: WarmPython, tmp_path: Path):
    import torch
    from peft import PeftModel

    rows = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sft = ["sft", "--model", str(model), "--dataset", "rows.jsonl", "--max-steps", "3", "--output-dir", "warm-up"]
    run(warm, tmp_path, *sft, "train.lora=true", "train.lora_rank=4", "batch_size=4", "train.learning_rate=1e-2")
    adapter = tmp_path / "warm-up" / "final"
    started = new_run("grpo", train={
        "lora": True, "adapter_path": str(adapter), "learning_rate": 2e-3, "max_steps": 2,
        "loss": {"type": "grpo", "kl": {"beta": 0.05}},
    })  # fmt: skip
    assert started.grpo().wait() == 0
    assert started.steps()[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-9), "the reference is the SFT start"
    assert started.steps()[1]["policy/kl_ref"] > 0

    said = run(warm, tmp_path, "export", str(started.path), "published")
    assert "adapter merged" in said
    merged = loaded(tmp_path / "published")
    with_adapter = PeftModel.from_pretrained(loaded(model), str(started.path / "final")).eval()
    ids = list(range(20, 60))
    torch.testing.assert_close(logits(merged, ids), logits(with_adapter, ids), atol=1e-4, rtol=1e-4)
    assert (logits(merged, ids) - logits(loaded(model), ids)).abs().max() > 1e-3, "the adapter has an effect"
    card = (tmp_path / "published" / "README.md").read_text()
    assert card.startswith("---\n") and "library_name: transformers" in card and "reverse-text" in card
    assert str(tmp_path) not in card, "paths of this machine are not published"
    assert run(warm, tmp_path, "export", str(started.path), "published", code=2).count("exists already") == 1


def test_checkpoints_are_scored_and_compared(new_run: NewRun, model: Path, warm: WarmPython):
    """A run rewarded for letters improves by more than its interval. Scores are equal for every way to name the
    weights.
    """
    trained = new_run(
        train={**LORA, "max_steps": 12, "learning_rate": 2e-2, "save_steps": 6, "save_total_limit": 4},
        orch={
            "env": [{"id": "letters.py:Letters"}], "sampling": {"max_tokens": 10}, "batch_size": 32,
            "rollouts_per_example": 8, "eval": {"interval": 6, "num_examples": 12, "keep_best": True},
        },
    )  # fmt: skip
    (trained.folder / "letters.py").write_text(LETTERS)
    assert trained.grpo().wait() == 0
    asked = ["--env", "letters.py:Letters", "--num-examples", "20", "--max-tokens", "10",
             "--rollouts-per-example", "4", "--temperature", "1"]  # fmt: skip

    def scores(text: str) -> dict[str, str]:
        return dict(line.split(None, 1) for line in text.splitlines() if line.startswith(("eval/", "avg@", "prompts")))

    answers = ["--out", "answers"]
    compared = run(warm, trained.folder, "eval", "out", "--against", str(model), *asked, *answers)
    assert "paired; the first is better" in compared and "pass@4" in compared
    for name in ("first", "second"):
        listed = run(warm, trained.folder, "show", f"answers/{name}", "--list").splitlines()
        assert len(listed) == 20 and all("eval:letters.py-Letters/" in line for line in listed)
    assert "not an empty folder" in run(warm, trained.folder, "eval", "out", *asked, *answers, code=2)
    run(warm, trained.folder, "report", "answers/first", "answers/second", "--out", "both.html")
    kept = [path.name for path in sorted((trained.path / "rollouts").glob("eval_*.jsonl"))]
    assert kept == [f"eval_{step:06d}.jsonl" for step in (0, 6, 12)]
    held_out = run(warm, trained.folder, "show", "out", "--eval", "--step", "6", "--list").splitlines()
    assert len(held_out) == 12 and "eval:letters.py-Letters/0" in held_out[0]
    assert "eval:" not in run(warm, trained.folder, "show", "out", "--list")
    by_run = scores(run(warm, trained.folder, "eval", "out", *asked))
    by_adapter = scores(run(warm, trained.folder, "eval", str(model), "--adapter", "out/final", *asked))
    by_folder = scores(run(warm, trained.folder, "eval", "out/checkpoints/step_000012", *asked))
    assert by_run == by_adapter == by_folder
    card = (trained.path / "final" / "README.md").read_text()
    assert "library_name: peft" in card and "Held-out evaluation" in card and "More Information" not in card
    mask = os.umask(0o022)
    os.umask(mask)
    modes = {path: path.stat().st_mode & 0o777 for path in trained.path.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o666 & ~mask}, modes
    greedy = ["say 100", "--temperature", "0", "--max-tokens", "10", "infer.max_model_len=64"]
    said, before = (run(warm, trained.folder, "chat", name, *greedy) for name in ("out", str(model)))
    assert said != before, "the adapter answers"
    best = json.loads((trained.path / "checkpoints" / "best.json").read_text())["step"]
    chosen = scores(run(warm, trained.folder, "eval", "out", "--checkpoint", "best", *asked))
    named = scores(run(warm, trained.folder, "eval", "out", "--checkpoint", str(best), *asked))
    assert chosen == named
    shutil.rmtree(trained.path / "final")
    assert scores(run(warm, trained.folder, "eval", "out", *asked)) == by_run, "then the newest checkpoint"
    assert "available: 6, 12" in run(warm, trained.folder, "eval", "out", "--checkpoint", "7", *asked, code=2)
    assert "not a run directory" in run(
        warm, trained.folder, "eval", str(model), "--checkpoint", "best", *asked, code=2
    )


def test_raise_max_steps_of_a_finished_run(new_run: NewRun):
    finished = new_run(train={"max_steps": 2})
    assert finished.grpo().wait() == 0
    assert "nothing is left to do" in finished.grpo("--resume").text()
    assert finished.grpo("--resume", "train.max_steps=4").wait() == 0
    assert [step["step"] for step in finished.steps()] == [1, 2, 3, 4] and finished.status()["step"] == 4


def test_early_stop_names_the_best_step(new_run: NewRun):
    stuck = new_run(
        train={"max_steps": 40, "learning_rate": 0.0},
        orch={"eval": {"interval": 1, "num_examples": 4, "stop_after": 2, "sampling": {"temperature": 0.0}}},
    )
    assert stuck.grpo().wait() == 0
    assert stuck.status()["step"] == 2 and stuck.events("early-stop")[0]["message"].endswith("since step 0")


def test_mixture_of_experts_trains(new_run: NewRun, tmp_path: Path):
    """The router and experts use Shoal's attention: sampler and trainer agree, and both kinds of weights change."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from support.models import _SHAPE, TOKENIZER, randomise

    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**_SHAPE, **experts), dtype=torch.float32)
    randomise(model, 0).save_pretrained(tmp_path / "moe")
    TOKENIZER.save_pretrained(tmp_path / "moe")
    for kind, own in (("full", {}), ("lora", LORA)):
        trained = new_run(kind, train={"model": str(tmp_path / "moe"), "learning_rate": 1e-3, **own})
        command = trained.grpo("orch.env=[{id: arithmetic}]", "orch.reward=my_code:digits")
        assert command.wait() == 0, command.text()
        assert all(step["optim/grad_norm"] > 0 and step["mismatch/k3"] < 1e-9 for step in trained.steps())
        if kind == "full":
            before, after = dict(model.named_parameters()), dict(loaded(trained.path / "final").named_parameters())
            for name in (
                "mlp.gate.weight",
                "mlp.experts.gate_up_proj",
                "mlp.experts.down_proj",
                "self_attn.q_proj.weight",
            ):
                key = f"model.layers.1.{name}"
                assert not torch.equal(before[key], after[key]), key


def test_bad_rows_and_long_prompts_are_counted_in_the_run(new_run: NewRun):
    run_ = new_run(
        train={"max_steps": 1},
        orch={"env": [{"id": "dataset", "args": {"reward": "my_code:digits"}}], "dataset": {"path": "rows.jsonl"}},
    )
    rows = [json.dumps({"prompt": f"say {n}"}) for n in range(30)]
    rows[3], rows[7], rows[8] = "{broken", json.dumps({"prompt": "x" * 400}), json.dumps({"prompt": None})
    (run_.folder / "rows.jsonl").write_text("\n".join(rows))
    command = run_.grpo()
    assert command.wait() == 0, command.text()
    data, split = run_.events("data")
    assert (data["level"], split["level"]) == ("warning", "notice") and "the last 2 of 28 rows" in split["message"]
    assert split["message"] in command.text()
    assert "28 rows used, 2 invalid rows" in data["message"]
    assert "rows.jsonl:4: not JSON" in data["message"] and "rows.jsonl:9: prompt is null" in data["message"]
    (aside,) = run_.events("set-aside")
    assert aside["data"] == {"prompts": 1, "of": 26} and "1 of 26 prompts of dataset" in aside["message"]
    assert "2 invalid rows" in command.text() and "1 of 26 prompts" in command.text()
    every = new_run(
        "none",
        orch={"env": [{"id": "dataset", "args": {"reward": "my_code:digits"}}], "dataset": {"path": "long.jsonl"}},
    )
    (every.folder / "long.jsonl").write_text("\n".join(json.dumps({"prompt": "x" * (300 + n)}) for n in range(3)))
    command = every.grpo()
    assert command.wait() == 2 and "no prompt of dataset fits" in command.text()
