"""What `GRPOConfig` is translated to, against TRL's objective: value and gradient of a whole step in float64.

TRL's objective is written here from its formulas, over sequences instead of packed tokens (TRL 1.16: ratio per token or
geometric mean per sequence, `delta` as an upper bound of the unclipped ratio, k3 times the ratio as KL).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shoal import GRPOConfig, GRPOTrainer
from shoal.core.objective import Objective
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
}


def trls_loss(config: GRPOConfig, lp: torch.Tensor, row: Any, sequences: list[list[int]]) -> torch.Tensor:
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    old, ref = torch.tensor(row.old), torch.tensor(row.ref)
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
        else:
            bounded = ratio.clamp(1 - config.epsilon, 1 + high)
            free = ratio if config.delta is None else ratio.clamp(max=config.delta)
            loss = -torch.minimum(free * advantage, bounded * advantage)
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
def test_the_translated_loss_has_trls_value_and_gradient(case: str, seed: int) -> None:
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
    ours, _ = Objective(run.train.loss)(inputs, weights)
    lp = torch.tensor(row.lp, requires_grad=True)
    theirs = trls_loss(config, lp, row, sequences)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    (our_gradient,) = torch.autograd.grad(ours, leaf)
    (their_gradient,) = torch.autograd.grad(theirs, lp)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-12)
