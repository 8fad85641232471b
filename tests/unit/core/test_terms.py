"""Corrections, KL estimators, the mismatch report, and the objective that sums them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.losses import LOSSES, CustomLoss
from shoal.core.objective import Objective
from shoal.core.terms import CORRECTIONS, IcePop, KLPenalty, NoCorrection, TruncatedImportance, kl_estimate, mismatch
from shoal.watch.glossary import find_metric

from .reference import REFERENCE, correction, kl
from .rows import gradient, random_row, to_inputs, with_garbage


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("tis", {}),
        ("tis", {"cap": 1.1}),
        ("tis", {"level": "sequence", "cap": 1.05}),
        ("icepop", {}),
        ("icepop", {"floor": 0.9, "cap": 1.5}),
    ],
)
@pytest.mark.parametrize("drift", [0.7, 15.0])
def test_correction_equals_the_reference(kind: str, params: dict, drift: float) -> None:
    row = random_row(4, drift=drift)
    _, inputs = to_inputs(with_garbage(row, 1))
    (made,) = [variant(**params) for variant in CORRECTIONS if variant.choice() == kind]
    weight, metrics = made(inputs)
    assert weight is not None
    before, after = correction(row, kind, **params)
    np.testing.assert_allclose(weight.numpy()[row.m], after[row.m], rtol=1e-12)
    assert not weight.requires_grad
    for name, values in (("correction/weight_mean", before), ("correction/capped_mean", after)):
        total, count = metrics[name]
        assert total.item() == pytest.approx(values[row.m].sum(), rel=1e-12) and count.item() == row.m.sum()
    assert metrics["correction/capped_frac"][0].item() == (before != after)[row.m].sum()


def test_sequence_level_does_not_shrink_with_length() -> None:
    """A hundred tokens that differ by 5 % each: the product would be 131, the geometric mean is 1.05."""
    row = random_row(0, tokens=100, sequences=2)
    row = replace(row, m=np.ones(100, bool), seq=np.zeros(100, int), old=row.inf + math.log(1.05))
    weight, _ = TruncatedImportance(level="sequence")(to_inputs(row)[1])
    assert weight is not None
    np.testing.assert_allclose(weight.numpy(), 1.05)


@pytest.mark.parametrize("make", [lambda: TruncatedImportance(cap=0), lambda: IcePop(floor=2), lambda: IcePop(cap=0.5)])
def test_impossible_bounds_are_refused(make) -> None:
    with pytest.raises(ValueError, match="should be"):
        make()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3-unbiased"])
@pytest.mark.parametrize("drift", [0.7, 15.0])
def test_kl_equals_the_reference(estimator: str, drift: float) -> None:
    row = random_row(5, drift=drift)
    leaf, inputs = to_inputs(with_garbage(row, 2))
    value = inputs.masked(kl_estimate(estimator, inputs))
    expected, expected_grad = kl(row, estimator)
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-10, atol=1e-10 * scale)
    np.testing.assert_allclose(gradient(value, leaf), expected_grad, rtol=1e-10, atol=1e-10 * scale)


def test_kl_by_hand() -> None:
    row = random_row(0, tokens=4, sequences=2)
    lp = np.log(np.full(4, 0.5))
    row = replace(row, lp=lp, old=lp, ref=np.log(np.full(4, 0.25)), m=np.ones(4, bool))
    _, inputs = to_inputs(row)
    d = math.log(2)
    for estimator, expected in {"k1": d, "k2": d * d / 2, "k3": 0.5 + d - 1, "k3-unbiased": 0.5 + d - 1}.items():
        assert kl_estimate(estimator, inputs)[0].item() == pytest.approx(expected)


def test_k1_in_the_loss_and_a_missing_reference_are_refused() -> None:
    with pytest.raises(ValueError, match="k1"):
        Objective(LOSSES["grpo"](kl=KLPenalty(beta=0.1, estimator="k1")))
    with pytest.raises(ValueError, match="beta"):
        KLPenalty(beta=-1.0)
    _, inputs = to_inputs(random_row(0))
    with pytest.raises(ValueError, match="reference_logprobs"):
        KLPenalty(beta=0.1)(replace(inputs, reference_logprobs=None))


def test_mismatch_compares_the_configured_logprobs() -> None:
    row = random_row(6)
    _, inputs = to_inputs(with_garbage(row, 3))
    for source, ours in (("old", row.old), ("policy", row.lp)):
        gap = (ours - row.inf)[row.m]
        metrics = mismatch(replace(inputs, mismatch_from=source))
        assert metrics["mismatch/k3"][0].item() == pytest.approx((np.exp(gap) - 1 - gap).sum())
        assert metrics["mismatch/ratio_mean"][0].item() == pytest.approx(np.exp(gap).sum())
    assert mismatch(replace(inputs, mismatch_from="none")) == {}


@pytest.mark.parametrize("name", ["grpo", "importance_sampling", "reinforce"])
def test_objective_sums_all_terms(name: str) -> None:
    row = random_row(7)
    leaf, inputs = to_inputs(with_garbage(row, 4))
    loss = LOSSES[name]
    weights = np.random.default_rng(0).random(len(row.m))
    correct = IcePop() if loss.takes_correction else NoCorrection()
    objective = Objective(loss(correction=correct, kl=KLPenalty(beta=0.3, estimator="k3-unbiased")))
    total, metrics = objective(inputs, torch.tensor(weights))
    w = correction(row, "icepop")[1]
    base, base_grad = REFERENCE[name](row, w)
    penalty, penalty_grad = kl(row, "k3-unbiased")
    expected = (weights * (base + 0.3 * penalty)).sum()
    assert total.item() == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(gradient(total, leaf), weights * (base_grad + 0.3 * penalty_grad), atol=1e-10)
    assert [float(x) for x in metrics["policy/loss"]] == [pytest.approx(expected), 0.0]
    assert metrics["policy/kl_ref"][0].item() == pytest.approx(penalty.sum())
    assert metrics["policy/ratio_mean"][0].item() == pytest.approx(np.exp(row.lp - row.old)[row.m].sum())


def test_objective_knows_what_it_needs_and_refuses_what_it_cannot_use() -> None:
    assert Objective(LOSSES["gspo"]()).needs_old and not Objective(LOSSES["grpo"]()).needs_old
    assert Objective(LOSSES["grpo"](correction=TruncatedImportance())).needs_old
    assert Objective(LOSSES["grpo"](kl=KLPenalty(beta=0.1))).needs_reference
    with pytest.raises(ValueError, match="no correction weight"):
        Objective(LOSSES["masked"](correction=TruncatedImportance()))
    with pytest.raises(ValueError, match="no KL penalty"):
        Objective(LOSSES["dapo"](kl=KLPenalty(beta=0.1)))
    assert Objective(CustomLoss(type="mine:loss", kl=KLPenalty(beta=0.1))).needs_reference
    with pytest.raises(ValueError, match="no correction weight"):
        Objective(CustomLoss(type="mine:loss", correction=IcePop()))


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_is_a_known_one(name: str) -> None:
    _, inputs = to_inputs(random_row(0))
    loss = LOSSES[name]
    correct = IcePop() if loss.takes_correction else NoCorrection()
    objective = Objective(loss(correction=correct, kl=KLPenalty(beta=0.1 if loss.takes_kl else 0.0)))
    _, metrics = objective(inputs, torch.ones(len(inputs.loss_mask)))
    assert [key for key in metrics if find_metric(key) is None] == []
