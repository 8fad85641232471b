"""Datums and built-in loss functions, with manually computed numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ArgumentError
from shoal.recipes.config import Config, DAPOConfig, DeployConfig
from shoal.recipes.datums import PromptGroup, SampledCompletion, build_grpo_datums, make_grpo_loss_fn


def completion(*tokens: int, logprob: float = -1.0, prompt: int = 2) -> SampledCompletion:
    """Two prompt tokens, then `tokens`, each sampled with the same log-prob."""
    given: list[float | None] = [None, *([0.0] * (prompt - 1))]
    return SampledCompletion([7] * prompt + list(tokens), prompt, [*given, *([logprob] * len(tokens))], "", "stop")


def config(**given: Any) -> Config:
    values = {"log_path": "out", "base_model": "org/m", "dataset": "org/d", "deployment": DeployConfig("org/m")}
    return Config(**{**values, "tis": None, **given})


GROUP = PromptGroup([completion(3, 4), completion(5), completion(6, 6, 6)], [0.0, 1.0, 2.0])


def test_advantages_are_group_mean_and_unbiased_std():
    datums = build_grpo_datums([GROUP])
    assert [datum.advantage for datum in datums] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)  # mean 1, std 1
    assert [datum.num_tokens for datum in datums] == [4, 3, 5]
    assert datums[0].loss_mask.tolist() == [False, True, True]
    assert datums[0].sampler_logprobs == [None, 0.0, -1.0, -1.0]


def test_zero_variance_groups_are_skipped():
    uniform = PromptGroup([completion(3), completion(4)], [1.0, 1.0])
    assert build_grpo_datums([uniform]) == []
    left = build_grpo_datums([PromptGroup([completion(3), completion(4), completion(5)], [0.0, None, 1.0])])
    assert [datum.sample.token_ids[-1] for datum in left] == [3, 5]
    with pytest.raises(ArgumentError, match=r"PromptGroup: rewards: 1 rewards for 2 completions"):
        PromptGroup([completion(3), completion(4)], [1.0])


def test_groups_of_different_calls_stay_apart():
    both = [*build_grpo_datums([GROUP]), *build_grpo_datums([GROUP])]
    assert len({datum.sample.rollout_id for datum in both}) == 6
    assert len({datum.sample.group_id for datum in both}) == 2


def test_misaligned_log_probs_are_refused():
    wrong = SampledCompletion([1, 2, 3], 1, [-1.0, -1.0], "", "stop")
    with pytest.raises(ValueError, match=r"3 tokens need 3 sampler log-probs, got 2"):
        build_grpo_datums([PromptGroup([wrong, wrong], [0.0, 1.0])])
    datums = build_grpo_datums([GROUP])
    short = [torch.zeros(datum.num_tokens - 1) for datum in datums]
    with pytest.raises(ValueError, match="old_logprobs"):
        make_grpo_loss_fn(config(), old_logprobs=[torch.zeros(4), *short[1:]])(datums, short)


def test_grpo_loss_by_hand():
    """Sampler -1 everywhere. The policy has -1 + log 1.1 for the tokens of the third answer and -1 for the rest."""
    datums = build_grpo_datums([GROUP])
    logprobs = [torch.full((datum.num_tokens - 1,), -1.0) for datum in datums]
    logprobs[2] = logprobs[2] + math.log(1.1)
    loss, metrics = make_grpo_loss_fn(config())(datums, logprobs)
    # token-mean over 6 tokens: 2·(1·1) + 1·0 + 3·(−1.1·1)
    assert float(loss) == pytest.approx((2 - 3.3) / 6, rel=1e-5)
    assert metrics["policy/loss"] == pytest.approx(float(loss))
    assert metrics["policy/ratio_mean"] == pytest.approx((3 + 3 * 1.1) / 6, rel=1e-5)
    logprobs[2] = logprobs[2] + math.log(1.5 / 1.1)
    clipped, metrics = make_grpo_loss_fn(config())(datums, logprobs)
    assert float(clipped) == pytest.approx((2 - 3 * 1.2) / 6, rel=1e-5)
    assert metrics["policy/clip_frac"] == pytest.approx(0.5)
    wider, _ = make_grpo_loss_fn(config(policy_loss="dapo", dapo=DAPOConfig(eps_clip_high=0.5)))(datums, logprobs)
    assert float(wider) == pytest.approx((2 - 3 * 1.5) / 6, rel=1e-5)


def test_ratio_log_cap_bounds_the_ratio():
    datums = build_grpo_datums([GROUP])
    logprobs = [torch.full((datum.num_tokens - 1,), -1.0 + math.log(1.15)) for datum in datums]
    _, free = make_grpo_loss_fn(config())(datums, logprobs)
    _, capped = make_grpo_loss_fn(config(ratio_log_cap=math.log(1.1)))(datums, logprobs)
    assert free["policy/ratio_mean"] == pytest.approx(1.15, rel=1e-5)
    assert capped["policy/ratio_mean"] == pytest.approx(1.1, rel=1e-5)


def test_kl_term_requires_reference_logprobs():
    with pytest.raises(ArgumentError, match=r"make_grpo_loss_fn: reference_logprobs: the loss has a KL term"):
        make_grpo_loss_fn(config(lora_rank=4))
    datums = build_grpo_datums([GROUP])
    logprobs = [torch.full((datum.num_tokens - 1,), -1.0) for datum in datums]
    reference = [np.full(datum.num_tokens - 1, -1.5) for datum in datums]
    loss, metrics = make_grpo_loss_fn(config(lora_rank=4, kl_beta=0.1), reference)(datums, logprobs)
    k3 = math.exp(-0.5) + 0.5 - 1  # d = lp − ref = .5
    assert metrics["policy/kl_ref"] == pytest.approx(k3, rel=1e-4)
    assert float(loss) == pytest.approx(0.1 * k3 + (2 - 3) / 6, rel=1e-4)


def test_old_logprobs_come_from_the_first_call():
    datums = build_grpo_datums([GROUP])
    first = [torch.full((datum.num_tokens - 1,), -2.0) for datum in datums]
    loss_fn = make_grpo_loss_fn(config(policy_loss="gspo"))
    _, metrics = loss_fn(datums, first)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)
    _, metrics = loss_fn(datums, [values + 0.1 for values in first])
    assert metrics["policy/ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-5)
