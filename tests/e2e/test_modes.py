"""Modes of a run: sync windows, asynchronous sampling, noise, several environments and turns, user code, truncation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .helpers.runs import REVERSE_ARGS, SUM_ARGS, Run, assert_trained_once

NewRun = Callable[..., Run]
LORA = {"lora": True, "lora_rank": 4, "learning_rate": 2e-3}


def finished(run: Run, steps: int = 4) -> Run:
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, steps)
    return run


def ages(run: Run) -> dict[int, list[int]]:
    """By step, the number of versions between sampling and training of each rollout, from the spans in the files."""
    trained = {rollout_id for record in run.journal() for rollout_id in record["rollout_ids"]}
    found: dict[int, list[int]] = {}
    for rollout in run.rollouts():
        if rollout["rollout_id"] in trained:
            oldest = min(version for _, _, version in rollout["spans"])
            found.setdefault(rollout["step"], []).append(rollout["step"] - 1 - oldest)
    return found


@pytest.mark.parametrize("train", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("interval", "level", "gaps"),
    [(2, 0, [{0}, {1}, {0}, {1}, {0}]), (0, 0, [{0}, {1}, {2}, {3}, {4}]), (1, 1, None)],
)
def test_sampling_ahead_of_training(
    new_run: NewRun, train: dict[str, Any], interval: int, level: int, gaps: list[set[int]] | None
):
    run = new_run(train={**train, "max_steps": 5}, orch={"weight_sync_interval": interval, "max_async_level": level})
    finished(run, 5)
    found = ages(run)
    for step in run.steps():
        assert step["staleness/max"] == max(found[step["step"]])
        assert step["staleness/mean"] == pytest.approx(np.mean(found[step["step"]]))
        assert step["batch/used"] == 16
    if gaps is not None:
        assert [set(found[step]) for step in range(1, 6)] == gaps
        fresh = [step["mismatch/k3"] for step, gap in zip(run.steps(), gaps, strict=True) if gap == {0}]
        behind = [step["mismatch/k3"] for step, gap in zip(run.steps(), gaps, strict=True) if gap != {0}]
        assert max(fresh) < 1e-9 < min(behind), "older weights sampled them"
    else:
        assert set(found[1]) == {0} and all(set(gap) <= {0, 1} for gap in found.values())
        assert {1} <= {age for gap in found.values() for age in gap}, "some rollouts were sampled ahead"


def test_rollouts_too_far_behind_are_dropped(new_run: NewRun):
    orch = {"weight_sync_interval": 3, "max_off_policy_steps": 1}
    run = finished(new_run(train={"max_steps": 6}, orch=orch), 6)
    stale = [record["step"] for record in run.journal() if "stale" in record["dropped"].values()]
    assert stale == [3, 6], "the third step of each window would be two versions behind"
    counted = [step["group/stale"] for step in run.steps() if "group/stale" in step]
    assert len(counted) == 2 and all(count >= 4 for count in counted)


def test_noise_is_on_the_sampler_only(new_run: NewRun, model: Path):
    from safetensors.numpy import load_file

    noise = {"enabled": True, "sigma_start": 0.3, "sigma_end": 0.1, "num_stages": 4}
    run = finished(new_run(train={"noise_scheduler": noise}, orch={"eval": {"interval": 2, "num_examples": 4}}))
    wanted = [0.0, 0.3, pytest.approx((0.3 * 0.1) ** 0.5), pytest.approx(0.1)]
    assert [step["noise/sigma"] for step in run.steps()] == wanted
    gaps = [step["mismatch/k3"] for step in run.steps()]
    assert gaps[0] < 1e-9 < 1e-5 < min(gaps[1:]), "the noisy sampler differs measurably from the policy"
    start, final = load_file(model / "model.safetensors"), load_file(run.path / "final" / "model.safetensors")
    norms = [name for name in start if "norm" in name]
    assert norms and all(abs(final[name] - start[name]).max() < 3e-3 for name in norms), (
        "training changed them slightly"
    )


def test_several_environments_by_weight(new_run: NewRun):
    envs = [
        {"id": "reverse-text", "name": "text", "args": REVERSE_ARGS, "weight": 3.0},
        {"id": "arithmetic", "name": "sums", "args": SUM_ARGS, "weight": 1.0},
    ]
    run = finished(new_run(orch={"env": envs, "groups": {"uniform": "keep"}}))
    drawn = Counter(rollout["env"] for rollout in run.rollouts())
    assert drawn == {"text": 48, "sums": 16}
    assert all({"reward/env/text", "reward/env/sums"} <= set(step) for step in run.steps())
    assert run.journal()[-1]["cursor"] == {"text": 12, "sums": 4}


def test_several_turns_with_an_environment_of_the_users_own(new_run: NewRun):
    run = finished(new_run(train={"sequence_len": 256}, orch={"env": [{"id": "my_code:TwoWords"}], "batch_size": 8}))
    two = [rollout for rollout in run.rollouts() if len(rollout["spans"]) == 2]
    assert len(two) > len(run.rollouts()) / 2
    for rollout in two:
        assert 0 in rollout["loss_mask"] and rollout["loss_mask"][0] == rollout["loss_mask"][-1] == 1
        sampled = sum(rollout["loss_mask"])
        assert rollout["spans"][-1][1] == sampled
        assert rollout["completion"].count("[assistant]") == 2 and "[user]" in rollout["completion"]
        assert rollout["reward"] == pytest.approx(sum(rollout["parts"].values()))
    assert all(step["mismatch/k3"] < 1e-9 for step in run.steps()), (
        "the second turn is trained on the tokens of its prompt"
    )
    assert all({"reward/part/first", "reward/part/second"} <= set(step) for step in run.steps())


def test_user_advantages_and_filters(new_run: NewRun):
    orch = {"advantage": "my_code:best_minus_rest", "groups": {"filter": "my_code:not_too_good", "max_refill": 10}}
    run = finished(new_run(orch=orch))
    groups: dict[str, list[dict[str, Any]]] = {}
    for rollout in run.rollouts():
        groups.setdefault(rollout["group"], []).append(rollout)
    reasons = Counter(rollouts[0]["drop_reason"] for rollouts in groups.values())
    assert reasons["filtered"] > 0
    for rollouts in groups.values():
        rewards = [rollout["reward"] for rollout in rollouts]
        if rollouts[0]["drop_reason"] is None:
            assert np.mean(rewards) < 0.3
            wanted = [1.0 if reward == max(rewards) else -1.0 for reward in rewards]
            assert [rollout["advantage"] for rollout in rollouts] == wanted
        elif rollouts[0]["drop_reason"] == "filtered":
            assert np.mean(rewards) >= 0.3


@pytest.mark.parametrize("kind", ["keep", "mask", "zero", "overlong"])
def test_truncated_answer_modes(new_run: NewRun, kind: str):
    """Answers have six to nine tokens, so a limit of eight truncates some of them."""
    truncated = {"tokens": 4, "factor": 0.5} if kind == "overlong" else kind
    run = finished(new_run(orch={"truncated": truncated, "sampling": {"max_tokens": 8}}))
    rollouts = run.rollouts()
    cut = [rollout for rollout in rollouts if rollout["truncated"]]
    assert cut and len(cut) < len(rollouts)
    trained = {rollout_id for record in run.journal() for rollout_id in record["rollout_ids"]}
    for rollout in rollouts:
        raw, over = rollout["raw_reward"], len(rollout["token_ids"]) - 4
        wanted = raw
        if kind == "zero" and rollout["truncated"]:
            wanted = 0.0
        elif kind == "overlong":
            wanted = raw - 0.5 * max(over, 0) / 4
        assert rollout["reward"] == pytest.approx(wanted)
        kept = rollout["drop_reason"] is None
        assert (rollout["rollout_id"] in trained) == (kept and not (kind == "mask" and rollout["truncated"]))
        assert (rollout["policy_logprobs"] is not None) == (rollout["rollout_id"] in trained)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_p": 0.7},
        {"top_k": 5, "temperature": 1.3},
        {"min_p": 0.05, "temperature": 0.8},
        {"temperature": {"start": 1.2, "end": 0.6}},
        {"min_tokens": 6},
    ],
    ids=["top_p", "top_k", "min_p", "temperature", "min_tokens"],
)
def test_trained_distribution_equals_the_sampled_one(new_run: NewRun, sampling: dict[str, Any]):
    """Ratios are exact: training applies the kept ids, temperatures and forbidden end tokens of sampling."""
    run = finished(new_run(orch={"sampling": {"max_tokens": 10, **sampling}}))
    assert all(step["mismatch/k3"] < 1e-6 for step in run.steps())
    assert all(abs(step["mismatch/ratio_mean"] - 1) < 1e-5 for step in run.steps())
    for rollout in run.rollouts():
        if rollout["policy_logprobs"] is not None:
            np.testing.assert_allclose(rollout["policy_logprobs"], rollout["sampler_logprobs"], atol=1e-4)


def test_saving_by_time_and_keeping_the_best(new_run: NewRun):
    held_out = {"interval": 1, "num_examples": 8, "keep_best": True}
    train = {"save_steps": None, "save_seconds": 0.01, "save_total_limit": 1, "learning_rate": 5e-3}
    run = finished(new_run(train=train, orch={"eval": held_out}))
    means = {line["step"]: line["eval/reverse-text/mean"] for line in run.metrics() if line["step"] > 0}
    start = run.metrics()[0]["eval/reverse-text/mean"]
    best = max(means, key=lambda step: means[step])
    wanted = {4, best} if means[best] > start else {4}
    assert set(run.checkpoints()) == wanted
