"""Every metric Shoal reports, with its meaning and healthy range, and the tally that reduces them once a step.

The catalogue feeds the documentation, the report and the console. A name outside it and its families is refused, so a
misspelt metric fails in a test instead of splitting a curve in two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    meaning: str
    unit: str
    healthy: str = ""
    summed: bool = False  # a sum or count over the step, so that 0 is data; a mean without data has nothing to say


def _catalogue(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


CATALOGUE = _catalogue(
    Metric(
        "reward/mean",
        "Mean reward as training sees it, over all scored rollouts.",
        "reward",
        "rises over the run",
    ),
    Metric("reward/std", "Spread of the rewards within the step.", "reward", "above 0; 0 teaches nothing"),
    Metric("reward/raw_mean", "Mean reward as environments gave it, over all scored rollouts.", "reward", "rises"),
    Metric("reward/error_frac", "Share of rollouts whose reward function failed.", "fraction", "0"),
    Metric("reward/timeout_frac", "Share of rollouts whose reward function ran out of time.", "fraction", "0"),
    Metric("group/mixed_frac", "Share of groups with both better and worse rollouts.", "fraction", "above 0.2"),
    Metric("group/all_good_frac", "Share of groups whose rollouts are all equally good.", "fraction", "below 0.8"),
    Metric("group/all_bad_frac", "Share of groups whose rollouts are all equally bad.", "fraction", "below 0.8"),
    Metric("group/flat", "Groups set aside in this step because all their rewards are equal.", "groups", summed=True),
    Metric(
        "group/stale",
        "Groups set aside because the weights that drew them are too old.",
        "groups",
        "near 0",
        summed=True,
    ),
    Metric("batch/rollouts", "Rollouts that were finished for this step, discarded ones too.", "rollouts", summed=True),
    Metric("batch/used", "Rollouts of this step that were trained on.", "rollouts", "near batch/rollouts", summed=True),
    Metric(
        "policy/loss",
        "The policy loss; its size means little, its gradient is what counts.",
        "loss",
        "near 0",
        summed=True,
    ),
    Metric("policy/entropy", "Mean entropy of the policy at the sampled tokens.", "nats", "falls slowly, not to 0"),
    Metric("policy/kl_ref", "Estimated KL divergence from the reference policy.", "nats", "below 0.1 or so"),
    Metric("policy/clip_frac", "Share of trained tokens whose ratio was clipped.", "fraction", "below 0.2"),
    Metric("policy/ratio_mean", "Mean ratio of new to old probability over the trained tokens.", "ratio", "near 1"),
    Metric("policy/ratio_max", "Largest ratio of new to old probability in the step.", "ratio", "below 10"),
    Metric("mismatch/k3", "How far the sampler's probabilities are from the trainer's.", "nats", "below 0.01"),
    Metric("mismatch/ratio_mean", "Mean ratio of the trainer's to the sampler's probability.", "ratio", "near 1"),
    Metric("mismatch/ratio_max", "Largest ratio of the trainer's to the sampler's probability.", "ratio", "below 10"),
    Metric("correction/weight_mean", "Mean correction weight before it is capped.", "ratio", "near 1"),
    Metric("correction/weight_max", "Largest correction weight before it is capped.", "ratio", "below 10"),
    Metric("correction/capped_mean", "Mean correction weight after it is capped.", "ratio", "near 1"),
    Metric("correction/capped_frac", "Share of trained tokens whose correction weight was capped.", "fraction", "low"),
    Metric("mask/token_frac", "Share of trained tokens that the loss dropped one by one.", "fraction", "below 0.1"),
    Metric("mask/sequence_frac", "Share of trained tokens dropped with their whole rollout.", "fraction", "below 0.1"),
    Metric("masked", "Share of trained tokens dropped in all.", "fraction", "below 0.5"),
    Metric("optim/lr", "Learning rate of the step.", "1"),
    Metric("optim/grad_norm", "Norm of the gradient before clipping.", "1", "steady, without spikes"),
    Metric("optim/skipped", "Optimizer steps skipped because something was not finite.", "steps", "0", summed=True),
    Metric("tokens/prompt", "Prompt tokens of the step.", "tokens", summed=True),
    Metric("tokens/completion", "Completion tokens of the step.", "tokens", summed=True),
    Metric(
        "tokens/computed",
        "Tokens in the rows that were trained; a prompt shared in a row counts once.",
        "tokens",
        summed=True,
    ),
    Metric("completion/length_mean", "Mean length of a completion.", "tokens", "well below max_tokens"),
    Metric("completion/truncated_frac", "Share of completions cut at max_tokens.", "fraction", "below 0.5"),
    Metric("staleness/mean", "Mean age of the trained tokens, in weight versions.", "versions"),
    Metric("staleness/max", "Greatest age of a trained token, in weight versions.", "versions"),
    Metric("time/step", "Wall time of the step.", "s"),
    Metric("time/rollout", "Wall time in which rollouts were being generated.", "s"),
    Metric("time/reward", "Wall time in which rewards were being computed.", "s"),
    Metric("time/train", "Wall time of forward, backward and optimizer.", "s"),
    Metric("time/sync", "Wall time of moving weights to the sampler.", "s", "a few per cent of the step"),
    Metric("time/eval", "Wall time of held-out evaluation.", "s"),
    Metric("time/save", "Wall time of writing checkpoints.", "s"),
    Metric("time/idle", "Wall time in which none of the phases was going on.", "s", "a few per cent of the step"),
    Metric("throughput/rollout_tok_s", "Completion tokens per second of rollout time.", "tokens/s"),
    Metric(
        "throughput/train_tok_s",
        "Tokens of the trained samples per second of training time; a shared prompt counts in each of them.",
        "tokens/s",
    ),
    Metric("noise/sigma", "Standard deviation of the noise on the sampler's norm weights.", "1"),
    Metric("sft/loss", "Mean cross-entropy of the completion tokens.", "nats", "falls"),
    Metric("sft/accuracy", "Share of completion tokens the model ranks first.", "fraction", "rises"),
)

FAMILIES = _catalogue(
    Metric("eval/<env>/mean", "Mean held-out reward of an environment.", "reward", "rises"),
    Metric("eval/<env>/std", "Spread of the held-out rewards of an environment.", "reward"),
    Metric("eval/<env>/best", "Best held-out mean so far.", "reward", "rises"),
    Metric("eval/<env>/length_mean", "Mean length of a held-out completion.", "tokens"),
    Metric("eval/<env>/truncated_frac", "Share of held-out completions cut at max_tokens.", "fraction"),
    Metric("eval/<env>/error_frac", "Share of held-out rollouts without a reward.", "fraction", "0"),
    Metric("eval/<env>/pass_at_k", "Share of held-out prompts with at least one full reward.", "fraction", "rises"),
    Metric("reward/part/<name>", "Mean of one named part of the reward, before its weight.", "reward"),
    Metric("reward/env/<env>", "Mean reward of one environment.", "reward", "rises"),
    Metric("custom/<name>", "Reported by code of the user's own.", "", summed=True),
)

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
_PATTERNS = [(re.compile(re.sub(r"<\w+>", lambda _: _SEGMENT, name)), metric) for name, metric in FAMILIES.items()]
_ORDER = {name: position for position, name in enumerate(CATALOGUE)}


def find_metric(name: str) -> Metric | None:
    """The catalogue entry of a metric, or of the family it belongs to."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def require_metric(name: str) -> Metric:
    metric = find_metric(name)
    if metric is None:
        near = difflib.get_close_matches(name, CATALOGUE, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown metric {name!r}{hint} (the catalogue is in shoal.observability.metrics)")
    return metric


class Tally:
    """Collects what happened during a step and reduces it once. What got no data is absent from the result."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean. A count of 0 says that the totals are summed as they are; 0 of 0 is no data for a mean."""
        metric = self._claim(name, self._sums)
        if count == 0 and total == 0 and not metric.summed:
            return
        seen_total, seen_count = self._sums.get(name, (0.0, 0.0))
        if name in self._sums and (count == 0) != (seen_count == 0):
            raise ValueError(f"{name} is added once with a count and once without one")
        self._sums[name] = (seen_total + float(total), seen_count + float(count))

    def add_all(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def mean(self, name: str, values: Iterable[float]) -> None:
        """Add values to a mean; no values, no change."""
        values = [float(value) for value in values]
        if values:
            self.add(name, sum(values), len(values))

    def max(self, name: str, value: float) -> None:
        self._claim(name, self._maxima)
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def value(self, name: str, value: float) -> None:
        """Set a value; the last one counts."""
        self._claim(name, self._values)
        self._values[name] = float(value)

    def values(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.value(name, value)

    def reduce(self) -> dict[str, float]:
        """Name → value, in the order of the catalogue."""
        sums = {name: total / count if count else total for name, (total, count) in self._sums.items()}
        return sort_metrics({**sums, **self._maxima, **self._values})

    def _claim(self, name: str, kind: dict[str, Any]) -> Metric:
        metric = require_metric(name)
        if any(name in other for other in (self._sums, self._maxima, self._values) if other is not kind):
            raise ValueError(f"{name} is collected in two different ways")
        return metric


def sort_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in sorted(metrics, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))}
