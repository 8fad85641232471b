"""The policy: the effect of a step, what a skipped step leaves unchanged, and minibatches against one snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ModelError
from shoal.core.loss_inputs import LossInputs
from shoal.core.terms import Metrics
from shoal.models.decoder import Decoder
from shoal.trainer.device_batch import DeviceBatch, HostBatch, spread_over_rows
from shoal.trainer.optimizer import Schedule
from shoal.trainer.pass_graphs import PassOutput
from shoal.trainer.policy import PendingPass, Reference, TrainedPolicy
from support.engines import make_engine
from support.models import as_decoder, lora_decoder, small_decoder, small_model
from support.training import gradients, grpo, make_policy, pack, random_samples, weights

SAMPLES = random_samples(0, (4, 8), (10, 6), (2, 12), (7, 3))
ROWS = pack(SAMPLES).rows
CPU = torch.device("cpu")


def ruined(inputs: LossInputs, row_weights: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """A loss that is not finite, as after an overflow."""
    return (inputs.policy_logprobs * row_weights.float()).sum() * torch.inf, {}


def state_of(policy: TrainedPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.optimizer.state().items()}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_step_raises_good_and_lowers_bad_completions(make: Any, dtype: torch.dtype) -> None:
    decoder = make(dtype=dtype)
    policy = make_policy(decoder, Schedule(1e-2, 10))
    pointers = [p.data_ptr() for p in decoder.model.parameters()]
    before = policy.logprobs(ROWS).read()[1][0]
    metrics, found = policy.forward_backward(ROWS, grpo()).read()
    np.testing.assert_allclose(found[0], before, rtol=0, atol=1e-5 if dtype == torch.float32 else 0)
    assert set(metrics) >= {"policy/loss", "policy/entropy", "policy/ratio_mean", "mismatch/k3"}
    outcome = policy.optim_step()
    assert outcome["optim/skipped"] == 0 and outcome["optim/lr"] == 1e-2 and outcome["optim/grad_norm"] > 0
    change = policy.logprobs(ROWS).read()[1][0] - before
    row = ROWS[0]
    assert float((change * row.advantages)[row.loss_mask].sum()) > 0
    assert [p.data_ptr() for p in decoder.model.parameters()] == pointers, "all users of the tensors see the step"
    assert not decoder.model.training


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_nonfinite_gradient_changes_no_weight(dtype: torch.dtype) -> None:
    decoder = small_decoder(dtype=dtype)
    policy = make_policy(decoder, Schedule(1e-2, 10, "linear"))
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()
    before, state = weights(decoder), state_of(policy)
    policy.forward_backward(ROWS, grpo())
    policy.forward_backward(ROWS, ruined)
    outcome = policy.optim_step()
    assert outcome["optim/skipped"] == 1 and "optim/grad_norm" not in outcome
    assert all(torch.equal(value, before[name]) for name, value in weights(decoder).items())
    assert all(torch.equal(value, state[name]) for name, value in state_of(policy).items())
    assert gradients(policy) == {}, "and nothing of it remains for the next step"
    policy.forward_backward(ROWS, grpo())
    assert policy.optim_step()["optim/skipped"] == 0
    assert not all(torch.equal(value, before[name]) for name, value in weights(decoder).items())


def test_rates_follow_the_schedule() -> None:
    policy = make_policy(small_decoder(), Schedule(1e-3, 4, "linear", warmup_steps=2))
    found = []
    for _ in range(4):
        policy.forward_backward(ROWS, grpo())
        found.append(policy.optim_step()["optim/lr"])
    assert found == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_reported_norm_is_before_clipping() -> None:
    norms = []
    for limit in (1e9, 1e-3):
        policy = make_policy(small_decoder(), max_grad_norm=limit)
        policy.forward_backward(ROWS, grpo())
        norms.append(policy.optim_step()["optim/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 1e-2


def test_minibatches_against_one_old_snapshot() -> None:
    """The old policy is taken once. After the first minibatch the ratio differs from 1, and the second one uses it."""
    policy = make_policy(small_decoder(), Schedule(3e-2, 10))
    first, second = pack(SAMPLES[:2]), pack(SAMPLES[2:])
    for row in (*first.rows, *second.rows):
        (row.old_logprobs,) = policy.logprobs([row]).read()[1]
    metrics, _ = policy.forward_backward(first.rows, grpo()).read()
    total, count = metrics["policy/ratio_mean"]
    assert total / count == pytest.approx(1, abs=1e-5)
    policy.optim_step()
    metrics, _ = policy.forward_backward(second.rows, grpo(), "none").read()
    total, count = metrics["policy/ratio_mean"]
    assert abs(total / count - 1) > 1e-3
    assert "mismatch/k3" not in metrics, "a step of the trainer is not attributed to the sampler"


def test_old_logprobs_default_to_the_sampler() -> None:
    inputs = DeviceBatch.upload(HostBatch.of(ROWS, CPU), CPU).loss_inputs(
        torch.zeros(int(ROWS[0].loss_mask.sum())), "old"
    )
    assert torch.equal(inputs.old_logprobs, inputs.sampler_logprobs) and inputs.mismatch_from == "policy"
    assert inputs.reference_logprobs is None


def test_rollouts_are_numbered_across_the_rows_of_a_micro_batch() -> None:
    rows = pack(SAMPLES, 20).rows
    assert len(rows) > 1
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    inputs = DeviceBatch.upload(HostBatch.of(rows, CPU), CPU).loss_inputs(torch.zeros(tokens), "policy")
    assert inputs.num_sequences == len(SAMPLES)
    counts = np.bincount(inputs.sequence_ids.numpy(), minlength=len(SAMPLES))
    ids = [rollout_id for row in rows for rollout_id in row.rollout_ids]
    expected = {s.rollout_id: int(s.loss_mask.sum()) for (s,) in SAMPLES}
    assert dict(zip(ids, counts.tolist(), strict=True)) == expected


def test_values_align_with_their_tokens() -> None:
    rows = pack(SAMPLES, 20).rows
    count = sum(int(row.loss_mask.sum()) for row in rows)
    spread = spread_over_rows(rows, torch.arange(1, count + 1))
    assert np.concatenate([values[row.loss_mask] for row, values in zip(rows, spread, strict=True)]).tolist() == list(
        range(1, count + 1)
    )
    assert all((values[~row.loss_mask] == 0).all() for row, values in zip(rows, spread, strict=True))


def test_frozen_reference_is_constant_and_missing_reference_raises() -> None:
    with pytest.raises(RuntimeError, match="no reference"):
        make_policy(small_decoder()).reference_logprobs(ROWS).read()[1]
    decoder = small_decoder()
    frozen = Decoder(small_decoder().model.requires_grad_(False))
    policy = make_policy(decoder, reference=Reference(frozen))
    start = policy.logprobs(ROWS).read()[1][0]
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()
    np.testing.assert_array_equal(policy.reference_logprobs(ROWS).read()[1][0], start)
    assert np.abs(policy.logprobs(ROWS).read()[1][0] - start).max() > 1e-3


def test_entropy_is_that_of_the_sampling_temperature() -> None:
    """Against the model's forward pass, token by token."""
    samples = random_samples(1, (5, 9), temperature=0.5)
    decoder = small_decoder()
    metrics, _ = make_policy(decoder).forward_backward(pack(samples).rows, grpo()).read()
    ((sample,),) = samples
    reference = small_decoder().inner
    reference.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor(sample.token_ids)[None]).logits[0].double()
    p = torch.softmax(logits[4:-1] / 0.5, -1)
    expected = float(-(p * p.log()).sum(-1).mean())
    total, count = metrics["policy/entropy"]
    assert count == 9 and total / count == pytest.approx(expected, abs=1e-5)


def test_results_are_read_as_they_were_computed() -> None:
    """A count beyond the exact integers of fp32, a sum that fp32 rounds, and log-probs: one copy keeps all of them."""
    tokens = int(ROWS[0].loss_mask.sum())
    pairs = {
        "a": (torch.tensor(0.1), torch.tensor(2**24 + 1)),
        "b": (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0)),
    }
    metrics, (logprobs,) = PendingPass(ROWS, PassOutput.of(pairs, torch.linspace(-3, 0, tokens))).read()
    assert metrics == {"a": (float(np.float32(0.1)), 2**24 + 1), "b": (0.1, 0.0)}
    np.testing.assert_array_equal(logprobs[ROWS[0].loss_mask], torch.linspace(-3, 0, tokens).numpy())


def test_longrope_texts_stay_within_the_original_length() -> None:
    """A longer text would switch every other text of its batch to other rotary factors."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    decoder = as_decoder(small_model("llama-tied", rope_parameters=rope))
    assert decoder.max_positions == 32 and len(decoder.verify()) == 2
    assert make_engine(decoder, context_tokens=32) is not None
    with pytest.raises(ModelError, match="longrope"):
        make_engine(decoder, context_tokens=33)
    policy = make_policy(decoder)
    policy.logprobs(pack(random_samples(0, (12, 20), (2, 30)), 64).rows)
    with pytest.raises(ModelError, match="longrope"):
        policy.logprobs(pack(random_samples(0, (12, 21)), 64).rows)


def test_prompts_are_not_shared_with_dropout() -> None:
    assert make_policy(small_decoder()).shares_prefixes
    assert make_policy(lora_decoder()).shares_prefixes
    assert not make_policy(lora_decoder(dropout=0.1)).shares_prefixes
    by_name = small_decoder()
    by_name.config.resid_pdrop = 0.1  # as if a model calls functional.dropout
    assert not make_policy(by_name).shares_prefixes
