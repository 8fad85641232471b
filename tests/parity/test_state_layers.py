"""Layers with a state: packed rows equal padded rows, and a completion does not depend on its batch.

`make test-models` compares texts and log-probs of every such family with transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.families import build
from shoal.engine.kv_cache import SlotCache
from shoal.models.decoder import Decoder
from support.engines import ask, make_engine, run
from support.models import as_decoder, random_prompts
from support.training import make_policy

FAMILIES = ("lfm2", "qwen3_5_text", "bamba")  # a convolution, the gated delta rule, Mamba-2
LENGTHS = (5, 1, 11, 30, 2)
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes states in fp32 for every dtype. A comparison to 1e-10 needs float64 everywhere."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


@each_family
def test_packed_equals_padded(family: str, all_in_float64: None) -> None:
    model = build(family).double()
    decoder = Decoder(model)
    decoder.verify()
    prompts = random_prompts(0, *LENGTHS)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    row = torch.tensor([[token for prompt in prompts for token in prompt]])
    packed = decoder.logits(decoder.hidden(row, positions, decoder.pack(starts)))[0]
    packed.square().mean().backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    padded = torch.tensor([prompt + [0] * (max(LENGTHS) - len(prompt)) for prompt in prompts])
    mask = torch.tensor([[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS])
    model.set_attn_implementation("eager")
    logits = model(padded, attention_mask=mask, use_cache=False).logits
    expected = torch.cat([logits[i, :n] for i, n in enumerate(LENGTHS)])
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-10)
    expected.square().mean().backward()
    for name, parameter in model.named_parameters():
        if name in mine:
            torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-10)


@each_family
def test_completion_is_bit_identical_in_any_batch(family: str) -> None:
    """Slots are refilled, the batch shrinks and is compacted, and groups share their prompt."""
    decoder = as_decoder(build(family))
    prompts = [prompt for prompt in random_prompts(4, *range(3, 33, 3)) for _ in (0, 1)]
    requests = [ask(str(i), prompt, seed=i, max_tokens=3 + 7 * i % 20) for i, prompt in enumerate(prompts)]
    together = run(make_engine(decoder, slots=16, prefill_tokens=80), requests)
    for i in (0, 7, 13, 19):
        alone = run(make_engine(decoder), [requests[i]])[str(i)]
        assert together[str(i)].token_ids == alone.token_ids
        assert together[str(i)].logprobs == alone.logprobs


def test_memory_plan_counts_states() -> None:
    from shoal.build.memory_plan import slot_bytes

    layers = as_decoder(build("qwen3_5_text")).verify()
    cache = SlotCache(layers, 8, 16, torch.float32, torch.device("cpu"))
    tensors: list[Any] = [*cache.keys.values(), *cache.values.values()]
    tensors += [t for states in cache.states.tensors.values() for t in states.values()]
    assert slot_bytes(layers, torch.float32, 16) == sum(t.numel() * t.element_size() for t in tensors) / 8
    assert any(layer.states for layer in layers.values()) and any(layer.heads for layer in layers.values())


def test_rollouts_do_not_share_a_prompt_in_training() -> None:
    assert not make_policy(as_decoder(build("lfm2"))).shares_prefixes
    assert make_policy(as_decoder(build("qwen3"))).shares_prefixes
