"""The entropy bonus and the top-entropy mask: value and gradient through the chunked log-probs, in float64."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.core.learn import StepRows
from shoal.core.losses import LOSSES
from shoal.core.metrics import Tally
from shoal.core.objective import Objective
from shoal.core.ranks import SingleProcess
from shoal.core.terms import EntropyBonus
from shoal.core.types import Batch, Row
from shoal.models import logprobs as module
from shoal.models.logprobs import AllowedTokens, Head, token_logprobs
from shoal.signals.rows import EntropyCoefficient, TopEntropy, entropy_threshold
from unit.core.reference import adapted, controlled, entropy_of
from unit.core.rows import random_row, to_inputs, with_garbage


@pytest.mark.parametrize("tile_rows", [100, 3])
@pytest.mark.parametrize("narrowed", [False, True])
def test_entropy_and_its_gradient(tile_rows: int, narrowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several tiles, which are recomputed in the backward, at any temperature and over kept ids."""
    rng = np.random.default_rng(0)
    size, width, vocabulary = 7, 4, 11
    monkeypatch.setitem(module.TILE_NUMBERS, "cpu", tile_rows * vocabulary)
    weight = torch.tensor(rng.normal(size=(vocabulary, width)), requires_grad=True)
    hidden = torch.tensor(rng.normal(size=(size, width)), requires_grad=True)
    temperatures = torch.tensor(rng.uniform(0.5, 2, size))
    targets = torch.tensor(rng.integers(0, vocabulary, size))
    ids = [None if t % 2 else sorted({int(targets[t]), 1, 5}) for t in range(size)]
    kept = AllowedTokens(ids, hidden.device) if narrowed else None
    scored = token_logprobs(
        Head(lambda h: h @ weight.T, weight), hidden, targets, temperatures, vocabulary, kept, entropy_gradient=True
    )
    coef = rng.uniform(size=size)
    (torch.tensor(coef) * scored.entropy).sum().backward()
    expected_hidden = np.zeros((size, width))
    w, h = weight.detach().numpy(), hidden.detach().numpy()
    for t in range(size):
        logits = w @ h[t] / float(temperatures[t])
        if narrowed and (allowed := ids[t]) is not None:
            logits = np.where(np.isin(np.arange(vocabulary), allowed), logits, -np.inf)
        value, slope = entropy_of(logits)
        assert scored.entropy[t].item() == pytest.approx(value, rel=1e-12)
        expected_hidden[t] = coef[t] * (slope @ w) / float(temperatures[t])
    np.testing.assert_allclose(hidden.grad.numpy(), expected_hidden, rtol=1e-10, atol=1e-12)  # type: ignore[union-attr]


def test_without_the_bonus_the_entropy_has_no_gradient() -> None:
    weight, hidden = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    ones = torch.ones(4)
    scored = token_logprobs(Head(lambda h: h @ weight.T, weight), hidden, torch.zeros(4).long(), ones, 5)
    assert scored.logprobs.requires_grad and not scored.entropy.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_bonus_is_subtracted_from_every_loss(name: str) -> None:
    row = random_row(1)
    leaf, inputs = to_inputs(with_garbage(row, 5))
    rng = np.random.default_rng(2)
    entropy = torch.tensor(np.where(row.m, rng.uniform(size=len(row.m)), np.nan), requires_grad=True)
    coef = torch.tensor(np.where(row.m, 0.3, np.inf))
    weights = torch.tensor(np.where(row.m, rng.uniform(size=len(row.m)), np.nan))
    objective = Objective(LOSSES[name]())
    plain, _ = objective(inputs, weights)
    total, _ = objective(replace(inputs, entropy=entropy, entropy_coef=coef), weights)
    at = row.m
    expected = 0.3 * (weights[at] * entropy[at]).sum().item()
    assert plain.item() - total.item() == pytest.approx(expected, rel=1e-9)
    (slope,) = torch.autograd.grad(total, entropy, retain_graph=True)
    (mine,), (before,) = (torch.autograd.grad(x, leaf, retain_graph=True) for x in (total, plain))
    np.testing.assert_allclose(slope.numpy(), np.where(at, -0.3 * np.nan_to_num(weights.numpy()), 0.0), rtol=1e-12)
    np.testing.assert_allclose(mine.numpy(), before.numpy(), atol=1e-14)


@pytest.mark.parametrize("name", ["grpo", "masked", "dro"])
def test_mask_leaves_out_the_policy_loss_and_keeps_the_kl(name: str) -> None:
    row = random_row(4)
    leaf, inputs = to_inputs(with_garbage(row, 6))
    keep = np.arange(len(row.m)) % 3 == 0
    weights = torch.ones(len(row.m), dtype=torch.float64)

    def slope(loss, **signals: np.ndarray) -> np.ndarray:
        given = {key: torch.tensor(value, dtype=torch.float64) for key, value in signals.items()}
        total, _ = Objective(loss)(replace(inputs, **given), weights)
        (found,) = torch.autograd.grad(total, leaf, retain_graph=True)
        return found.numpy()

    loss = LOSSES[name]()
    np.testing.assert_allclose(slope(loss, top_entropy=keep), np.where(keep, slope(loss), 0.0), atol=1e-14)
    if name == "grpo":
        with_kl = LOSSES[name].model_validate({"kl": {"beta": 0.5}})
        assert np.abs(slope(with_kl, top_entropy=np.zeros(len(row.m)))[row.m]).mean() > 0.1


class Policy:
    def __init__(self) -> None:
        self.signal_state: dict[str, float] = {}

    def entropies(self, rows):
        raise NotImplementedError


def one_row(size: int, **signals: np.ndarray) -> Row:
    zeros = np.zeros(size, dtype=np.float32)
    return Row(
        np.arange(size), np.arange(size), np.array([0, size]), np.array([-1]), np.zeros(size, dtype=np.int64), ["r"],
        np.arange(size) > 0, zeros, zeros + 1, zeros, zeros.astype(float), signals=signals,
    )  # fmt: skip


def test_adaptive_coefficient_follows_the_entropy() -> None:
    policy = Policy()
    bonus = EntropyBonus(coef=0.01, target=0.5, delta=0.004, coef_min=0.0, coef_max=0.016)
    coef, applied = 0.01, []
    for entropy in (0.7, 0.4, 0.45, 0.3, 0.6, 0.6):
        row, tally = one_row(4), Tally()
        signal = EntropyCoefficient(bonus, policy)  # created again: all state is in the policy
        asyncio.run(signal.annotate(StepRows([], [Batch([row])], None, None)))  # type: ignore[arg-type]
        applied.append(float(row.signals["entropy_coef"][1]) if "entropy_coef" in row.signals else 0.0)
        tally.add("policy/entropy", entropy * 3, 3)
        signal.observe(tally)
        coef = adapted(coef, entropy, 0.5, 0.004, 0.0, 0.016)
        assert signal.coef == pytest.approx(coef) and tally.reduce()["policy/entropy_coef"] == pytest.approx(
            applied[-1]
        )
    assert applied == pytest.approx([0.0, 0.0, 0.01, 0.014, 0.016, 0.0], rel=1e-6)


def test_gain_acts_before_the_entropy_is_below_the_target() -> None:
    policy = Policy()
    bonus = EntropyBonus(target=0.6, delta=0.01, gain=0.5, coef_max=0.25)
    coef, seen, applied = 0.0, [], []
    for entropy in (1.2, 1.1, 0.8, 0.5, 0.1, 0.3, 0.9):
        tally, signal = Tally(), EntropyCoefficient(bonus, policy)  # created again: all state is in the policy
        expected = controlled(coef, 0.5, seen, 0.6, 0.25) if seen else 0.0
        asyncio.run(signal.annotate(StepRows([], [Batch([one_row(4)])], None, None)))  # type: ignore[arg-type]
        tally.add("policy/entropy", entropy, 1)
        signal.observe(tally)
        applied.append(tally.reduce()["policy/entropy_coef"])
        assert applied[-1] == pytest.approx(expected)
        coef, seen = adapted(coef, entropy, 0.6, 0.01, 0.0, 0.25), [*seen, entropy]
    # After 1.1 and 0.8 the next entropy would be 0.5: the weight is positive one step before it is.
    assert applied == pytest.approx([0, 0, 0, 0.05, 0.21, 0.25, 0.08])


def test_fixed_coefficient_stays() -> None:
    signal, row, tally = EntropyCoefficient(EntropyBonus(coef=0.02), Policy()), one_row(3), Tally()
    asyncio.run(signal.annotate(StepRows([], [Batch([row])], None, None)))  # type: ignore[arg-type]
    signal.observe(tally)
    assert row.signals["entropy_coef"].tolist() == pytest.approx([0.02] * 3)


def test_mask_covers_the_top_share_of_an_optimizer_step() -> None:
    first, second = one_row(4), one_row(4, cross_entropy=np.array([0, 0, 0, 1], dtype=np.float32))
    entropies = {id(first): np.array([9, 1, 5, 2.0]), id(second): np.array([9, 4, 3, 9.0])}

    async def score(function, batches):
        return [(row, entropies[id(row)].astype(np.float32)) for row in (first, second)]

    step = StepRows([], [Batch([first, second])], None, score)  # type: ignore[arg-type]
    asyncio.run(TopEntropy(0.4, Policy(), SingleProcess()).annotate(step))
    # Five tokens under the policy loss, entropies 1 5 2 4 3: two of them are at or above the 0.6 quantile, 3.4.
    assert first.signals["top_entropy"][1:].tolist() == [0, 1, 0]
    assert second.signals["top_entropy"][1:3].tolist() == [1, 0]
    assert entropy_threshold(np.arange(10.0), 0.2) == 8.0 and entropy_threshold(np.arange(10.0), 1.0) == 0.0


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("tokens", [1, 2, 3, 10, 11, 64])
def test_threshold_selects_what_is_at_or_above_the_quantile(fraction: float, tokens: int) -> None:
    entropies = np.random.default_rng(tokens).permutation(tokens).astype(np.float32)
    quantile = torch.quantile(torch.tensor(entropies), 1 - fraction).item()
    kept = entropies >= entropy_threshold(entropies, fraction)
    np.testing.assert_array_equal(kept, entropies >= quantile - 1e-5)  # 1 - fraction is rounded
