"""Every loss against its float64 reference, value and gradient, with interleaved sequences and random values where m =
0.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import UserCodeError
from shoal.core.loss_inputs import LossInputs
from shoal.core.losses import DAPO, DPPO, GSPO, LOSSES, CustomLoss, Masked
from shoal.core.terms import TruncatedImportance

from .reference import REFERENCE, correction, dropped_by_masked
from .rows import gradient, random_row, to_inputs, with_garbage

VARIANTS: list[tuple[str, dict]] = [
    *((name, {}) for name in LOSSES),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.5}),
    ("grpo", {"dual_clip": 1.5}),
    ("importance_sampling", {"ratio_low": 0.5, "ratio_high": 1.5}),
    ("importance_sampling", {"ratio_high": 1.2}),
    ("reinforce", {"ratio": "none"}),
    ("dapo", {"dual_clip": 1.5}),
    ("dro", {"quad_beta": 0.7}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    ("cispo", {"ratio_low": 0.8, "ratio_high": 1.2}),
    ("decoupled", {"cap": 1.3, "dual_clip": 2.0, "clip_high": 0.1}),
    ("masked", {"kl_tau": 0.3, "adv_tau": 0.5, "token_mask_low": 0.5, "token_mask_high": 2.0}),
    ("masked", {"token_mask_low": 0.5}),
    ("masked", {"token_mask_high": 1.5}),
    ("masked", {"geo_mask_low": 0.95}),
    ("masked", {"geo_mask_high": 1.05}),
    ("masked", {"sequence_mask_low": 0.4}),
    ("masked", {"sequence_mask_high": 3.0}),
    ("masked", {"ratio_type": "sequence", "sequence_clip_high": 1.5, "kl_tau": 0.1}),
    ("dppo", {"mask_low": 0.05, "mask_high": 0.02, "kl_tau": 0.5}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("vespo", {"k_pos": 0.5, "rate_pos": 0.3, "k_neg": 1.0, "rate_neg": 0.5}),
]


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drift", [0.7, 15.0])  # 15 nats: the clamp at ±20 is reached
def test_loss_and_gradient_equal_the_reference(name: str, params: dict, seed: int, drift: float) -> None:
    row = random_row(seed, drift=drift)
    leaf, inputs = to_inputs(with_garbage(row, seed + 100))
    loss_fn = LOSSES[name](**params)
    w, expected_w = None, np.ones(len(row.m))
    if loss_fn.takes_correction and seed % 2:
        w, _ = TruncatedImportance()(inputs)
        expected_w = correction(row, "tis")[1]
    result = loss_fn(inputs, w)
    expected_loss, expected_grad = REFERENCE[name](row, expected_w, **params)
    scale = max(1.0, float(np.abs(expected_loss).max()))
    np.testing.assert_allclose(result.loss.detach().numpy(), expected_loss, rtol=1e-10, atol=1e-10 * scale)
    np.testing.assert_allclose(gradient(result.loss, leaf), expected_grad, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_a_single_token(name: str, seed: int) -> None:
    row = random_row(seed, tokens=8, sequences=9)
    assert any(len(row.tokens_of(sequence)) == 1 for sequence in range(9))
    _, inputs = to_inputs(row)
    expected, _ = REFERENCE[name](row, np.ones(8))
    np.testing.assert_allclose(LOSSES[name]()(inputs).loss.detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "params"), VARIANTS[len(LOSSES) :])
def test_variants_are_exercised(name: str, params: dict) -> None:
    """A parameter set that equals the defaults would leave its branch untested."""
    rows = [random_row(seed) for seed in range(4)]
    ones = np.ones(len(rows[0].m))
    differs = [not np.allclose(REFERENCE[name](r, ones)[1], REFERENCE[name](r, ones, **params)[1]) for r in rows]
    assert any(differs)


def test_masked_reports_what_it_drops() -> None:
    row = random_row(3, drift=1.5)
    _, inputs = to_inputs(with_garbage(row, 8))
    params: dict = {"token_mask_low": 0.5, "token_mask_high": 2.0, "geo_mask_low": 0.8, "geo_mask_high": 1.5}
    result = Masked(**params)(inputs)
    alone, together = dropped_by_masked(row, **params)
    assert together.any() and (alone & ~together).any() and (~alone & ~together & row.m).any()
    counted = {name: (float(total), int(count)) for name, (total, count) in result.metrics.items()}
    assert counted["masked"] == ((alone | together).sum(), row.m.sum())
    assert counted["mask/sequence_frac"] == (together.sum(), row.m.sum())
    assert counted["mask/token_frac"] == ((alone & ~together).sum(), row.m.sum())
    assert result.kept is not None
    np.testing.assert_array_equal(result.kept.numpy(), row.m & ~alone & ~together)


def by_hand(lp: list[float], inf: list[float], advantage: float, old: list[float] | None = None) -> LossInputs:
    size = len(lp)
    return LossInputs(
        policy_logprobs=torch.tensor(lp, dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.tensor(inf if old is None else old, dtype=torch.float64),
        sampler_logprobs=torch.tensor(inf, dtype=torch.float64),
        loss_mask=torch.ones(size, dtype=torch.bool),
        advantages=torch.full((size,), advantage, dtype=torch.float64),
        sequence_ids=torch.zeros(size, dtype=torch.long),
        num_sequences=1,
    )


def test_matches_manual_numbers() -> None:
    two = by_hand([math.log(0.8)], [math.log(0.4)], 1.0)  # ratio 2
    assert LOSSES["grpo"]()(two).loss.item() == pytest.approx(-1.2)
    assert LOSSES["dapo"]()(two).loss.item() == pytest.approx(-1.28)
    assert LOSSES["importance_sampling"]()(two).loss.item() == pytest.approx(-2)
    assert LOSSES["cispo"]()(two).loss.item() == pytest.approx(-2 * math.log(0.8))
    assert LOSSES["sapo"]()(two).loss.item() == pytest.approx(-4 / (1 + math.exp(-1)))
    assert LOSSES["dppo"]()(two).loss.item() == pytest.approx(1e-3 * math.log(2) ** 2)  # changed by .4: dropped
    assert LOSSES["masked"]()(two).loss.item() == pytest.approx(-2 * math.log(0.8))
    bad = by_hand([math.log(0.8)], [math.log(0.1)], -1.0)  # ratio 8
    assert DAPO(dual_clip=3.0)(bad).loss.item() == pytest.approx(3)
    assert LOSSES["dapo"]()(bad).loss.item() == pytest.approx(8)


def test_gspo_takes_the_geometric_mean() -> None:
    lp, old = [math.log(0.4), math.log(0.2)], [math.log(0.1), math.log(0.2)]  # ratios 4 and 1, geometric mean 2
    result = GSPO(clip_high=3.0)(by_hand(lp, old, 1.0))
    assert result.loss.tolist() == pytest.approx([-2, -2])


def test_dppo_drops_by_the_sign_of_the_advantage() -> None:
    """Probability .4 → .8 and .8 → .4. An advantage of 0 counts as negative."""
    lp, inf = [math.log(0.8), math.log(0.4)], [math.log(0.4), math.log(0.8)]
    for advantage, kept in ((1.0, [False, True]), (-1.0, [True, False]), (0.0, [True, False])):
        result = DPPO()(by_hand(lp, inf, advantage))
        assert result.kept is not None and result.kept.tolist() == kept
        assert [float(x) for x in result.metrics["mask/token_frac"]] == [1, 2]


def test_decoupled_drops_tokens_over_the_cap() -> None:
    inputs = by_hand([-1.0, -1.0], [-1.0 - math.log(6), -1.0 - math.log(4)], 1.0, old=[-1.0, -1.0])
    result = LOSSES["decoupled"]()(inputs)
    assert result.loss.tolist() == pytest.approx([0, -4])
    assert result.kept is not None and result.kept.tolist() == [False, True]
    assert [float(x) for x in result.metrics["mask/token_frac"]] == [1, 2]


def test_masked_token_with_infinite_ratio_gives_no_nan() -> None:
    leaf = torch.tensor([-0.1, -0.1, -0.1], requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=torch.zeros(3),
        sampler_logprobs=torch.tensor([-200.0, -0.1, -0.1]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        advantages=torch.ones(3),
        sequence_ids=torch.tensor([0, 1, 1]),
        num_sequences=2,
    )
    result = Masked(kl_tau=0.1)(inputs)
    grad = torch.autograd.grad(result.loss.sum(), leaf)[0]
    assert grad.tolist() == pytest.approx([0, -1, -1])


def test_half_precision_is_lifted_and_double_kept() -> None:
    row = random_row(1)
    for given, computed in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        _, inputs = to_inputs(row, given)
        for name in LOSSES:
            assert LOSSES[name]()(inputs).loss.dtype == computed, name


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        by_hand([-1.0, -1.0], [-1.0, -1.0], 1.0, old=[-1.0])


def test_user_loss() -> None:
    row = with_garbage(random_row(2), 5)
    leaf, inputs = to_inputs(row)
    custom = CustomLoss(type="mine:loss", args={"shift": 7})

    def own(x: LossInputs, shift: float) -> torch.Tensor:
        return -x.advantages * x.policy_logprobs + torch.nan_to_num(torch.tensor(row.lp)) * 0 + shift

    result = custom.with_function(own)(inputs)
    assert result.loss.detach().numpy()[~row.m].tolist() == [0.0] * int((~row.m).sum())
    np.testing.assert_allclose(gradient(result.loss, leaf), np.where(row.m, -np.nan_to_num(row.a), 0.0))
    for wrong in (lambda x, shift: x.policy_logprobs.sum(), lambda x, shift: np.zeros(len(x.loss_mask))):
        with pytest.raises(UserCodeError, match="mine:loss"):
            custom.with_function(wrong)(inputs)
    with pytest.raises(ValueError, match="with_function"):
        custom(inputs)
