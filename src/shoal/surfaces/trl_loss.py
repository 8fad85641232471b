"""The loss, the entropy bonus and the advantages of a `GRPOConfig`, translated to the schema. Called by trl.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.surfaces.names import Translation

ADVANTAGE_EPS = 1e-4
LEAST_RATE = 1e-4  # of vespo; TRL raises smaller values to it
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
}
_UNCLIPPED = ("cispo", "sapo", "vespo")
_STD = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
_ADAPTIVE = {
    "entropy_target": "target",
    "entropy_coef_delta": "delta",
    "entropy_coef_min": "coef_min",
    "entropy_coef_max": "coef_max",
}


def put_loss(to: Translation, fields: Mapping[str, Any], updates: int, processes: int) -> None:
    """`updates`: optimizer updates per step."""
    _loss(to, fields)
    _top_entropy(to, fields, updates)
    if fields["entropy_coef"] or fields["use_adaptive_entropy"]:
        _entropy_bonus(to, fields, updates, processes)


def _loss(to: Translation, fields: Mapping[str, Any]) -> None:
    kind, level = fields["loss_type"], fields["importance_sampling_level"]
    if kind not in _AGGREGATIONS:
        to.refuse("loss_type", f"{kind!r} is not supported", f"use one of {', '.join(_AGGREGATIONS)}")
        return
    if level not in ("token", "sequence"):
        to.refuse("importance_sampling_level", f"must be token or sequence, not {level!r}")
    sequence = level == "sequence"
    if sequence and kind in _UNCLIPPED:
        to.refuse("importance_sampling_level", f"sequence is not supported with loss_type {kind}", "use token")
    loss = kind if kind in _UNCLIPPED else "gspo" if sequence else "grpo"
    to.put("loss_type", "train.loss.type", loss)
    to.put("loss_type", "train.loss.aggregation", _AGGREGATIONS[kind])
    if kind == "bnpo":
        to.notices.append("loss_type: bnpo averages over the tokens of a whole update, in TRL of each micro-batch")
    _parameters(to, fields, loss)
    unbiased = bool(fields["use_bias_correction_kl"])
    if fields["beta"]:
        if sequence and unbiased:
            to.refuse("use_bias_correction_kl", "is not supported with importance_sampling_level sequence", "set False")
        to.put("beta", "train.loss.kl.beta", fields["beta"])
        to.put("use_bias_correction_kl", "train.loss.kl.estimator", "k3-unbiased" if unbiased else "k3")


def _parameters(to: Translation, fields: Mapping[str, Any], loss: str) -> None:
    """Put the parameters of the loss alone."""
    high = fields["epsilon"] if fields["epsilon_high"] is None else fields["epsilon_high"]
    if loss == "cispo":
        to.put("epsilon_high", "train.loss.ratio_high", high)
    elif loss == "sapo":
        to.put("sapo_temperature_pos", "train.loss.tau_pos", fields["sapo_temperature_pos"])
        to.put("sapo_temperature_neg", "train.loss.tau_neg", fields["sapo_temperature_neg"])
    elif loss == "vespo":
        for sign in ("pos", "neg"):
            rate = fields[f"vespo_lambda_{sign}"]
            to.put(f"vespo_k_{sign}", f"train.loss.k_{sign}", fields[f"vespo_k_{sign}"])
            rate = max(rate, LEAST_RATE) if isinstance(rate, int | float) else rate
            to.put(f"vespo_lambda_{sign}", f"train.loss.rate_{sign}", rate)
    else:
        to.put("epsilon", "train.loss.clip_low", fields["epsilon"])
        to.put("epsilon_high", "train.loss.clip_high", high)
    delta = fields["delta"]
    if delta is None:
        return
    if loss != "grpo":
        to.refuse("delta", f"is not supported with {'importance_sampling_level sequence' if loss == 'gspo' else loss}")
    elif isinstance(high, int | float) and delta < 1 + high:
        to.refuse("delta", f"is {delta}, below 1 + epsilon_high ({1 + high:g})", "raise it, or remove it")
    to.put("delta", "train.loss.dual_clip", delta)


def _top_entropy(to: Translation, fields: Mapping[str, Any], updates: int) -> None:
    if fields["top_entropy_quantile"] == 1.0:
        return
    to.put("top_entropy_quantile", "train.loss.entropy.top_fraction", fields["top_entropy_quantile"])
    _note_kept_ids(to, fields, "top_entropy_quantile")
    if fields["gradient_accumulation_steps"] != 1:
        to.notices.append(
            "top_entropy_quantile: the tokens are selected over a whole update, in TRL over each micro-batch"
        )
    if updates > 1:
        to.notices.append(
            "top_entropy_quantile: the entropies are those of the weights before the step, in TRL before each update"
        )


def _entropy_bonus(to: Translation, fields: Mapping[str, Any], updates: int, processes: int) -> None:
    name, key = ("use_adaptive_entropy", "target") if fields["use_adaptive_entropy"] else ("entropy_coef", "coef")
    aggregation = _AGGREGATIONS.get(fields["loss_type"])
    to.put("entropy_coef", "train.loss.entropy.coef", fields["entropy_coef"])
    if fields["top_entropy_quantile"] != 1.0:
        what = f"cannot be combined with {name}: the bonus would cover all tokens, in TRL only the selected ones"
        fix = "remove it, or use overrides=['train.loss.entropy.top_fraction=…'] to accept this"
        to.refuse("top_entropy_quantile", what, fix)
    if aggregation == "seq-mean-token-sum-norm":
        what = f"is not supported with {fields['loss_type']}, whose bonus is a sum over max_completion_length"
        to.refuse(name, what, f"use overrides=['train.loss.entropy.{key}=…'] to accept this")
    elif aggregation == "seq-mean-token-mean":
        to.notices.append(f"{name}: the mean entropy gives each completion the same weight, in TRL each token")
    elif fields["gradient_accumulation_steps"] != 1 or processes > 1:
        to.notices.append(f"{name}: the bonus is a mean over the tokens of an update, in TRL of each micro-batch")
    _note_kept_ids(to, fields, name)
    if fields["use_adaptive_entropy"]:
        _adaptive(to, fields, updates)


def _adaptive(to: Translation, fields: Mapping[str, Any], updates: int) -> None:
    for field, key in _ADAPTIVE.items():
        to.put(field, f"train.loss.entropy.{key}", fields[field])
    if fields["entropy_target"] is None:
        to.refuse("entropy_target", "must be a number, not None")
    coef, low, high = (fields[name] for name in ("entropy_coef", "entropy_coef_min", "entropy_coef_max"))
    change = fields["entropy_coef_delta"]
    numbers = all(isinstance(value, int | float) for value in (coef, low, high, change))
    if numbers and not low - change <= coef <= high:  # TRL would reach the range in several steps
        what = f"is {coef}, outside entropy_coef_min ({low}) and entropy_coef_max ({high})"
        to.refuse("entropy_coef", what, "set it between them")
    if updates > 1:
        to.notices.append(
            f"use_adaptive_entropy: the coefficient changes after a step of {updates} updates, in TRL after each update"
        )


def _note_kept_ids(to: Translation, fields: Mapping[str, Any], name: str) -> None:
    """The entropy of a policy whose sampling is truncated."""
    given = {**fields, **(fields["generation_kwargs"] or {})}
    if given["top_p"] != 1.0 or given["top_k"] not in (0, -1, None) or given["min_p"] not in (0, None):
        to.notices.append(f"{name}: the entropy covers the ids that top_p, top_k and min_p keep, in TRL all ids")


def put_advantage(to: Translation, fields: Mapping[str, Any]) -> None:
    how, scale = fields["multi_objective_aggregation"], fields["scale_rewards"]
    if how not in ("sum_then_normalize", "normalize_then_sum"):
        to.refuse("multi_objective_aggregation", f"must be sum_then_normalize or normalize_then_sum, not {how!r}")
    try:
        std = _STD[scale]
    except (KeyError, TypeError):
        to.refuse("scale_rewards", f"must be group, batch or none, not {scale!r}")
        return
    if how == "normalize_then_sum":
        if std != "group":
            to.notices.append("scale_rewards: has no effect with multi_objective_aggregation normalize_then_sum")
        to.put("scale_rewards", "orch.advantage", {"mean": "group", "std": "group", "eps": ADVANTAGE_EPS})
        to.put("multi_objective_aggregation", "orch.advantage.per_part", True)
        to.put("multi_objective_aggregation", "orch.advantage.rescale", True)
        return
    to.put("scale_rewards", "orch.advantage", {"mean": "group", "std": std})
    if std != "none":
        to.data["orch"]["advantage"]["eps"] = ADVANTAGE_EPS
    if std == "batch":
        to.data["orch"].pop("groups")  # kept anyway


def put_correction(to: Translation, fields: Mapping[str, Any]) -> None:
    """The correction for the log-probs of vLLM."""
    mode, low = fields["vllm_importance_sampling_mode"], fields["vllm_importance_sampling_clip_min"]
    high = fields["vllm_importance_sampling_cap"] or fields["vllm_importance_sampling_clip_max"]
    level, _, action = str(mode).partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        to.refuse("vllm_importance_sampling_mode", f"{mode!r} is not known")
        return
    if level == "sequence" and fields["loss_type"] == "vespo":
        what = f"{mode} is not supported with loss_type vespo, as in TRL"
        to.refuse("vllm_importance_sampling_mode", what, "use token_truncate or token_mask")
    elif level == "sequence":
        to.notices.append(
            f"vllm_importance_sampling_mode: {mode} is applied per token (as token_{action}), not to the product of "
            "the ratios of a completion"
        )
    to.put("vllm_importance_sampling_mode", "train.loss.correction.type", "tis" if action == "truncate" else "icepop")
    to.put("vllm_importance_sampling_clip_max", "train.loss.correction.cap", 1e9 if high is None else high)
    if action == "mask":
        to.put("vllm_importance_sampling_clip_min", "train.loss.correction.floor", low or 0.0)
    elif low is not None:
        to.refuse("vllm_importance_sampling_clip_min", "is only supported with token_mask", "remove it")
