"""Identities of every loss. Splits and ranks are in test_invariance.py, parameters in test_declarations.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.losses import LOSSES, Reinforce
from shoal.core.objective import Objective
from shoal.core.terms import IcePop, KLPenalty, NoCorrection, TruncatedImportance, kl_estimate
from shoal.core.types import Completion, Prompt, Rollout, Span, Turn
from shoal.signals.advantages import AdvantageNormalizer

from .rows import gradient, random_row, to_inputs, with_garbage

CORRECTED = {
    "none": NoCorrection(),
    "tis": TruncatedImportance(),
    "sequence": TruncatedImportance(level="sequence"),
    "icepop": IcePop(),
}
NO_PULL: dict[str, dict] = {"dro": {"quad_beta": 0.0}, "dppo": {"kl_tau": 0.0}}


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_minus_advantage(name: str) -> None:
    """lp = old = inf: REINFORCE for every loss."""
    row = random_row(0)
    row = replace(row, lp=row.inf, old=row.inf)
    leaf, inputs = to_inputs(with_garbage(row, 1))
    result = LOSSES[name]()(inputs)
    np.testing.assert_allclose(gradient(result.loss, leaf), np.where(row.m, -row.a, 0.0), atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("normaliser", [AdvantageNormalizer(), AdvantageNormalizer(std="none", leave_one_out=True)])
def test_uniform_rewards_give_no_gradient(name: str, normaliser: AdvantageNormalizer) -> None:
    """Exactly zero, also off-policy. The mean of three rewards of .1 is not exactly .1 in floating point."""
    row = random_row(1, sequences=3)
    advantages = normaliser.estimate([[0.1, 0.1, 0.1]])[0]
    row = replace(row, a=np.array(advantages)[row.seq])
    leaf, inputs = to_inputs(row)
    result = LOSSES[name](**NO_PULL.get(name, {}))(inputs)
    assert not result.loss.detach().numpy().any()
    assert not gradient(result.loss, leaf).any()


@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_have_no_influence(name: str, correction: str) -> None:
    """Two rows that differ only where the mask is 0 have bit-identical loss, gradient and metrics."""
    row = random_row(2)
    loss = LOSSES[name]
    if correction != "none" and not loss.takes_correction:
        return
    objective = Objective(loss(correction=CORRECTED[correction], kl=KLPenalty(beta=0.1 if loss.takes_kl else 0.0)))
    outcomes = []
    for seed in (10, 11):
        leaf, inputs = to_inputs(with_garbage(row, seed))
        weights = np.where(row.m, 0.25, np.random.default_rng(seed).choice([np.nan, np.inf, 3.0], len(row.m)))
        total, metrics = objective(inputs, torch.tensor(weights))
        values = {key: (float(a), float(b)) for key, (a, b) in metrics.items()}
        outcomes.append((total.item(), gradient(total, leaf).tolist(), values))
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0][0]) and np.isfinite(outcomes[0][1]).all()


@pytest.mark.parametrize("estimator", ["k3", "k2", "k3-unbiased"])
def test_kl_pulls_towards_the_reference(estimator: str) -> None:
    """The gradient of the penalty is non-zero where ref ≠ lp, and zero where ref = lp."""
    row = random_row(3)
    row = replace(row, old=row.lp)
    leaf, inputs = to_inputs(row)
    grad = gradient(inputs.masked(kl_estimate(estimator, inputs)), leaf)
    assert (grad[row.m] != 0).all()
    closer = replace(row, lp=row.lp - 1e-3 * grad, old=row.old)
    before, after = (kl_estimate(estimator, to_inputs(r)[1])[row.m].sum().item() for r in (row, closer))
    assert after < before
    leaf, inputs = to_inputs(replace(row, ref=row.lp))
    np.testing.assert_allclose(gradient(inputs.masked(kl_estimate(estimator, inputs)), leaf), 0.0, atol=1e-15)


def test_end_of_sequence_token_is_trained() -> None:
    """The sampled EOS (id 2) is in the loss and has a gradient."""
    completion = Completion("r", [7, 2], [-0.1, -0.3], [Span(0, 2, 0)], "stop")
    rollout = Rollout(Prompt("env", 0, []), 0, [Turn([5, 6], completion)], advantage=1.0)
    (batch,) = make_batches([rollout_samples(rollout)], Packing(8, "token-mean", max_tokens=4))
    row = batch.rows[0]
    leaf = torch.zeros(row.tokens, dtype=torch.float64, requires_grad=True)
    _, inputs = to_inputs(random_row(0, tokens=row.tokens, sequences=2))
    inputs = replace(
        inputs,
        policy_logprobs=leaf,
        loss_mask=torch.tensor(row.loss_mask),
        advantages=torch.tensor(row.advantages),
        sequence_ids=torch.tensor(row.sequence_ids),
        sampler_logprobs=torch.tensor(row.sampler_logprobs),
    )
    total, _ = Objective(Reinforce(ratio="none"))(inputs, torch.tensor(row.weights))
    assert gradient(total, leaf).tolist() == pytest.approx([0, 0, -0.5, -0.5])
