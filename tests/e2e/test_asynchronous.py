"""Asynchronous runs of the real command: what rollouts in flight record, and how the losses correct for their age.

Every share is computed again from the run's files, which contain log-probs of sampler and policy per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .helpers.runs import Run, assert_same_run, assert_trained_once, fingerprint

NewRun = Callable[..., Run]
FAST = {"max_steps": 6, "learning_rate": 5e-3}  # weights change enough to show rollouts of older versions


def finished(run: Run, steps: int = 6) -> Run:
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, steps)
    return run


def ratios(run: Run, step: int) -> list[np.ndarray]:
    """The ratio of policy to sampler at the trained tokens of a step, one array per rollout."""
    found = []
    for rollout in run.rollouts():
        if rollout["step"] == step and rollout["policy_logprobs"] is not None:
            at = np.array(rollout["loss_mask"], dtype=bool)
            gap = np.array(rollout["policy_logprobs"]) - np.array(rollout["sampler_logprobs"])
            found.append(np.exp(gap[at]))
    return found


def test_level_0_is_the_synchronous_run_bit_for_bit(new_run: NewRun):
    """With separate weights, the sampler is updated like a remote one. At level 0 this changes no number."""
    held_out = {"interval": 2, "num_examples": 4}
    plain = finished(new_run("plain", orch={"eval": held_out}), 4)
    level_0 = {"max_async_level": 0, "max_off_policy_steps": 0, "eval": held_out}
    other = finished(new_run("level_0", orch=level_0, infer={"weights": "own"}), 4)
    assert plain.metrics() == other.metrics() and len(plain.metrics()) == 5
    assert all(step["staleness/max"] == 0 for step in other.steps())
    assert_same_run(other, fingerprint(plain))


def test_rollouts_in_flight_go_on_under_new_weights(new_run: NewRun):
    """Long answers at level 2: tokens of one answer have different versions."""
    orch = {
        "max_async_level": 2,
        "sampling": {"max_tokens": 60, "min_tokens": 40},
        "eval": {"interval": 2, "num_examples": 4},
        "groups": {"uniform": "keep"},
    }
    run = finished(new_run(train=FAST, orch=orch, infer={"max_num_seqs": 16}))
    crossing = [rollout for rollout in run.rollouts() if len(rollout["spans"]) > 1]
    assert crossing, "sampling continued during training"
    for rollout in crossing:
        starts, ends, versions = map(list, zip(*rollout["spans"], strict=True))
        assert starts == [0, *ends[:-1]] and ends[-1] == len(rollout["token_ids"])
        assert versions == sorted(set(versions)) and versions[-1] <= rollout["step"] - 1
    for step in run.steps():
        oldest = [
            step["step"] - 1 - min(version for _, _, version in rollout["spans"])
            for rollout in run.rollouts()
            if rollout["step"] == step["step"] and rollout["drop_reason"] is None
        ]
        assert step["staleness/max"] == max(oldest) <= 2
        assert step["staleness/mean"] == pytest.approx(np.mean(oldest))
    assert max(step["staleness/max"] for step in run.steps()) > 0


CAPS = {"cap": 1.02}
WIDE = {"geo_mask_low": 1e-3, "geo_mask_high": 1e3, "sequence_mask_high": 1e6}  # no rollout is dropped
LOSSES: dict[str, dict[str, Any]] = {
    "decoupled": {"type": "decoupled", "cap": 1.02},
    "masked": {"type": "masked", "token_mask_low": 0.98, "token_mask_high": 1.02, **WIDE},
    "tis": {"type": "grpo", "correction": {"type": "tis", **CAPS}},
    "icepop": {"type": "grpo", "correction": {"type": "icepop", "floor": 0.98, **CAPS}},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_correct_for_stale_tokens(new_run: NewRun, name: str):
    orch = {"max_async_level": 2, "groups": {"uniform": "keep"}}
    run = finished(new_run(train={**FAST, "loss": LOSSES[name]}, orch=orch))
    shares = []
    for step in run.steps():
        ratio = np.concatenate(ratios(run, step["step"]))
        outside = {"decoupled": ratio > 1.02, "tis": ratio > 1.02}.get(name, (ratio < 0.98) | (ratio > 1.02))
        metric = "correction/capped_frac" if name in ("tis", "icepop") else "mask/token_frac"
        # The files round log-probs to five digits, so a token at the bound may be on either side.
        assert step[metric] == pytest.approx(outside.mean(), abs=0.02)
        if name in ("tis", "icepop"):
            kept = np.where(outside, 1.02 if name == "tis" else 0.0, ratio)
            assert step["correction/weight_mean"] == pytest.approx(ratio.mean(), rel=1e-3)
            assert step["correction/capped_mean"] == pytest.approx(kept.mean(), abs=0.02)
        shares.append((step["staleness/max"], step[metric]))
    assert all(share == 0 for age, share in shares if age == 0), "fresh rollouts need no correction"
    assert max(share for age, share in shares if age > 0) > 0.05, "the correction applies to rollouts sampled ahead"
