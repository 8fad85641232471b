"""Records of a step: metrics over its groups, counted manually, and one line per rollout."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.core.metrics import Tally, tally_groups
from shoal.core.types import RolloutGroup
from shoal.runs.journal import encode_line
from shoal.runs.rollout_log import rollout_lines

from .groups import make_group, make_prompt, make_turn

FIELDS = {
    "rollout_id", "prompt_id", "group", "env", "status", "error", "drop_reason", "prompt", "completion", "reward",
    "raw_reward", "parts", "advantage", "truncated", "prompt_tokens", "spans", "token_ids", "token_texts", "loss_mask",
    "sampler_logprobs", "policy_logprobs",
}  # fmt: skip


def tallied(groups: list[RolloutGroup], version: int = 0) -> dict[str, float]:
    tally = Tally()
    tally_groups(tally, groups, [g for g in groups if g.drop_reason is None], version)
    return tally.reduce()


def dropped(group: RolloutGroup, reason: str) -> RolloutGroup:
    group.drop_reason = reason
    return group


def test_metrics_by_hand():
    long = make_turn([3, 4, 5, 6], finish="length", version=2)
    kept = make_group(make_prompt(0), [0.0, 1.0, None], version=3, turn=make_turn([3, 4], version=3))
    kept.rollouts[0].turns = [long]
    kept.rollouts[2].status = "timeout"
    good = dropped(make_group(make_prompt(1), [1.0, 1.0, 1.0], version=4), "uniform-good")
    bad = dropped(make_group(make_prompt(2), [0.5, 0.5, 0.5], version=4), "uniform-bad")
    bad.max_reward = 1.0  # if it were unknown, 0.5 would be neither good nor bad
    old = dropped(make_group(make_prompt(3), [0.0, 1.0, None], version=0), "stale")
    metrics = tallied([kept, good, bad, old], version=4)
    rewards = [0, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0, 1]
    expected = {
        "reward/mean": np.mean(rewards),
        "reward/std": np.std(rewards, ddof=1),
        "reward/p10": 0.0,
        "reward/p50": 0.75,
        "reward/p90": 1.0,
        "reward/raw_mean": np.mean(rewards),
        "reward/error_frac": 1 / 12,
        "reward/timeout_frac": 1 / 12,
        "group/mixed_frac": 2 / 4,
        "group/all_good_frac": 1 / 4,
        "group/all_bad_frac": 1 / 4,
        "group/flat": 2,
        "group/stale": 1,
        "batch/rollouts": 12,
        "batch/used": 2,
        "tokens/prompt": 24,
        "tokens/completion": 4 + 11 * 2,
        "tokens/used_frac": 6 / 26,
        "completion/length_mean": 26 / 12,
        "completion/length_min": 2,
        "completion/length_max": 4,
        "completion/truncated_frac": 1 / 12,
        "staleness/mean": (2 + 1 + 1) / 3,
        "staleness/max": 2,
    }
    assert metrics == pytest.approx(expected)


def test_metric_without_data_is_absent():
    assert tallied([]) == {}
    metrics = tallied([dropped(make_group(make_prompt(0), [None, None]), "too-few-scored")])
    assert metrics["reward/error_frac"] == 1
    absent = {"reward/mean", "reward/std", "reward/raw_mean", "staleness/mean", "staleness/max", "group/stale"}
    assert not absent & set(metrics)
    assert metrics["batch/used"] == 0 and metrics["batch/rollouts"] == 2


def test_parts_and_several_environments():
    first = make_group(make_prompt(0, env="a"), [0.0, 1.0])
    second = make_group(make_prompt(0, env="b"), [0.5, None])
    for rollout, part in zip([*first.rollouts, *second.rollouts], (0.0, 1.0, 0.25, 9.0), strict=True):
        rollout.parts = {"style": part}
    metrics = tallied([first, second])
    assert metrics["reward/env/a"] == 0.5 and metrics["reward/env/b"] == 0.5
    assert (metrics["group/env/a"], metrics["group/env/b"]) == (1.0, 0.0)
    assert metrics["completion/env/a"] == metrics["completion/env/b"] == metrics["completion/length_mean"]
    assert metrics["reward/part/style"] == pytest.approx(1.25 / 3), "a failed rollout is excluded"
    assert not any(name.startswith("reward/env/") for name in tallied([first]))


def lines_of(groups: list[RolloutGroup], policy_logprobs: dict[str, np.ndarray] | None = None) -> list[dict]:
    lines = rollout_lines(groups, policy_logprobs or {}, lambda i: f"<{i}>")
    return [json.loads(encode_line(line)) for line in lines]


def test_one_line_contains_the_whole_rollout():
    turn = make_turn([3, 4], version=7, logprobs=[-0.123456789, -2.0])
    group = make_group(make_prompt(5, epoch=1), [0.25, 1.0], turn=turn)
    group.rollouts[0].advantage = -0.5
    group.rollouts[0].parts = {"style": 0.5}
    first, second = lines_of([group], {"letters/5/1/0/0": np.array([-0.125, -2.5])})
    assert set(first) == FIELDS
    assert first == {
        "rollout_id": "letters/5/1/0/0", "prompt_id": "letters/5", "group": "letters/5/1/0", "env": "letters",
        "status": "ok", "error": None, "drop_reason": None, "prompt": "[user] train 5", "completion": "ab",
        "reward": 0.25, "raw_reward": 0.25, "parts": {"style": 0.5}, "advantage": -0.5, "truncated": False,
        "prompt_tokens": 2, "spans": [[0, 2, 7]], "token_ids": [3, 4], "token_texts": ["<3>", "<4>"],
        "loss_mask": [1, 1], "sampler_logprobs": [-0.12346, -2.0], "policy_logprobs": [-0.125, -2.5],
    }  # fmt: skip
    assert second["rollout_id"] == "letters/5/1/0/1" and second["policy_logprobs"] is None


def test_dropped_and_failed_rollouts_have_lines_too():
    group = dropped(make_group(make_prompt(0), [1.0, None]), "too-few-scored")
    group.rollouts[1].error = "ValueError: no"
    group.rollouts[1].turns = []
    first, second = lines_of([group])
    assert first["drop_reason"] == second["drop_reason"] == "too-few-scored"
    assert second["status"] == "error" and second["error"] == "ValueError: no" and second["reward"] is None
    assert second["token_ids"] == second["token_texts"] == second["loss_mask"] == second["spans"] == []
    assert second["prompt_tokens"] == 0


def test_several_turns_in_one_line():
    """Between two answers are the tokens of the environment's reply: not in the loss, log-prob 0."""
    group = make_group(make_prompt(0), [1.0, 0.0])
    rollout = group.rollouts[0]
    first, second = make_turn([3, 4], version=1), make_turn([6], version=2, prompt_ids=[1, 2, 3, 4, 5])
    rollout.turns = [first, second]
    rollout.messages = [
        *rollout.prompt.messages,
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "c"},
    ]
    line = lines_of([group], {rollout.rollout_id: np.array([-1.0, -2.0, -3.0])})[0]
    assert line["token_ids"] == [3, 4, 5, 6] and line["loss_mask"] == [1, 1, 0, 1]
    assert line["sampler_logprobs"] == [-0.5, -0.5, 0.0, -0.5]
    assert line["policy_logprobs"] == [-1.0, -2.0, 0.0, -3.0]
    assert line["spans"] == [[0, 2, 1], [2, 3, 2]], "spans count sampled tokens"
    assert line["completion"] == "[assistant] ab\n\n[user] go on\n\n[assistant] c"


def test_conversation_with_tool_calls_is_stored_as_messages():
    """Values that are not JSON, which an environment may add, become text."""
    group = make_group(make_prompt(0), [1.0, 0.0])
    group.prompt.messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "Use add."}]})
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rollout = group.rollouts[0]
    rollout.turns = [make_turn([3, 4]), make_turn([6], prompt_ids=[1, 2, 3, 4, 5])]
    rollout.messages = [
        *group.prompt.messages,
        {"role": "assistant", "content": None, "tool_calls": [call, "?"], "reasoning_content": "one and"},
        {"role": "tool", "name": "add", "content": {1}},
        {"role": "assistant", "content": "c"},
    ]
    group.rollouts[1].messages = [*group.prompt.messages, {"role": "assistant", "content": "ab"}]
    first, second = lines_of([group])
    assert first["prompt_messages"][0] == {"role": "system", "content": '[{"type": "text", "text": "Use add."}]'}
    assert [message["role"] for message in first["prompt_messages"]] == ["system", "user"]
    assert first["messages"] == [
        {"role": "assistant", "content": "", "reasoning": "one and",
         "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]},
        {"role": "tool", "content": '"{1}"', "name": "add"},
        {"role": "assistant", "content": "c"},
    ]  # fmt: skip
    assert first["turn_tokens"] == [2, 1]
    assert set(second) == FIELDS, "the prompt is stored once, and a single completion is not stored as a conversation"
