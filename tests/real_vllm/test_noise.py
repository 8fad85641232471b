"""QeRL noise on a real vLLM: it samples with the norms of a version plus the noise of this version only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from shoal.core.types import Completion
from shoal.rollout.remote.norm_noise import normal, write_noisy_norms
from shoal.rollout.remote.vllm import VllmRolloutEngine
from support.engine_servers import adapter, contract_model, settings, shared_vllm
from support.engines import ask
from support.models import TOKENIZER, small_model
from support.vllm_runs import PROMPT, grpo, lines, logprobs, on_shared_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SEED = 3


def test_noise_is_added_to_norms_and_removed(tmp_path: Path) -> None:
    clean, noisy = small_model("qwen3", seed=8), small_model("qwen3", seed=8)
    names = write_noisy_norms(contract_model(), tmp_path, sigma=0.2, seed=7, version=0)
    noisy.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert len(names) == 5  # two per layer and the last

    async def check(engine: VllmRolloutEngine) -> None:
        await engine.load(0, {"sigma": 0.2, "noise_seed": 7})
        drawn = await engine.generate(ask("r", PROMPT))
        np.testing.assert_allclose(drawn.logprobs, logprobs(noisy, drawn), rtol=0, atol=1e-4)
        assert np.abs(logprobs(noisy, drawn) - logprobs(clean, drawn)).max() > 1e-2
        await engine.load(0, {"sigma": 0.0})
        drawn = await engine.generate(ask("s", PROMPT))
        np.testing.assert_allclose(drawn.logprobs, logprobs(clean, drawn), rtol=0, atol=1e-4)

    on_shared_vllm(check)


def test_noise_with_adapters_ends_with_the_run(tmp_path: Path) -> None:
    """The noise is on the norms of the base model, which adapters do not replace, so the next client would sample with
    it.
    """
    manifest, _ = adapter(tmp_path / "one", 1, 4)
    clean, noisy = small_model("qwen3", seed=8), with_noise(small_model("qwen3", seed=8), 0.2, SEED, 1)
    adapted: Any = PeftModel.from_pretrained(with_noise(small_model("qwen3", seed=8), 0.2, SEED, 1), tmp_path / "one")

    async def check(engine: VllmRolloutEngine) -> None:
        await engine.load(1, {**manifest, "sigma": 0.2, "noise_seed": SEED})
        drawn = await engine.generate(ask("r", PROMPT))
        np.testing.assert_allclose(drawn.logprobs, logprobs(adapted, drawn), rtol=0, atol=1e-4)
        other = await drawn_by_another()
        np.testing.assert_allclose(other.logprobs, logprobs(noisy, other), rtol=0, atol=1e-4)
        await engine.close()
        other = await drawn_by_another()
        np.testing.assert_allclose(other.logprobs, logprobs(clean, other), rtol=0, atol=1e-4)

    on_shared_vllm(check, lora_rank=4)


def test_noise_of_a_run(tmp_path: Path) -> None:
    """Three steps in three stages: none, .2 and .1. Sampled tokens have the log-probs of the noise of their version."""
    noise = {"enabled": True, "sigma_start": 0.2, "sigma_end": 0.1, "num_stages": 3}
    train = {"noise_scheduler": noise, "max_steps": 3, "seed": SEED}
    done = grpo(tmp_path, infer={}, train=train, orch={"client": {"base_url": f"{shared_vllm()}/v1"}})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "out"
    sigmas = [row["noise/sigma"] for row in lines(out / "metrics.jsonl")]
    assert sigmas == pytest.approx([0.0, 0.2, 0.1])
    applied = [row["noise/applied"] for row in lines(out / "metrics.jsonl")]
    assert applied == pytest.approx(sigmas, rel=0.2)
    for version, folder, sigma in ((0, contract_model(), 0.0), (2, out / "weights" / "v000002", 0.1)):
        drawn = lines(out / "rollouts" / f"step_{version + 1:06d}.jsonl")
        assert {span[2] for row in drawn for span in row["spans"]} == {version}
        clean, noisy = with_weights(folder), with_noise(with_weights(folder), sigma, SEED, version)
        apart = [np.abs(sampled(clean, row) - row["sampler_logprobs"]).max() for row in drawn]
        assert max(np.abs(sampled(noisy, row) - row["sampler_logprobs"]).max() for row in drawn) < 1e-4
        assert (min(apart) > 1e-3) == (sigma > 0)
    after, last = asyncio.run(drawn_by_another()), with_weights(out / "weights" / "v000003")
    np.testing.assert_allclose(after.logprobs, logprobs(last, after), rtol=0, atol=1e-4)


async def drawn_by_another() -> Completion:
    """Log-probs of another client of the server, with its current weights."""
    engine = VllmRolloutEngine(settings(shared_vllm()))
    try:
        return await engine.generate(ask("another", PROMPT))
    finally:
        await engine.close()


def with_weights(folder: Path) -> Any:
    model = small_model("qwen3", seed=8)
    missing, unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unknown and not missing
    return model


@torch.no_grad()
def with_noise(model: Any, sigma: float, seed: int, version: int) -> Any:
    """On the input, post-attention and final norms: two per layer and the last."""
    names = [name for name, _ in model.named_parameters() if "layernorm" in name or name == "model.norm.weight"]
    assert len(names) == 5
    for name in names:
        weight = model.get_parameter(name)
        weight += sigma * torch.from_numpy(normal(seed, version, name, tuple(weight.shape))).to(weight.dtype)
    return model


@torch.no_grad()
def sampled(model: Any, row: dict[str, Any]) -> np.ndarray:
    """Log-probs of a recorded rollout's tokens."""
    system, user = (part.partition("] ")[2] for part in row["prompt"].split("\n\n"))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(prompt) == row["prompt_tokens"]
    rows = model(torch.tensor([list(prompt) + row["token_ids"]])).logits[0, len(prompt) - 1 : -1].double()
    return rows.log_softmax(-1).gather(-1, torch.tensor(row["token_ids"])[:, None])[:, 0].numpy()
