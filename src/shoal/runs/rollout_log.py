"""Rollouts as records for the run directory, and as short lines for the console."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.batching import rollout_samples
from shoal.core.types import Rollout, RolloutGroup, Turn
from shoal.runs.run_dir import EVAL

TokenText = Callable[[int], str]


def rollout_lines(
    groups: Sequence[RolloutGroup], policy_logprobs: Mapping[str, np.ndarray], token_text: TokenText
) -> Iterator[dict[str, Any]]:
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            line = _line(group, rollout, policy_logprobs.get(rollout.rollout_id), token_text)
            yield line | _conversation(rollout, first=number == 0)


def completion_lines(groups: Sequence[RolloutGroup], number: int) -> list[str]:
    """The first completions of a step for the console: reward, prompt and completion."""
    rollouts = [rollout for group in groups for rollout in group.rollouts][:number]
    return [
        f"{_reward_text(rollout)}  {_last_user_message(rollout)} → {_completion_text(rollout)}" for rollout in rollouts
    ]


def _reward_text(rollout: Rollout) -> str:
    return f"reward {rollout.reward:.3g}" if rollout.reward is not None else rollout.status


def _last_user_message(rollout: Rollout) -> str:
    messages = [m for m in rollout.prompt.messages if m.get("role") == "user"] or rollout.prompt.messages
    return str(messages[-1].get("content") or "") if messages else ""


def _completion_text(rollout: Rollout) -> str:
    return _as_text(rollout.messages[len(rollout.prompt.messages) :], bare=len(rollout.turns) == 1)


def _line(
    group: RolloutGroup, rollout: Rollout, policy_logprobs: np.ndarray | None, token_text: TokenText
) -> dict[str, Any]:
    """Token arrays start after the first prompt; `prompt` and `prompt_tokens` hold its text and length.

    The names of held-out prompts start with `eval:`, because index 3 of both splits may be in one step.
    """
    split = EVAL if rollout.prompt.split == "eval" else ""
    ids, mask, sampler = _completion_tokens(rollout)
    if policy_logprobs is not None and len(policy_logprobs) != int(mask.sum()):
        # the environment's tokens were trained too
        ids, mask, sampler = _completion_tokens(rollout, context_weight=1.0)
    policy = np.zeros(len(ids))
    if policy_logprobs is not None and len(policy_logprobs) == int(mask.sum()):
        policy[mask] = policy_logprobs
    first = rollout.turns[0] if rollout.turns else None
    return {
        "rollout_id": split + rollout.rollout_id,
        "prompt_id": split + rollout.prompt.prompt_id,
        "group": split + rollout.prompt.group_id,
        "env": split + rollout.prompt.env,
        "status": rollout.status,
        "error": rollout.error,
        "drop_reason": group.drop_reason,
        "prompt": _as_text(rollout.prompt.messages),
        "completion": _completion_text(rollout),
        "reward": rollout.reward,
        "raw_reward": rollout.raw_reward,
        "parts": rollout.parts,
        "advantage": rollout.advantage,
        "truncated": rollout.truncated,
        "prompt_tokens": len(first.prompt_ids) if first else 0,
        "spans": _spans(rollout.turns),
        "token_ids": ids,
        "token_texts": [token_text(i) for i in ids],
        "loss_mask": mask.astype(int).tolist(),
        "sampler_logprobs": _rounded(sampler),
        "policy_logprobs": _rounded(policy) if policy_logprobs is not None else None,
        **_details(rollout),
    }


def _conversation(rollout: Rollout, first: bool) -> dict[str, Any]:
    """The messages, which only conversations have. Those of the prompt are stored once per group."""
    size, fields = len(rollout.prompt.messages), {}
    messages = rollout.messages[size:]
    if first and not _is_plain(rollout.prompt.messages, "user"):
        fields["prompt_messages"] = [_shown_message(message) for message in rollout.prompt.messages]
    if messages and not _is_plain(messages, "assistant"):
        fields["messages"] = [_shown_message(message) for message in messages]
    return fields


def _is_plain(messages: Sequence[Mapping[str, Any]], role: str) -> bool:
    return len(messages) == 1 and {**_shown_message(messages[0]), "content": ""} == {"role": role, "content": ""}


def _shown_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as text, whatever an environment stored in it."""
    shown: dict[str, Any] = {"role": str(message.get("role")), "content": _text(message.get("content"))}
    optional = {"name": message.get("name"), "reasoning": message.get("reasoning_content")}
    shown |= {key: _text(value) for key, value in optional.items() if value}
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    if calls:
        shown["tool_calls"] = [{key: _text(call.get(key)) for key in ("name", "arguments")} for call in calls]
    return shown


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _details(rollout: Rollout) -> dict[str, Any]:
    """Fields of rollouts that have more than one reward: rewards and kinds by turn, and advantages by turn and token.

    An advantage that is the same for all tokens of a turn is written once.
    """
    given: dict[str, Any] = {
        "turn_rewards": rollout.turn_rewards,
        "token_rewards": rollout.token_rewards,
        "kinds": rollout.kinds,
        "turn_tokens": [len(turn.completion.token_ids) for turn in rollout.turns],
    }
    if rollout.token_advantages is not None:
        given["token_advantages"] = [
            [round(v, 6) for v in (turn[:1] if len(set(turn)) == 1 else turn)] for turn in rollout.token_advantages
        ]
    conversation = not _is_plain(rollout.messages[len(rollout.prompt.messages) :], "assistant")
    rewarded = any(given[name] is not None for name in ("turn_rewards", "token_rewards"))
    detailed = len(rollout.turns) > 1 or rewarded or (conversation and bool(rollout.turns))
    return {name: value for name, value in given.items() if value is not None} if detailed else {}


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), 5).tolist()


def _completion_tokens(rollout: Rollout, context_weight: float = 0.0) -> tuple[list[int], np.ndarray, np.ndarray]:
    advantage = rollout.advantage or 0.0
    samples = rollout_samples(rollout, advantage=advantage, context_weight=context_weight) if rollout.turns else []
    if not samples:
        return [], np.zeros(0, dtype=bool), np.zeros(0)
    start = len(rollout.turns[0].prompt_ids)
    ids = np.concatenate([s.token_ids[start if n == 0 else 0 :] for n, s in enumerate(samples)]).tolist()
    mask = np.concatenate([s.loss_mask[start if n == 0 else 0 :] for n, s in enumerate(samples)])
    sampler = np.concatenate([s.sampler_logprobs[start if n == 0 else 0 :] for n, s in enumerate(samples)])
    return ids, mask, sampler


def _spans(turns: Sequence[Turn]) -> list[list[int]]:
    """[start, end, version] over all sampled tokens of the rollout."""
    spans, at = [], 0
    for turn in turns:
        spans += [[at + span.start, at + span.end, span.version] for span in turn.completion.spans]
        at += len(turn.completion.token_ids)
    return spans


def _as_text(messages: Sequence[Mapping[str, Any]], bare: bool = False) -> str:
    if bare and len(messages) == 1:
        return _whole(messages[0])
    return "\n\n".join(f"[{m.get('role')}] {_whole(m)}" for m in messages)


def _whole(message: Mapping[str, Any]) -> str:
    """The text of a message; that of an answer includes its reasoning and tool calls."""
    return str(message.get("text") or message.get("content") or "")
