"""What a step leaves behind about its rollouts: metrics of groups and rewards, and one line a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.batching.samples import rollout_samples
from shoal.observability.metrics import Tally
from shoal.orchestrator.collect import uniform_kind
from shoal.types import Rollout, RolloutGroup, Turn

TokenText = Callable[[int], str]


def tally_groups(tally: Tally, groups: Sequence[RolloutGroup], kept: Sequence[RolloutGroup], version: int) -> None:
    """Metrics over every group that finished for this step, discarded ones too."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return
    scored = [rollout for rollout in rollouts if rollout.scored]
    rewards = [float(rollout.reward) for rollout in scored if rollout.reward is not None]
    tally.mean("reward/mean", rewards)
    if len(rewards) > 1:
        tally.value("reward/std", float(np.std(rewards, ddof=1)))
        for share in (10, 50, 90):
            tally.value(f"reward/p{share}", float(np.percentile(rewards, share)))
    tally.mean("reward/raw_mean", [r.raw_reward for r in scored if r.raw_reward is not None])
    tally.mean("reward/error_frac", [r.status == "error" for r in rollouts])
    tally.mean("reward/timeout_frac", [r.status == "timeout" for r in rollouts])
    for name in sorted({name for rollout in scored for name in rollout.parts}):
        tally.mean(f"reward/part/{name}", [r.parts[name] for r in scored if name in r.parts])
    _tally_environments(tally, groups)
    reasons = [group.drop_reason for group in groups]
    kinds = [uniform_kind(group) if len(group.rewards) > 1 else None for group in groups]
    tally.mean("group/all_good_frac", [kind == "uniform-good" for kind in kinds])
    tally.mean("group/all_bad_frac", [kind == "uniform-bad" for kind in kinds])
    tally.mean("group/mixed_frac", [len(set(group.rewards)) > 1 for group in groups])
    tally.value("group/flat", sum(reason in ("uniform-good", "uniform-bad") for reason in reasons))
    if "stale" in reasons:
        tally.value("group/stale", reasons.count("stale"))
    tally.value("batch/rollouts", len(rollouts))
    tally.value("batch/used", sum(len(group.rewards) for group in kept))
    _tally_lengths(tally, rollouts)
    ages = [version - rollout.oldest_version for group in kept for rollout in group.rollouts if rollout.turns]
    tally.mean("staleness/mean", ages)
    if ages:
        tally.max("staleness/max", max(ages))


def _tally_environments(tally: Tally, groups: Sequence[RolloutGroup]) -> None:
    """One series an environment, where there are several."""
    names = sorted({group.prompt.env for group in groups})
    for name in names if len(names) > 1 else []:
        mine = [group for group in groups if group.prompt.env == name]
        drawn = [rollout for group in mine for rollout in group.rollouts if rollout.turns]
        tally.mean(f"reward/env/{name}", [reward for group in mine for reward in group.rewards])
        tally.mean(f"group/env/{name}", [len(set(group.rewards)) > 1 for group in mine])
        tally.mean(f"completion/env/{name}", [rollout.completion_tokens for rollout in drawn])


def _tally_lengths(tally: Tally, rollouts: Sequence[Rollout]) -> None:
    drawn = [rollout for rollout in rollouts if rollout.turns]
    tally.value("tokens/prompt", sum(len(rollout.turns[0].prompt_ids) for rollout in drawn))
    tally.value("tokens/completion", sum(rollout.completion_tokens for rollout in drawn))
    lengths = [rollout.completion_tokens for rollout in drawn]
    tally.mean("completion/length_mean", lengths)
    if lengths:
        tally.values({"completion/length_min": min(lengths), "completion/length_max": max(lengths)})
    tally.mean("completion/truncated_frac", [rollout.truncated for rollout in drawn])


def rollout_lines(
    groups: Sequence[RolloutGroup], policy_logprobs: Mapping[str, np.ndarray], token_text: TokenText
) -> Iterator[dict[str, Any]]:
    for group in groups:
        for rollout in group.rollouts:
            yield _line(group, rollout, policy_logprobs.get(rollout.rollout_id), token_text)


def completion_lines(groups: Sequence[RolloutGroup], number: int) -> list[str]:
    """The first completions of a step for the console: reward, then prompt and answer."""
    rollouts = [rollout for group in groups for rollout in group.rollouts][:number]
    return [f"{_reward_text(rollout)}  {_last_asked(rollout)} → {_answer(rollout)}" for rollout in rollouts]


def _reward_text(rollout: Rollout) -> str:
    return f"reward {rollout.reward:.3g}" if rollout.reward is not None else rollout.status


def _last_asked(rollout: Rollout) -> str:
    asked = [m for m in rollout.prompt.messages if m.get("role") == "user"] or rollout.prompt.messages
    return str(asked[-1].get("content") or "") if asked else ""


def _answer(rollout: Rollout) -> str:
    return _as_text(rollout.messages[len(rollout.prompt.messages) :], bare=len(rollout.turns) == 1)


def _line(
    group: RolloutGroup, rollout: Rollout, policy_logprobs: np.ndarray | None, token_text: TokenText
) -> dict[str, Any]:
    """Token arrays start after the first prompt, whose text and length stand beside them."""
    ids, mask, sampler = _answer_tokens(rollout)
    policy = np.zeros(len(ids))
    if policy_logprobs is not None and len(policy_logprobs) == int(mask.sum()):
        policy[mask] = policy_logprobs
    first = rollout.turns[0] if rollout.turns else None
    return {
        "rollout_id": rollout.rollout_id,
        "prompt_id": rollout.prompt.prompt_id,
        "group": rollout.prompt.group_id,
        "env": rollout.prompt.env,
        "status": rollout.status,
        "error": rollout.error,
        "drop_reason": group.drop_reason,
        "prompt": _as_text(rollout.prompt.messages),
        "completion": _answer(rollout),
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
    }


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), 5).tolist()


def _answer_tokens(rollout: Rollout) -> tuple[list[int], np.ndarray, np.ndarray]:
    samples = rollout_samples(rollout, advantage=rollout.advantage or 0.0) if rollout.turns else []
    if not samples:
        return [], np.zeros(0, dtype=bool), np.zeros(0)
    start = len(rollout.turns[0].prompt_ids)
    ids = np.concatenate([s.token_ids[start if n == 0 else 0 :] for n, s in enumerate(samples)]).tolist()
    mask = np.concatenate([s.loss_mask[start if n == 0 else 0 :] for n, s in enumerate(samples)])
    sampler = np.concatenate([s.sampler_logprobs[start if n == 0 else 0 :] for n, s in enumerate(samples)])
    return ids, mask, sampler


def _spans(turns: Sequence[Turn]) -> list[list[int]]:
    """[start, end, version] over the sampled tokens of the whole rollout."""
    spans, at = [], 0
    for turn in turns:
        spans += [[at + span.start, at + span.end, span.version] for span in turn.completion.spans]
        at += len(turn.completion.token_ids)
    return spans


def _as_text(messages: Sequence[Mapping[str, Any]], bare: bool = False) -> str:
    if bare and len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"[{m.get('role')}] {m.get('content') or ''}" for m in messages)
