"""Packed, padded and single sequences, in any split and order, give one gradient on real models (float64)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.losses import Reinforce
from shoal.core.objective import Objective
from shoal.core.types import Row, Sample
from shoal.models import logprobs
from shoal.models.decoder import Decoder
from shoal.trainer.policy import TrainedPolicy
from support.models import ARCHITECTURES, lora_decoder, small_decoder, small_model
from support.training import by_rollout, gradients, grpo, make_policy, pack, random_samples

# Prompts and completions around and beyond the sliding window of 12.
SHAPES = ((3, 5), (20, 9), (1, 30), (12, 1), (8, 14), (2, 2))
Gradients = dict[str, torch.Tensor]


def collect(policy: TrainedPolicy, rows: Sequence[Row], rows_per_micro_batch: int, objective: Any = None) -> Gradients:
    for start in range(0, len(rows), rows_per_micro_batch):
        policy.forward_backward(rows[start : start + rows_per_micro_batch], objective or grpo())
    return gradients(policy)


def assert_same(one: Gradients, other: Gradients, atol: float = 1e-10) -> None:
    assert set(one) == set(other) and max(float(g.abs().max()) for g in one.values()) > 1e-5
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def gradient_by_hand(model: Any, samples: Sequence[Sequence[Sample]]) -> tuple[Gradients, list[torch.Tensor]]:
    """The forward pass of transformers on a right-padded rectangle, then -A·lp averaged over all trained tokens.

    Under a causal mask no real token attends to padding on its right, so no mask is needed.
    """
    model.set_attn_implementation("sdpa" if getattr(model.config, "attn_logit_softcapping", None) is None else "eager")
    flat = [sample for rollout in samples for sample in rollout]
    ids = torch.zeros(len(flat), max(sample.tokens for sample in flat), dtype=torch.long)
    for i, sample in enumerate(flat):
        ids[i, : sample.tokens] = torch.tensor(sample.token_ids)
    logits = model(input_ids=ids, use_cache=False).logits
    total, scored = torch.zeros((), dtype=torch.float64), []
    for i, sample in enumerate(flat):
        at = torch.tensor(np.flatnonzero(sample.loss_mask))
        heat = torch.tensor(sample.temperatures)[at].double()
        found = torch.log_softmax(logits[i, at - 1] / heat[:, None], -1).gather(-1, ids[i, at][:, None])[:, 0]
        total = total - (torch.tensor(sample.advantages)[at] * found).sum()
        scored.append(found.detach())
    (total / sum(int(sample.loss_mask.sum()) for sample in flat)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, scored


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_equal_transformers_on_a_padded_rectangle(architecture: str) -> None:
    model = small_model(architecture, dtype=torch.float64)
    samples = random_samples(1, *SHAPES, temperature=0.7)
    expected, scored = gradient_by_hand(small_model(architecture, dtype=torch.float64), samples)
    decoder = Decoder(model)
    decoder.verify()
    policy = make_policy(decoder)
    rows = pack(samples, 60).rows
    assert 1 < len(rows) < len(samples)
    found = by_rollout(rows, policy.logprobs(rows).read()[1])
    for (sample,), values in zip(samples, scored, strict=True):
        np.testing.assert_allclose(found[sample.rollout_id], values.float().numpy(), rtol=0, atol=1e-6)
    # Transformers computes the softmax of soft-capped attention in fp32.
    atol = 1e-10 if architecture != "gemma2" else 1e-6
    assert_same(expected, collect(policy, rows, 1, Objective(Reinforce(ratio="none"))), atol)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_does_not_depend_on_the_split(architecture: str) -> None:
    policy = make_policy(small_decoder(architecture, dtype=torch.float64))
    samples = random_samples(2, *SHAPES, temperature=1.4)
    whole = collect(policy, pack(samples).rows, 1)
    one_by_one = pack(samples, max(sum(shape) for shape in SHAPES) + 1)
    for rows, size in (
        (one_by_one.rows, 1),
        (one_by_one.rows, 2),
        (pack(samples[::-1], 45).rows[::-1], 1),
        (pack(samples[::-1], 45).rows, 3),
    ):
        assert_same(whole, collect(policy, rows, size))


@settings(max_examples=10, deadline=None)
@given(
    order=st.permutations(range(len(SHAPES))),
    budget=st.integers(31, 120),
    size=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_gradient_does_not_depend_on_order_budget_or_micro_batch(
    order: list[int], budget: int, size: int, seed: int
) -> None:
    policy = make_policy(small_decoder("mistral", dtype=torch.float64))
    samples = random_samples(seed, *SHAPES)
    whole = collect(policy, pack(samples).rows, 1)
    assert_same(whole, collect(policy, pack([samples[i] for i in order], budget).rows, size))


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
@pytest.mark.parametrize("architecture", ("qwen3", "gemma2"))
def test_recomputing_activations_changes_no_gradient(architecture: str, lora: bool) -> None:
    make = lora_decoder if lora else small_decoder
    plain, saving = (make(architecture, dtype=torch.float64) for _ in range(2))
    saving.inner.gradient_checkpointing_enable()  # type: ignore[operator]
    rows = pack(random_samples(3, *SHAPES), 60).rows
    assert_same(collect(make_policy(plain), rows, 2), collect(make_policy(saving), rows, 2))


def test_activation_checkpointing_recomputes() -> None:
    decoder = small_decoder()
    decoder.inner.gradient_checkpointing_enable()  # type: ignore[operator]
    runs: list[int] = []
    decoder.body.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))  # type: ignore[union-attr,index]
    collect(make_policy(decoder), pack(random_samples(3, (4, 4))).rows, 1)
    assert len(runs) == 2


@pytest.mark.parametrize("architecture", ("llama", "gemma2"))
def test_tiles_of_logits_change_no_gradient(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(small_decoder(architecture, dtype=torch.float64))
    rows = pack(random_samples(4, *SHAPES)).rows
    whole = collect(policy, rows, 1)
    monkeypatch.setitem(logprobs.TILE_NUMBERS, "cpu", 7 * policy.decoder.vocab_size)
    assert_same(whole, collect(policy, rows, 1))


def test_bf16_packing_agrees_with_one_by_one() -> None:
    """Only rounding: bf16 has eight bits, so log-probs agree to a few hundredths."""
    policy = make_policy(small_decoder("llama", dtype=torch.bfloat16))
    samples = random_samples(5, *SHAPES)
    together, alone = pack(samples).rows, pack(samples, 32).rows
    first, second = (
        by_rollout(together, policy.logprobs(together).read()[1]),
        by_rollout(alone, policy.logprobs(alone).read()[1]),
    )
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=0, atol=0.05)
