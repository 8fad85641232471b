"""The translation of `GRPOConfig` against TRL's objective: value and gradient of a complete step in float64.

TRL's objective is written here from its formulas, over sequences instead of packed tokens (TRL 1.16: ratio per token
or geometric mean per sequence, `delta` as an upper bound of the unclipped ratio, k3 times the ratio as KL, the entropy
bonus as a mean over all tokens).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shoal import GRPOConfig, GRPOTrainer
from shoal.build.parts import make_advantages
from shoal.core.learn import StepRows
from shoal.core.metrics import Tally
from shoal.core.objective import Objective
from shoal.signals.rows import EntropyCoefficient, entropy_threshold
from unit.core.groups import make_group, make_prompt
from unit.core.rows import random_row, to_inputs

MAX_TOKENS = 16
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "kl": {"beta": 0.3},
    "kl, k3": {"beta": 0.3, "use_bias_correction_kl": False},
    "grpo": {"loss_type": "grpo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "delta": {"delta": 1.5, "beta": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 2.0, "beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence, grpo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sequence, dr_grpo": {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
    "sequence, kl": {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
    "vespo": {"loss_type": "vespo", "beta": 0.1},
    "vespo, parameters": {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 0.0, "vespo_lambda_neg": 3.5},
    "entropy bonus": {"entropy_coef": 0.02, "beta": 0.1},
    "entropy bonus, cispo": {"entropy_coef": 0.02, "loss_type": "cispo", "epsilon_high": 1.5},
    "entropy bonus, vespo": {"entropy_coef": 0.02, "loss_type": "vespo"},
    "top entropy": {"top_entropy_quantile": 0.3, "beta": 0.1},
    "top entropy, vespo": {"top_entropy_quantile": 0.5, "loss_type": "vespo"},
    "top entropy, dr_grpo": {"top_entropy_quantile": 0.2, "loss_type": "dr_grpo"},
}


def trls_loss(
    config: GRPOConfig, lp: torch.Tensor, entropy: torch.Tensor, row: Any, sequences: list[list[int]]
) -> torch.Tensor:
    loss = trls_policy_loss(config, lp, entropy.detach(), row, sequences)
    return loss - config.entropy_coef * torch.cat([entropy[tokens] for tokens in sequences]).mean()


def vespo_weight(config: GRPOConfig, gap: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    log_w = gap.detach().clamp(-20, 20).sum().clamp(math.log(1e-8), 20)
    positive = bool(advantage[0] >= 0)
    k = config.vespo_k_pos if positive else config.vespo_k_neg
    rate = max(config.vespo_lambda_pos if positive else config.vespo_lambda_neg, 1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp()


def trls_policy_loss(
    config: GRPOConfig, lp: torch.Tensor, entropy: torch.Tensor, row: Any, sequences: list[list[int]]
) -> torch.Tensor:
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    old, ref = torch.tensor(row.old), torch.tensor(row.ref)
    threshold = torch.quantile(entropy[torch.tensor(row.m)], 1 - config.top_entropy_quantile)
    per_sequence = []
    for tokens in sequences:
        advantage = torch.tensor(row.a[tokens])
        gap = lp[tokens] - old[tokens]
        ratio = (gap.mean().expand(len(tokens)) if config.importance_sampling_level == "sequence" else gap).exp()
        if config.loss_type == "cispo":
            loss = -ratio.clamp(max=high).detach() * advantage * lp[tokens]
        elif config.loss_type == "sapo":
            heat = torch.where(advantage > 0, config.sapo_temperature_pos, config.sapo_temperature_neg).double()
            loss = -advantage * torch.sigmoid(heat * (ratio - 1)) * 4 / heat
        elif config.loss_type == "vespo":
            loss = -vespo_weight(config, gap, advantage) * advantage * lp[tokens]
        else:
            bounded = ratio.clamp(1 - config.epsilon, 1 + high)
            free = ratio if config.delta is None else ratio.clamp(max=config.delta)
            loss = -torch.minimum(free * advantage, bounded * advantage)
        loss = loss * (entropy[tokens] >= threshold)
        if config.beta:
            away = ref[tokens] - lp[tokens]
            kl = away.exp() - away - 1
            loss = loss + config.beta * (kl * ratio if config.use_bias_correction_kl else kl)
        per_sequence.append(loss)
    if config.loss_type in ("grpo", "sapo"):
        return torch.stack([loss.mean() for loss in per_sequence]).mean()
    total = torch.stack([loss.sum() for loss in per_sequence]).sum()
    if config.loss_type == "dr_grpo":
        return total / (len(sequences) * MAX_TOKENS)
    return total / sum(len(tokens) for tokens in sequences)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_translated_loss_has_trls_value_and_gradient(case: str, seed: int) -> None:
    config = GRPOConfig(max_completion_length=MAX_TOKENS, **CASES[case])
    run = GRPOTrainer("org/model", [{"prompt": "a"}], len, args=config).config
    row = random_row(seed)
    sequences = [tokens for tokens in map(row.tokens_of, range(row.num_sequences)) if tokens]
    # One advantage per sequence, as in a run.
    row = replace(row, a=np.random.default_rng(seed).normal(size=row.num_sequences)[row.seq])
    leaf, inputs = to_inputs(row)
    weights = torch.zeros(len(row.m), dtype=torch.float64)
    for tokens in sequences:
        weights[tokens] = {
            "token-mean": 1 / int(row.m.sum()),
            "seq-mean-token-mean": 1 / (len(sequences) * len(tokens)),
            "seq-mean-token-sum-norm": 1 / (len(sequences) * MAX_TOKENS),
        }[str(run.train.loss.aggregation)]
    entropies = np.random.default_rng(seed).exponential(size=len(row.m))
    leaves = [
        (lp, torch.tensor(entropies, requires_grad=True)) for lp in (leaf, torch.tensor(row.lp, requires_grad=True))
    ]
    bonus = run.train.loss.entropy
    threshold = entropy_threshold(entropies[row.m], bonus.top_fraction)
    inputs = replace(
        inputs,
        entropy=leaves[0][1],
        entropy_coef=torch.full_like(leaf, EntropyCoefficient(bonus, Policy()).applied).detach() if bonus.on else None,
        top_entropy=torch.tensor(entropies >= threshold).double() if bonus.top_fraction < 1 else None,
    )
    ours, _ = Objective(run.train.loss)(inputs, weights)
    theirs = trls_loss(config, *leaves[1], row, sequences)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    ours.backward()
    theirs.backward()
    for our_leaf, their_leaf in zip(*leaves, strict=True):
        torch.testing.assert_close(trained(our_leaf, row), trained(their_leaf, row), rtol=1e-9, atol=1e-12)


def trained(leaf: torch.Tensor, row: Any) -> torch.Tensor:
    """The gradient of the trained tokens. Other tokens have none."""
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    assert not gradient[torch.tensor(~row.m)].any()
    return gradient


class Policy:
    def __init__(self) -> None:
        self.signal_state: dict[str, float] = {}

    def entropies(self, rows: Any) -> Any: ...


def trls_coefficients(config: GRPOConfig, entropies: list[float]) -> list[float]:
    """The coefficient that TRL applies in each update."""
    coef, last, applied = config.entropy_coef, math.inf, []
    for entropy in entropies:
        applied.append(coef if last <= config.entropy_target else 0.0)
        if entropy <= config.entropy_target:
            coef = min(coef + config.entropy_coef_delta, config.entropy_coef_max)
        else:
            coef = max(coef - config.entropy_coef_delta, config.entropy_coef_min)
        last = entropy
    return applied


@pytest.mark.parametrize("start", [0.0, 0.01, 0.02])
def test_adaptive_coefficient_equals_trl(start: float) -> None:
    config = GRPOConfig(
        use_adaptive_entropy=True, entropy_coef=start, entropy_target=0.4, entropy_coef_delta=0.004,
        entropy_coef_min=0.002, entropy_coef_max=0.02, top_k=0,
    )  # fmt: skip
    run = GRPOTrainer("org/model", [{"prompt": "a"}], len, args=config).config
    entropies = [*np.random.default_rng(1).uniform(0, 0.8, 40), *[0.1] * 8, 0.4, *[0.7] * 8, 0.1, 0.1]
    signal, ours = EntropyCoefficient(run.train.loss.entropy, Policy()), []
    for entropy in entropies:
        ours.append(signal.applied)
        asyncio.run(signal.annotate(StepRows([], [], None, None)))  # type: ignore[arg-type]
        tally = Tally()
        tally.add("policy/entropy", entropy * 7, 7)
        signal.observe(tally)
    assert ours == pytest.approx(trls_coefficients(config, entropies), abs=1e-12)


def trls_advantages(config: GRPOConfig, rewards: torch.Tensor, group: int) -> torch.Tensor:
    """`rewards`: [rollouts, functions], NaN for None."""
    weights = torch.tensor(config.reward_weights, dtype=torch.float64)

    def nanstd(values: torch.Tensor, dim: int) -> torch.Tensor:
        count = (~values.isnan()).sum(dim, keepdim=True)
        squares = (values - values.nanmean(dim, keepdim=True)) ** 2
        return (squares.nansum(dim, keepdim=True) / (count - 1)).sqrt()

    grouped = rewards.view(-1, group, rewards.shape[1])
    unscored = rewards.isnan().all(1)
    if config.multi_objective_aggregation == "sum_then_normalize":
        total = (rewards * weights).nansum(1).masked_fill(unscored, math.nan).view(-1, group)
        advantages = (total - total.nanmean(1, keepdim=True)) / (nanstd(total, 1) + 1e-4)
        return advantages.flatten().nan_to_num(0.0)
    parts = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, 1) + 1e-4)
    total = (parts.view_as(rewards) * weights).nansum(1).masked_fill(unscored, math.nan)
    return ((total - total.nanmean()) / (nanstd(total, 0) + 1e-4)).nan_to_num(0.0)


@pytest.mark.parametrize("how", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_of_several_functions_equal_trl(how: str) -> None:
    """Three functions over groups of four. The second does not apply to all rollouts, and one rollout has no reward."""
    none = math.nan
    rewards = torch.tensor(
        [[1.0, 3.0, 0.1], [0.0, none, 0.7], [1.0, 5.0, 0.2], [0.0, 4.0, none],
         [1.0, none, 0.3], [1.0, 2.0, 0.9], [none, none, none], [1.0, none, 0.4],
         [2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]],
        dtype=torch.float64,
    )  # fmt: skip
    config = GRPOConfig(
        reward_weights=[1.0, 0.3, 2.0], multi_objective_aggregation=how, num_generations=4,
        per_device_train_batch_size=12,
    )  # fmt: skip
    run = GRPOTrainer("org/model", [{"prompt": "a"}], [len, len, len], args=config).config
    assert config.reward_weights is not None
    groups = []
    for index, of_group in enumerate(rewards.view(-1, 4, 3).tolist()):
        group = make_group(make_prompt(index), [0.0] * 4)
        for rollout, values in zip(group.rollouts, of_group, strict=True):
            rollout.parts = {name: value for name, value in zip("abc", values, strict=True) if value == value}
            rollout.part_weights = dict(zip("abc", config.reward_weights, strict=True))
            total = sum(rollout.part_weights[name] * value for name, value in rollout.parts.items())
            rollout.reward = rollout.raw_reward = total if rollout.parts else None
            rollout.status = "ok" if rollout.parts else "error"
        groups.append(group)
    make_advantages(run.orch).assign(groups)
    ours = [rollout.advantage or 0.0 for group in groups for rollout in group.rollouts]
    assert ours == pytest.approx(trls_advantages(config, rewards, 4).tolist(), rel=1e-9, abs=1e-12)
