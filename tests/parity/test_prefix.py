"""A shared prompt gives the same log-probs and gradients as a copy of the prompt per rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from shoal.core.batching import rollout_samples
from shoal.core.loss_inputs import LossInputs
from shoal.core.losses import Reinforce
from shoal.core.objective import Objective
from shoal.core.terms import Metrics
from shoal.core.types import Completion, Row, Sample, Span, Turn
from shoal.models.decoder import Decoder
from shoal.trainer.policy import TrainedPolicy
from support.models import (
    ARCHITECTURES,
    CONFIGS,
    WINDOW,
    as_decoder,
    lora_decoder,
    random_prompts,
    randomise,
    small_decoder,
)
from support.training import as_rollout, by_rollout, gradients, grouped_samples, grpo, make_policy, pack, random_samples

# Prompts shorter than the sliding window, equal to it and longer. Answers that stay inside it and that leave it.
GROUPS = ((3, (5, 1, 20)), (WINDOW, (1, 7, 30, 2)), (25, (4, 14)), (1, (6, 6)))
Found = tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]


class Recorded:
    """A loss of -A·lp per token without clipping, which also records the log-probs before they are rounded to fp32."""

    def __init__(self) -> None:
        self.logprobs: list[np.ndarray] = []

    def __call__(self, inputs: LossInputs, weights: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        self.logprobs.append(inputs.policy_logprobs.detach().numpy())
        return Objective(Reinforce(ratio="none"))(inputs, weights)


def train(policy: TrainedPolicy, rows: Sequence[Row], size: int = 1) -> Found:
    """The gradient of the step, and the log-probs of each rollout."""
    objective = Recorded()
    for start in range(0, len(rows), size):
        policy.forward_backward(rows[start : start + size], objective)
    values, flat = [], np.concatenate(objective.logprobs)
    for row in rows:
        values.append(np.zeros(row.tokens, dtype=flat.dtype))
        values[-1][row.loss_mask], flat = np.split(flat, [int(row.loss_mask.sum())])
    assert not len(flat)
    return gradients(policy), by_rollout(rows, values)


def assert_same(one: Found, other: Found, atol: float = 1e-10) -> None:
    assert set(one[0]) == set(other[0]) and max(float(g.abs().max()) for g in one[0].values()) > 1e-5
    for name, value in one[0].items():
        torch.testing.assert_close(value, other[0][name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
    assert set(one[1]) == set(other[1])
    for name, logprobs in one[1].items():
        np.testing.assert_allclose(logprobs, other[1][name], rtol=0, atol=atol)


def shared_and_alone(samples: Sequence[Sequence[Sample]], budget: int = 100_000) -> tuple[list[Row], list[Row]]:
    shared, alone = (pack(samples, budget, share_prefixes=share).rows for share in (True, False))
    assert sum(row.tokens for row in shared) < sum(row.tokens for row in alone)
    return shared, alone


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_prompt_for_a_group(architecture: str) -> None:
    policy = make_policy(small_decoder(architecture, dtype=torch.float64))
    samples = grouped_samples(1, *GROUPS, temperature=0.7)
    shared, alone = shared_and_alone(samples)
    assert [row.tokens for row in shared] == [sum(prompt + sum(answers) for prompt, answers in GROUPS)]
    assert_same(train(policy, shared), train(policy, alone))


@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
@pytest.mark.parametrize("architecture", ("mistral", "gemma2"))
def test_rows_and_micro_batches_and_recomputed_activations(architecture: str, make: Any) -> None:
    """Groups split over rows, and several rows per micro-batch: the indices of a row start at the row."""
    plain, saving = (make(architecture, dtype=torch.float64) for _ in range(2))
    saving.inner.gradient_checkpointing_enable()
    samples = grouped_samples(2, *GROUPS)
    shared, alone = shared_and_alone(samples, 50)
    assert len(shared) >= 3 and sum((row.segment_prefix >= 0).any() for row in shared) > 1
    expected = train(make_policy(plain), alone)
    for decoder, size in ((plain, 1), (plain, 2), (saving, 3)):
        assert_same(expected, train(make_policy(decoder), shared, size))


@settings(max_examples=10, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=4)), min_size=1,
                    max_size=4),
    budget=st.integers(35, 150),
    size=st.integers(1, 3),
)  # fmt: skip
def test_groups_of_any_size(groups: list[tuple[int, list[int]]], budget: int, size: int) -> None:
    policy = make_policy(small_decoder("mistral", dtype=torch.float64))
    samples = grouped_samples(3, *groups)
    alone = pack(samples, budget, share_prefixes=False).rows
    assert_same(train(policy, alone), train(policy, pack(samples, budget).rows, size))


def turn(prompt_ids: list[int], token_ids: list[int], kept: list[list[int]] | None = None) -> Turn:
    size = len(token_ids)
    return Turn(prompt_ids, Completion("r", token_ids, [-2.0] * size, [Span(0, size, 0)], "stop", kept_ids=kept))


def test_turns_that_diverge_and_truncated_sampling() -> None:
    """One rollout grows, one loses its reasoning and becomes two samples, one was sampled from few ids."""
    prompt, first, second, reply, third = random_prompts(4, 15, 6, 9, 4, 5)
    kept = [[token, 3, 4] for token in third]
    rollouts = [
        as_rollout(0, [turn(prompt, first), turn([*prompt, *first, *reply], second)], 1.0),
        as_rollout(1, [turn(prompt, first), turn([*prompt, *reply], second)], -0.5),
        as_rollout(2, [turn(prompt, third, kept)], 0.25),
    ]
    samples = [rollout_samples(rollout) for rollout in rollouts]
    assert [len(found) for found in samples] == [1, 2, 1]
    policy = make_policy(small_decoder("mistral", dtype=torch.float64))
    shared, alone = shared_and_alone(samples)
    assert shared[0].tokens == alone[0].tokens - 3 * len(prompt)
    assert_same(train(policy, shared), train(policy, alone))


def test_metrics_and_logprobs_in_fp32_differ_by_rounding() -> None:
    policy = make_policy(small_decoder("qwen3"))
    found = []
    for rows in shared_and_alone(grouped_samples(5, *GROUPS)):
        metrics, logprobs = policy.forward_backward(rows, grpo()).read()
        gradient = torch.cat([g.flatten() for g in gradients(policy).values()])
        found.append((metrics, by_rollout(rows, logprobs), gradient, by_rollout(rows, policy.logprobs(rows).read()[1])))
    shared, alone = found
    assert set(shared[0]) == set(alone[0])
    for name, (total, count) in shared[0].items():
        assert (total, count) == (pytest.approx(alone[0][name][0], rel=1e-5, abs=1e-5), alone[0][name][1]), name
    for name in alone[1]:
        np.testing.assert_allclose(shared[1][name], alone[1][name], rtol=0, atol=1e-5)
        np.testing.assert_allclose(shared[3][name], alone[1][name], rtol=0, atol=1e-5)
    assert (shared[2] - alone[2]).norm() / alone[2].norm() < 1e-5


def test_prefix_hidden_state_predicts_each_first_token() -> None:
    """Manual computation with transformers: one-token answers to one prompt have the same distribution."""
    samples = grouped_samples(6, (9, (1, 1, 1)))
    decoder = small_decoder("llama")
    (row,) = pack(samples).rows
    assert row.tokens == 12
    (found,) = make_policy(decoder).logprobs([row]).read()[1]
    decoder.inner.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        logits = decoder.inner(input_ids=torch.tensor(row.token_ids[None, :9])).logits[0, -1]
    expected = torch.log_softmax(logits, -1)[torch.tensor(row.token_ids[9:])]
    np.testing.assert_allclose(found[9:], expected.numpy(), rtol=0, atol=1e-5)


def test_rollouts_without_shared_prefix_are_packed_separately() -> None:
    policy = make_policy(Decoder(small_decoder("qwen3").model))
    samples = random_samples(7, (4, 8), (10, 6), (2, 12))
    rows = [pack(samples, 40, share_prefixes=share).rows for share in (True, False)]
    assert all((row.segment_prefix < 0).all() for row in rows[0])
    first, second = (train(policy, found) for found in rows)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])


def test_experts_are_chosen_token_by_token() -> None:
    """A mixture of experts: a shared prompt is routed like each copy. Its products do not support float64."""
    config = CONFIGS["qwen3"]().to_dict()
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    shape = {key: config[key] for key in same}
    moe = Qwen3MoeConfig(**shape, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    model: Any = AutoModelForCausalLM.from_config(moe, dtype=torch.float32)
    policy = make_policy(as_decoder(randomise(model, 0).eval()))
    assert policy.shares_prefixes
    shared, alone = shared_and_alone(grouped_samples(8, *GROUPS))
    assert_same(train(policy, shared), train(policy, alone), atol=1e-5)
