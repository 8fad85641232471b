"""Names people bring: the same metrics under the names of TRL or verl, so that existing dashboards keep working.

`train.metric_names` chooses; only trackers see other names, metrics.jsonl never does. A metric without a counterpart
there keeps its own name, so nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Under Hugging Face's callbacks every training metric reaches a tracker with train/ in front.
_TRL = {
    "reward/mean": "train/reward",
    "reward/std": "train/reward_std",
    "policy/loss": "train/loss",
    "policy/entropy": "train/entropy",
    "policy/kl_ref": "train/kl",
    "policy/clip_frac": "train/clip_ratio/region_mean",
    "mismatch/ratio_mean": "train/sampling/importance_sampling_ratio/mean",
    "mismatch/ratio_max": "train/sampling/importance_sampling_ratio/max",
    "optim/lr": "train/learning_rate",
    "optim/grad_norm": "train/grad_norm",
    "completion/length_mean": "train/completions/mean_length",
    "completion/length_min": "train/completions/min_length",
    "completion/length_max": "train/completions/max_length",
    "completion/truncated_frac": "train/completions/clipped_ratio",
    "time/step": "train/step_time",
    "sft/loss": "train/loss",
}
_TRL_FAMILIES = (
    (re.compile(r"reward/part/(.+)"), r"train/rewards/\1/mean"),
    (re.compile(r"eval/([^/]+)/mean"), r"eval/\1_reward"),
    (re.compile(r"eval/([^/]+)/std"), r"eval/\1_reward_std"),
    (re.compile(r"eval/([^/]+)/length_mean"), r"eval/\1_completions/mean_length"),
    (re.compile(r"eval/([^/]+)/truncated_frac"), r"eval/\1_completions/clipped_ratio"),
)
_VERL = {
    "reward/mean": "critic/rewards/mean",
    "reward/raw_mean": "critic/score/mean",
    "policy/loss": "actor/pg_loss",
    "policy/entropy": "actor/entropy",
    "policy/kl_ref": "actor/kl_loss",
    "policy/clip_frac": "actor/pg_clipfrac",
    "mismatch/k3": "rollout_corr/k3_kl",
    "optim/lr": "actor/lr",
    "optim/grad_norm": "actor/grad_norm",
    "completion/length_mean": "response_length/mean",
    "completion/length_min": "response_length/min",
    "completion/length_max": "response_length/max",
    "completion/truncated_frac": "response_length/clip_ratio",
    "time/step": "timing_s/step",
    "time/rollout": "timing_s/gen",
    "time/reward": "timing_s/reward",
    "time/train": "timing_s/update_actor",
    "time/sync": "timing_s/update_weights",
    "time/eval": "timing_s/testing",
    "time/save": "timing_s/save_checkpoint",
    "throughput/train_tok_s": "perf/throughput",
}
_VERL_FAMILIES = (
    (re.compile(r"eval/([^/]+)/mean"), r"val-core/\1/reward/mean@1"),
    (re.compile(r"reward/part/(.+)"), r"critic/rewards/\1/mean"),
)
SCHEMES = {"native": ({}, ()), "trl": (_TRL, _TRL_FAMILIES), "verl": (_VERL, _VERL_FAMILIES)}


def rename(scheme: str, metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """The metrics of a step under the names of `scheme`, with the few values that only exist there."""
    if scheme == "native":
        return dict(metrics)
    renamed = {alias(scheme, name): value for name, value in metrics.items()}
    mixed = metrics.get("group/mixed_frac")
    if scheme == "trl":
        renamed["train/global_step"] = step
        if mixed is not None:
            renamed["train/frac_reward_zero_std"] = 1 - mixed
    else:
        renamed["training/global_step"] = step
    return renamed


def alias(scheme: str, name: str) -> str:
    names, families = SCHEMES[scheme]
    if name in names:
        return names[name]
    for pattern, replacement in families:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name
