"""The glossary: the meaning, unit and healthy range of every metric, and what to change outside that range.

Used by `shoal explain`, the report, the health rules and the documentation. Writing a metric that is not in the
glossary raises ValueError, so a misspelt name fails in a test instead of starting a second curve.
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
    change: str = ""  # what to do outside the healthy range

    @property
    def limits(self) -> dict[str, float]:
        """The healthy range as numbers, {"low": …} or {"high": …}; empty if it is described in words."""
        found = re.fullmatch(r"(below|above) ([\d.]+)", self.healthy)
        return {"high" if found[1] == "below" else "low": float(found[2])} if found else {}


LOWER_RATE = "lower train.learning_rate"
FASTER_REWARD = "raise orch.reward.workers, or speed up the reward function"
LESS_STALE = "lower orch.max_async_level or orch.weight_sync_interval"
HARDER_PROMPTS = "use harder prompts (arguments of orch.env), set orch.buffer.easy_fraction below 1, or stop the run"
EASIER_PROMPTS = (
    "use easier prompts, start from a `shoal sft` model, give partial rewards, "
    "or raise orch.rollouts_per_example or orch.sampling.temperature"
)
LONGER = "raise orch.sampling.max_tokens, or set orch.truncated to mask, zero or overlong"
WASTED = (
    "set orch.buffer.zero_variance_fraction below 1, which draws solved and hopeless prompts less often, or choose "
    "prompts of suitable difficulty"
)
FIX_REWARD = "read `error` in the rollouts (`shoal show RUN`) and fix the reward function"
MORE_ENTROPY = "lower train.learning_rate, raise orch.sampling.temperature, or add train.loss.kl.beta"


SUPERVISED_LOSSES = ("sft/loss", "dpo/loss")  # of runs that do not sample


def _catalogue(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


CATALOGUE = _catalogue(
    Metric(
        "reward/mean",
        "Mean reward of all scored rollouts, as used for training.",
        "reward",
        "rises over the run",
        "if it never rises, see group/mixed_frac; if it falls, lower train.learning_rate",
    ),
    Metric("reward/std", "Standard deviation of the rewards of the step.", "reward", "above 0"),
    Metric("reward/p10", "10th percentile of the rewards of the step.", "reward", "rises"),
    Metric("reward/p50", "Median of the rewards of the step.", "reward", "rises"),
    Metric("reward/p90", "90th percentile of the rewards of the step.", "reward", "rises"),
    Metric("reward/raw_mean", "Mean reward of all scored rollouts, as the environment returned it.", "reward", "rises"),
    Metric("reward/error_frac", "Share of rollouts whose reward function failed.", "fraction", "0", FIX_REWARD),
    Metric(
        "reward/timeout_frac",
        "Share of rollouts whose reward function had a timeout.",
        "fraction",
        "0",
        "raise orch.reward.timeout_s, or speed up the reward function",
    ),
    Metric(
        "group/mixed_frac",
        "Share of groups whose rewards differ; only these give a training signal.",
        "fraction",
        "above 0.2",
        "see group/all_good_frac (prompts too easy) and group/all_bad_frac (prompts too hard)",
    ),
    Metric(
        "group/all_good_frac",
        "Share of groups whose rewards are all equal and good (solved).",
        "fraction",
        "below 0.8",
        HARDER_PROMPTS,
    ),
    Metric(
        "group/all_bad_frac",
        "Share of groups whose rewards are all equal and bad (not solved).",
        "fraction",
        "below 0.8",
        EASIER_PROMPTS,
    ),
    Metric("group/flat", "Zero-variance groups dropped in this step: all their rewards are equal.", "groups"),
    Metric(
        "group/stale",
        "Groups dropped because the weights that sampled them are too old.",
        "groups",
        "near 0",
        LESS_STALE,
    ),
    Metric("batch/rollouts", "Rollouts finished for this step, including dropped ones.", "rollouts"),
    Metric(
        "batch/used",
        "Rollouts of this step that were used for training.",
        "rollouts",
        "near batch/rollouts",
        "the others were in zero-variance or stale groups: see group/mixed_frac and group/stale",
    ),
    Metric(
        "policy/loss",
        "The policy loss. Training follows its gradient; its value is not a measure of progress.",
        "loss",
        "near 0",
    ),
    Metric(
        "policy/entropy",
        "Mean entropy of the policy at the sampled tokens.",
        "nats",
        "falls slowly, not to 0",
        MORE_ENTROPY,
    ),
    Metric("policy/entropy_coef", "Weight of the entropy bonus in this step.", "1"),
    Metric("policy/gate", "Mean weight that vespo gives a token for the ratio of its rollout.", "ratio", "near 1"),
    Metric("teacher/missing_frac", "Share of rollouts without a hint that fits, with train.teacher.self.", "fraction"),
    Metric(
        "teacher/kl",
        "Mean of policy_logprobs - teacher_logprobs at the sampled tokens: an estimate of the KL to the teacher.",
        "nats",
        "falls",
        "raise train.teacher.tau or train.learning_rate",
    ),
    Metric(
        "policy/kl_ref",
        "Estimated KL divergence from the reference policy.",
        "nats",
        "below 0.2",
        "raise train.loss.kl.beta a little, or lower train.learning_rate",
    ),
    Metric(
        "policy/clip_frac",
        "Share of trained tokens whose probability ratio was clipped.",
        "fraction",
        "below 0.2",
        LOWER_RATE,
    ),
    Metric(
        "policy/ratio_mean",
        "Mean ratio of new to old token probability (policy_logprobs against old_logprobs).",
        "ratio",
        "near 1",
    ),
    Metric(
        "policy/ratio_max",
        "Largest ratio of new to old token probability in the step.",
        "ratio",
        "below 10",
        LOWER_RATE,
    ),
    Metric(
        "mismatch/k3",
        "Difference between the log-probs of sampler and trainer (k3 estimate of the KL divergence).",
        "nats",
        "below 0.01",
        f"{LESS_STALE}; or add train.loss.correction",
    ),
    Metric(
        "mismatch/ratio_mean",
        "Mean ratio of a token's probability under the trainer to that under the sampler.",
        "ratio",
        "near 1",
    ),
    Metric(
        "mismatch/ratio_max",
        "Largest ratio of a token's probability under the trainer to that under the sampler.",
        "ratio",
        "below 10",
        f"{LESS_STALE}; or add train.loss.correction",
    ),
    Metric(
        "correction/weight_mean", "Mean importance weight of train.loss.correction before the cap.", "ratio", "near 1"
    ),
    Metric(
        "correction/capped_mean", "Mean importance weight of train.loss.correction after the cap.", "ratio", "near 1"
    ),
    Metric(
        "correction/capped_frac",
        "Share of trained tokens whose importance weight was capped.",
        "fraction",
        "low",
        LESS_STALE,
    ),
    Metric("mask/token_frac", "Share of trained tokens masked individually by the loss.", "fraction", "below 0.1"),
    Metric("mask/sequence_frac", "Share of trained tokens masked with their whole rollout.", "fraction", "below 0.1"),
    Metric(
        "masked",
        "Share of trained tokens masked by the loss, in total.",
        "fraction",
        "below 0.5",
        "lower train.learning_rate, or raise train.loss.kl_tau",
    ),
    Metric(
        "optim/lr",
        "Learning rate of the step.",
        "1",
        "5e-7 to 5e-5 for full fine-tuning, ten times as much for LoRA",
        "set train.learning_rate",
    ),
    Metric("optim/grad_norm", "Gradient norm before clipping.", "1", "steady, without spikes", LOWER_RATE),
    Metric(
        "optim/skipped",
        "Optimizer steps skipped because the gradient was not finite.",
        "steps",
        "0",
        f"{LOWER_RATE}, or check for unbounded rewards",
    ),
    Metric(
        "batch/passed_over",
        "Prompts that orch.buffer skipped since the start of the run, because of the rewards of their earlier groups.",
        "prompts",
    ),
    Metric(
        "replay/frac",
        "Share of the trained rollouts that were sampled for earlier steps (orch.buffer.replay).",
        "fraction",
    ),
    Metric("replay/age", "Mean age of the replayed rollouts, in weight versions.", "versions"),
    Metric("tokens/prompt", "Prompt tokens of the step.", "tokens"),
    Metric("tokens/completion", "Completion tokens of the step.", "tokens"),
    Metric(
        "tokens/used_frac",
        "Share of the sampled completion tokens that were trained; the others belong to dropped groups.",
        "fraction",
        "above 0.5",
        WASTED,
    ),
    Metric(
        "tokens/computed",
        "Tokens in the packed rows; a prompt shared within a row counts once.",
        "tokens",
    ),
    Metric(
        "completion/length_mean",
        "Mean length of a completion.",
        "tokens",
        "well below max_tokens, no sudden changes",
        LONGER,
    ),
    Metric("completion/length_min", "Length of the shortest completion of the step.", "tokens", "above 0"),
    Metric("completion/length_max", "Length of the longest completion of the step.", "tokens"),
    Metric(
        "completion/truncated_frac", "Share of completions truncated at max_tokens.", "fraction", "below 0.5", LONGER
    ),
    Metric("staleness/mean", "Mean age of the trained tokens, in weight versions.", "versions", "", LESS_STALE),
    Metric("staleness/max", "Greatest age of a trained token, in weight versions.", "versions", "", LESS_STALE),
    Metric("time/step", "Wall time of the step.", "s"),
    Metric("time/rollout", "Wall time during which rollouts were generated.", "s"),
    Metric(
        "time/environment",
        "Wall time during which stateful environments worked; part of time/rollout.",
        "s",
        "",
        "make the environment faster, or lower orch.stateful.timeout_s",
    ),
    Metric(
        "time/environment_wait",
        "Wall time during which rollouts waited for an environment process; part of time/rollout.",
        "s",
        "",
        "raise orch.stateful.processes",
    ),
    Metric("time/reward", "Wall time during which rewards were computed.", "s", "", FASTER_REWARD),
    Metric("time/train", "Wall time of forward pass, backward pass and optimizer.", "s"),
    Metric("time/teacher", "Wall time in which the teacher scored the rollouts; part of time/train.", "s"),
    Metric("time/capture", "Wall time of capturing CUDA graphs; part of time/rollout and time/train.", "s"),
    Metric("time/sync", "Wall time of the weight transfer to the sampler.", "s", "a few percent of the step"),
    Metric("time/eval", "Wall time of held-out evaluation.", "s"),
    Metric("time/save", "Wall time of writing checkpoints.", "s"),
    Metric(
        "time/idle",
        "Wall time in which no phase was active.",
        "s",
        "a few percent of the step",
        "raise orch.max_async_level, or find in logs/ what the step waits for",
    ),
    Metric("throughput/rollout_tok_s", "Sampled completion tokens per second of rollout time.", "tokens/s"),
    Metric(
        "throughput/train_tok_s",
        "Tokens of the trained samples per second of training time; a shared prompt counts once per sample.",
        "tokens/s",
    ),
    Metric(
        "throughput/surplus_groups",
        "Groups that were started to replace zero-variance groups and then not needed. They are sampled again later.",
        "groups",
    ),
    Metric("noise/sigma", "Standard deviation of the noise added to the norm weights of the sampler.", "1"),
    Metric(
        "noise/applied",
        "Standard deviation of the noise that is left after rounding to the precision of the norm weights.",
        "1",
        "close to noise/sigma",
        "raise train.noise_scheduler.sigma_end, or set train.recipe to fp32: bf16 rounds small noise away",
    ),
    Metric("sft/loss", "Mean cross-entropy of the completion tokens.", "nats", "falls", LOWER_RATE),
    Metric(
        "dpo/loss",
        "Mean preference loss of the pairs of the step, plus loss.sft_weight times dpo/cross_entropy.",
        "loss",
        "falls from 0.69 (sigmoid)",
        LOWER_RATE,
    ),
    Metric("dpo/cross_entropy", "Mean cross-entropy of the tokens of the chosen completions.", "nats", "falls"),
    Metric(
        "dpo/accuracy",
        "Share of pairs in which the chosen completion has a higher implicit reward than the rejected one.",
        "fraction",
        "rises above 0.5",
        "check that the labels are right, or raise train.learning_rate",
    ),
    Metric("dpo/margin", "Mean of dpo/chosen_reward - dpo/rejected_reward.", "nats", "rises"),
    Metric(
        "dpo/chosen_reward",
        "Implicit reward of the chosen completions: loss.beta times the sum of policy_logprobs - reference_logprobs.",
        "nats",
        "rises or stays near 0",
        "if it falls far, lower train.learning_rate or set loss.sft_weight",
    ),
    Metric(
        "dpo/rejected_reward",
        "Implicit reward of the rejected completions: loss.beta times the sum of policy_logprobs - reference_logprobs.",
        "nats",
        "falls",
    ),
    Metric("dpo/chosen_logprobs", "Mean over the chosen completions of the sum of policy_logprobs.", "nats"),
    Metric("dpo/rejected_logprobs", "Mean over the rejected completions of the sum of policy_logprobs.", "nats"),
)

FAMILIES = _catalogue(
    Metric("eval/<env>/mean", "Mean held-out reward of an environment.", "reward", "rises"),
    Metric("eval/<env>/std", "Standard deviation of the held-out rewards of an environment.", "reward"),
    Metric("eval/<env>/length_mean", "Mean length of a held-out completion.", "tokens"),
    Metric(
        "eval/<env>/truncated_frac", "Share of held-out completions truncated at max_tokens.", "fraction", "", LONGER
    ),
    Metric("eval/<env>/error_frac", "Share of held-out rollouts without a reward.", "fraction", "0", FIX_REWARD),
    Metric(
        "eval/<env>/pass_at_k",
        "Share of held-out prompts with at least one completion of full reward.",
        "fraction",
        "rises",
    ),
    Metric("reward/part/<name>", "Mean of one named part of the reward, before weighting.", "reward"),
    Metric("reward/env/<env>", "Mean reward of one environment, if there are several.", "reward", "rises"),
    Metric(
        "batch/env/<env>",
        "Share of the prompts of the step that come from one environment, if there are several.",
        "fraction",
    ),
    Metric(
        "group/env/<env>",
        "Share of groups of one environment whose rewards differ, if there are several environments.",
        "fraction",
        "above 0.2",
    ),
    Metric("completion/env/<env>", "Mean completion length of one environment, if there are several.", "tokens"),
)

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}"
# The label of an environment may be any text without slashes; an id without Latin letters gives an empty label.
_ANY = {"<env>": r"[^/]{0,128}"}
_PATTERNS = [
    (re.compile(re.sub(r"<\w+>", lambda found: _ANY.get(found[0], _SEGMENT), name)), metric)
    for name, metric in FAMILIES.items()
]
_ORDER = {name: position for position, name in enumerate(CATALOGUE)}


def find_metric(name: str) -> Metric | None:
    """The glossary entry of a metric or of its family, such as eval/<env>/mean."""
    if name in CATALOGUE or name in FAMILIES:
        return CATALOGUE.get(name) or FAMILIES[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def require_metric(name: str) -> Metric:
    metric = find_metric(name)
    if metric is None:
        near = nearest_metrics(name)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown metric {name!r}{hint} (see shoal.watch.glossary)")
    return metric


def nearest_metrics(name: str) -> list[str]:
    """Similar names: those with the same first or last part, then those with a similar spelling."""
    known = [*CATALOGUE, *FAMILIES]
    same_word = [other for other in known if other.split("/")[-1] == name or other.split("/")[0] == name]
    return [*same_word, *difflib.get_close_matches(name, [other for other in known if other not in same_word], n=3)]


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics in the order of the glossary. ValueError if one of them is not in the glossary."""
    for name in metrics:
        require_metric(name)
    return sort_metrics(metrics)


def sort_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in sorted(metrics, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))}
