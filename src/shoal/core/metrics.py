"""Metrics of a step: the tally that reduces them, and statistics of its groups.

Used by the loop and the learner. `watch` checks the names against the glossary when it writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.collect import zero_variance_kind
from shoal.core.types import ZERO_VARIANCE, Rollout, RolloutGroup

# Sums and counts, for which 0 is a value. Other metrics are absent without data.
SUMMED = frozenset(
    {
        "batch/rollouts",
        "batch/used",
        "group/flat",
        "group/stale",
        "optim/skipped",
        "policy/loss",
        "tokens/completion",
        "tokens/computed",
        "tokens/prompt",
    }
)


class Tally:
    """Collects the metrics of a step. A metric without data is absent from the result."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean; with a count of 0, to a plain sum. (0, 0) is ignored unless the name is in SUMMED."""
        self._claim(name, self._sums)
        if count == 0 and total == 0 and name not in SUMMED:
            return
        seen_total, seen_count = self._sums.get(name, (0.0, 0.0))
        if name in self._sums and (count == 0) != (seen_count == 0):
            raise ValueError(f"{name} is added both with and without a count")
        self._sums[name] = (seen_total + float(total), seen_count + float(count))

    def add_all(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def mean(self, name: str, values: Iterable[float]) -> None:
        """Add values to a mean."""
        values = [float(value) for value in values]
        if values:
            self.add(name, sum(values), len(values))

    def max(self, name: str, value: float) -> None:
        self._claim(name, self._maxima)
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def value(self, name: str, value: float) -> None:
        """Set a value; a later one replaces it."""
        self._claim(name, self._values)
        self._values[name] = float(value)

    def values(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.value(name, value)

    def reduce(self) -> dict[str, float]:
        """Name → value."""
        sums = {name: total / count if count else total for name, (total, count) in self._sums.items()}
        return {**sums, **self._maxima, **self._values}

    def state(self) -> dict[str, Any]:
        """As plain data, for another process."""
        return {"sums": dict(self._sums), "maxima": dict(self._maxima), "values": dict(self._values)}

    def take(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the `state` of another process."""
        self.add_all({name: (total, count) for name, (total, count) in state["sums"].items()})
        for name, value in state["maxima"].items():
            self.max(name, value)
        self.values(state["values"])

    def _claim(self, name: str, kind: dict[str, Any]) -> None:
        if any(name in other for other in (self._sums, self._maxima, self._values) if other is not kind):
            raise ValueError(f"{name} is collected in two different ways")


def throughput(metrics: dict[str, float], trained_tokens: float | None = None) -> dict[str, float]:
    """throughput/* from the tokens and times of a step.

    `trained_tokens` counts a shared prompt once per sample; `tokens/computed` counts it once.
    """
    rates = {}
    if metrics.get("time/rollout") and "tokens/completion" in metrics:
        rates["throughput/rollout_tok_s"] = metrics["tokens/completion"] / metrics["time/rollout"]
    if metrics.get("time/train") and trained_tokens is not None:
        rates["throughput/train_tok_s"] = trained_tokens / metrics["time/train"]
    return rates


def tally_groups(tally: Tally, groups: Sequence[RolloutGroup], kept: Sequence[RolloutGroup], version: int) -> None:
    """Metrics over all groups that finished for a step, including dropped ones."""
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
    kinds = [zero_variance_kind(group) for group in groups]
    tally.mean("group/all_good_frac", [kind == "uniform-good" for kind in kinds])
    tally.mean("group/all_bad_frac", [kind == "uniform-bad" for kind in kinds])
    tally.mean("group/mixed_frac", [len(set(group.rewards)) > 1 for group in groups])
    tally.value("group/flat", sum(reason in ZERO_VARIANCE for reason in reasons))
    if "stale" in reasons:
        tally.value("group/stale", reasons.count("stale"))
    tally.value("batch/rollouts", len(rollouts))
    tally.value("batch/used", sum(len(group.rewards) for group in kept))
    _tally_lengths(tally, rollouts)
    sampled = sum(rollout.completion_tokens for rollout in rollouts)
    used = sum(rollout.completion_tokens for group in kept for rollout in group.rollouts if rollout.scored)
    tally.add("tokens/used_frac", used, sampled)
    ages = [version - rollout.oldest_version for group in kept for rollout in group.rollouts if rollout.turns]
    tally.mean("staleness/mean", ages)
    if ages:
        tally.max("staleness/max", max(ages))


def _tally_environments(tally: Tally, groups: Sequence[RolloutGroup]) -> None:
    """Metrics per environment if there are several."""
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
