"""The glossary: every metric Shoal reports, what it means, where it is healthy and what to change where it is not.

Feeds `shoal explain`, the report, the doctor's words and the documentation. A name outside it and its families is
refused by the tally, so a misspelt metric fails in a test instead of splitting a curve in two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    meaning: str
    unit: str
    healthy: str = ""
    change: str = ""  # what to do where it is not healthy
    summed: bool = False  # a sum or count over the step, so that 0 is data; a mean without data has nothing to say


LOWER_RATE = "lower train.learning_rate"
FASTER_REWARD = "raise orch.reward.workers, or make the reward function faster"
LESS_STALE = "lower orch.max_async_level or orch.weight_sync_interval"
HARDER_PROMPTS = "harder prompts (the arguments of orch.env), orch.buffer.easy_fraction below 1, or stop"
EASIER_PROMPTS = (
    "easier prompts, a warm start with `shoal sft`, a reward with steps in between, "
    "a larger orch.rollouts_per_example, or a higher orch.sampling.temperature"
)
LONGER = "raise orch.sampling.max_tokens, or set orch.truncated to mask, zero or overlong"
FIX_REWARD = "read `error` in the rollouts (`shoal show RUN`) and mend the reward function"
MORE_ENTROPY = "lower train.learning_rate, raise orch.sampling.temperature, or add train.loss.kl.beta"


def _catalogue(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


CATALOGUE = _catalogue(
    Metric(
        "reward/mean",
        "Mean reward as training sees it, over all scored rollouts.",
        "reward",
        "rises over the run",
        "flat from the start: look at group/mixed_frac; falling: lower train.learning_rate",
    ),
    Metric("reward/std", "Spread of the rewards within the step.", "reward", "above 0; 0 teaches nothing"),
    Metric("reward/p10", "A tenth of the rewards of the step lie below this.", "reward", "rises"),
    Metric("reward/p50", "Half of the rewards of the step lie below this.", "reward", "rises"),
    Metric("reward/p90", "Nine tenths of the rewards of the step lie below this.", "reward", "rises"),
    Metric("reward/raw_mean", "Mean reward as environments gave it, over all scored rollouts.", "reward", "rises"),
    Metric("reward/error_frac", "Share of rollouts whose reward function failed.", "fraction", "0", FIX_REWARD),
    Metric(
        "reward/timeout_frac",
        "Share of rollouts whose reward function ran out of time.",
        "fraction",
        "0",
        "raise orch.reward.timeout_s, or make the reward function faster",
    ),
    Metric(
        "group/mixed_frac",
        "Share of groups with both better and worse rollouts.",
        "fraction",
        "above 0.2",
        "look at group/all_good_frac (too easy) and group/all_bad_frac (too hard)",
    ),
    Metric(
        "group/all_good_frac",
        "Share of groups whose rollouts are all equally good.",
        "fraction",
        "below 0.8",
        HARDER_PROMPTS,
    ),
    Metric(
        "group/all_bad_frac",
        "Share of groups whose rollouts are all equally bad.",
        "fraction",
        "below 0.8",
        EASIER_PROMPTS,
    ),
    Metric("group/flat", "Groups set aside in this step because all their rewards are equal.", "groups", summed=True),
    Metric(
        "group/stale",
        "Groups set aside because the weights that drew them are too old.",
        "groups",
        "near 0",
        LESS_STALE,
        summed=True,
    ),
    Metric("batch/rollouts", "Rollouts that were finished for this step, discarded ones too.", "rollouts", summed=True),
    Metric(
        "batch/used",
        "Rollouts of this step that were trained on.",
        "rollouts",
        "near batch/rollouts",
        "the rest went with flat or stale groups: see group/mixed_frac and group/stale",
        summed=True,
    ),
    Metric(
        "policy/loss",
        "The policy loss; its size means little, its gradient is what counts.",
        "loss",
        "near 0",
        summed=True,
    ),
    Metric(
        "policy/entropy",
        "Mean entropy of the policy at the sampled tokens.",
        "nats",
        "falls slowly, not to 0",
        MORE_ENTROPY,
    ),
    Metric(
        "policy/kl_ref",
        "Estimated KL divergence from the reference policy.",
        "nats",
        "below 0.2 or so",
        "raise train.loss.kl.beta a little, or lower train.learning_rate",
    ),
    Metric("policy/clip_frac", "Share of trained tokens whose ratio was clipped.", "fraction", "below 0.2", LOWER_RATE),
    Metric("policy/ratio_mean", "Mean ratio of new to old probability over the trained tokens.", "ratio", "near 1"),
    Metric("policy/ratio_max", "Largest ratio of new to old probability in the step.", "ratio", "below 10", LOWER_RATE),
    Metric(
        "mismatch/k3",
        "How far the sampler's probabilities are from the trainer's.",
        "nats",
        "below 0.01",
        f"{LESS_STALE}; or add train.loss.correction",
    ),
    Metric("mismatch/ratio_mean", "Mean ratio of the trainer's to the sampler's probability.", "ratio", "near 1"),
    Metric(
        "mismatch/ratio_max",
        "Largest ratio of the trainer's to the sampler's probability.",
        "ratio",
        "below 10",
        f"{LESS_STALE}; or add train.loss.correction",
    ),
    Metric("correction/weight_mean", "Mean correction weight before it is capped.", "ratio", "near 1"),
    Metric("correction/capped_mean", "Mean correction weight after it is capped.", "ratio", "near 1"),
    Metric(
        "correction/capped_frac",
        "Share of trained tokens whose correction weight was capped.",
        "fraction",
        "low",
        LESS_STALE,
    ),
    Metric("mask/token_frac", "Share of trained tokens that the loss dropped one by one.", "fraction", "below 0.1"),
    Metric("mask/sequence_frac", "Share of trained tokens dropped with their whole rollout.", "fraction", "below 0.1"),
    Metric(
        "masked",
        "Share of trained tokens dropped in all.",
        "fraction",
        "below 0.5",
        "lower train.learning_rate, or raise train.loss.kl_tau",
    ),
    Metric(
        "optim/lr",
        "Learning rate of the step.",
        "1",
        "5e-7 to 5e-5 for all weights, ten times that for LoRA",
        "set train.learning_rate",
    ),
    Metric("optim/grad_norm", "Norm of the gradient before clipping.", "1", "steady, without spikes", LOWER_RATE),
    Metric(
        "optim/skipped",
        "Optimizer steps skipped because something was not finite.",
        "steps",
        "0",
        f"{LOWER_RATE}, or look for rewards without bounds",
        summed=True,
    ),
    Metric("tokens/prompt", "Prompt tokens of the step.", "tokens", summed=True),
    Metric("tokens/completion", "Completion tokens of the step.", "tokens", summed=True),
    Metric(
        "tokens/computed",
        "Tokens in the rows that were trained; a prompt shared in a row counts once.",
        "tokens",
        summed=True,
    ),
    Metric(
        "completion/length_mean",
        "Mean length of a completion.",
        "tokens",
        "well below max_tokens, no sudden change",
        LONGER,
    ),
    Metric("completion/length_min", "Length of the shortest completion of the step.", "tokens", "above 0"),
    Metric("completion/length_max", "Length of the longest completion of the step.", "tokens"),
    Metric("completion/truncated_frac", "Share of completions cut at max_tokens.", "fraction", "below 0.5", LONGER),
    Metric("staleness/mean", "Mean age of the trained tokens, in weight versions.", "versions", "", LESS_STALE),
    Metric("staleness/max", "Greatest age of a trained token, in weight versions.", "versions", "", LESS_STALE),
    Metric("time/step", "Wall time of the step.", "s"),
    Metric("time/rollout", "Wall time in which rollouts were being generated.", "s"),
    Metric("time/reward", "Wall time in which rewards were being computed.", "s", "", FASTER_REWARD),
    Metric("time/train", "Wall time of forward, backward and optimizer.", "s"),
    Metric("time/sync", "Wall time of moving weights to the sampler.", "s", "a few per cent of the step"),
    Metric("time/eval", "Wall time of held-out evaluation.", "s"),
    Metric("time/save", "Wall time of writing checkpoints.", "s"),
    Metric(
        "time/idle",
        "Wall time in which none of the phases was going on.",
        "s",
        "a few per cent of the step",
        "raise orch.max_async_level, or look at what the step waits for in logs/",
    ),
    Metric("throughput/rollout_tok_s", "Completion tokens per second of rollout time.", "tokens/s"),
    Metric(
        "throughput/train_tok_s",
        "Tokens of the trained samples per second of training time; a shared prompt counts in each of them.",
        "tokens/s",
    ),
    Metric("noise/sigma", "Standard deviation of the noise on the sampler's norm weights.", "1"),
    Metric("sft/loss", "Mean cross-entropy of the completion tokens.", "nats", "falls", LOWER_RATE),
)

FAMILIES = _catalogue(
    Metric("eval/<env>/mean", "Mean held-out reward of an environment.", "reward", "rises"),
    Metric("eval/<env>/std", "Spread of the held-out rewards of an environment.", "reward"),
    Metric("eval/<env>/length_mean", "Mean length of a held-out completion.", "tokens"),
    Metric("eval/<env>/truncated_frac", "Share of held-out completions cut at max_tokens.", "fraction", "", LONGER),
    Metric("eval/<env>/error_frac", "Share of held-out rollouts without a reward.", "fraction", "0", FIX_REWARD),
    Metric("eval/<env>/pass_at_k", "Share of held-out prompts with at least one full reward.", "fraction", "rises"),
    Metric("reward/part/<name>", "Mean of one named part of the reward, before its weight.", "reward"),
    Metric("reward/env/<env>", "Mean reward of one environment, where there are several.", "reward", "rises"),
    Metric(
        "group/env/<env>", "Share of mixed groups of one environment, where there are several.", "fraction", "above 0.2"
    ),
    Metric("completion/env/<env>", "Mean completion length of one environment, where there are several.", "tokens"),
)

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
_PATTERNS = [(re.compile(re.sub(r"<\w+>", lambda _: _SEGMENT, name)), metric) for name, metric in FAMILIES.items()]
_ORDER = {name: position for position, name in enumerate(CATALOGUE)}


def find_metric(name: str) -> Metric | None:
    """The catalogue entry of a metric, or of the family it belongs to; a family may also be named itself."""
    if name in CATALOGUE or name in FAMILIES:
        return CATALOGUE.get(name) or FAMILIES[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def require_metric(name: str) -> Metric:
    metric = find_metric(name)
    if metric is None:
        near = nearest_metrics(name)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown metric {name!r}{hint} (the catalogue is in shoal.observability.catalogue)")
    return metric


def nearest_metrics(name: str) -> list[str]:
    """Names a person may have meant: the same last word first, then similar spelling."""
    known = [*CATALOGUE, *FAMILIES]
    same_word = [other for other in known if other.split("/")[-1] == name or other.split("/")[0] == name]
    return [*same_word, *difflib.get_close_matches(name, [other for other in known if other not in same_word], n=3)]


def sort_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in sorted(metrics, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))}
