"""Checks of `train.loss` and of the keys that depend on it. Called by rules.py."""

from __future__ import annotations

from shoal.config.fields import given
from shoal.config.orch import OrchConfig
from shoal.config.problems import Findings
from shoal.config.train import TrainConfig
from shoal.core.losses import BUILT_IN, Decoupled, Loss, Masked, Reinforce

SEQUENCE_RATIO_TOKENS = 64  # products of ratios collapse with length: above this, ratio_type sequence gives a notice


def check_loss(train: TrainConfig, findings: Findings, orch: OrchConfig | None = None) -> None:
    _check_correction(train, findings)
    _check_entropy(train.loss, findings)
    _check_teacher(train, findings, orch)
    _check_kl(train.loss, findings)
    _check_old(train, findings)
    _check_reference(train, findings)
    if not train.loss.uses_ratio and given(train.loss, "ratio_log_cap"):
        what = f"is not used by {train.loss.type}, which has no ratio to clamp"
        findings.error("train.loss.ratio_log_cap", what, "remove it")
    _advise_ratio_type(train.loss, findings, orch)


def check_replay(train: TrainConfig, orch: OrchConfig, remote: bool, findings: Findings) -> None:
    """`orch.buffer.replay` trains tokens of older policies, so the loss must weigh them by the ratio to the sampler.

    `remote`: the sampler's log-probs differ from the policy's by more than rounding, so `auto` recomputes old_logprobs.
    """
    if orch.buffer.replay is None:
        return
    if orch.rollouts_per_example == 1:
        what = "stores groups whose rewards differ, and orch.rollouts_per_example is 1"
        findings.error("orch.buffer.replay", what, "remove it, or sample several rollouts per prompt")
    elif orch.replayed_groups == 0:
        groups = orch.batch_size // orch.rollouts_per_example
        what = f"is less than half of one group, because a step has {groups} groups"
        findings.error("orch.buffer.replay.fraction", what, f"set it to {1 / groups:.2g} or more")
    if orch.weight_sync_interval == 0:
        what = "needs the age of a group, and orch.weight_sync_interval is 0"
        findings.error("orch.buffer.replay", what, "remove it, or set orch.weight_sync_interval to 1 or more")
    if not _weighs_sampler(train, remote):
        what = "has tokens of older policies, and the loss would train them as if the present policy had sampled them"
        hint = "set train.loss.correction.type to tis" if train.loss.takes_correction else "use another loss"
        findings.error("orch.buffer.replay", what, hint)


def _weighs_sampler(train: TrainConfig, remote: bool) -> bool:
    """Whether the loss has the ratio of the policy to the sampler: in a correction, in its own formula, or in the ratio
    to old_logprobs, if these are those of the sampler."""
    loss = train.loss
    if isinstance(loss, Reinforce):
        return loss.ratio == "on"
    if not loss.takes_correction or loss.correction.type != "none":
        return True
    several = train.ppo_epochs * train.minibatches > 1 and train.recipe != "fp32"
    forced = loss.needs_old or several or remote or (train.recipe == "fp8-hybrid" and not train.quantised)
    recomputes = forced if train.recompute_old == "auto" else train.recompute_old
    return loss.uses_ratio and not recomputes


def _check_correction(train: TrainConfig, findings: Findings) -> None:
    loss, kind = train.loss, train.loss.correction.type
    if kind == "none":
        return
    if not loss.takes_correction:
        takers = ", ".join(other.choice() for other in BUILT_IN if other.takes_correction)
        what = f"{loss.type} has no correction weight, so {kind} would have no effect"
        findings.error("train.loss.correction.type", what, f"remove it, or use one of {takers}")
    if train.recompute_old is False:
        what = "is false, so old_logprobs are sampler_logprobs and the correction would always be 1"
        findings.error("train.recompute_old", what, "set it to auto, or remove train.loss.correction")


def _check_teacher(train: TrainConfig, findings: Findings, orch: OrchConfig | None) -> None:
    teacher = train.teacher
    if teacher is None:
        return
    if len(teacher.sources) != 1:
        found = " and ".join(teacher.sources) or "no source"
        what = f"has {found}, and needs exactly one of model, adapter, url and self"
        findings.error("train.teacher", what, "set one of them")
    if teacher.tau == 0:
        findings.error("train.teacher.tau", "is 0, so the teacher would have no effect", "remove train.teacher")
    for name in given(teacher, "served_model", "api_key_var") if teacher.url is None else []:
        findings.error(f"train.teacher.{name}", "is only used with train.teacher.url", "remove it")
    if train.sharding == "fsdp" and (teacher.model or teacher.adapter):
        what = "fsdp shards the policy, and a teacher on the same devices would not be sharded"
        findings.error("train.sharding", what, "set it to none, or use train.teacher.url")
    temperature = orch.sampling.temperature if orch is not None else 1.0
    if teacher.url is not None and temperature != 1.0:
        what = "returns log-probs at temperature 1, but orch.sampling.temperature is different"
        findings.error("train.teacher.url", what, "set orch.sampling.temperature=1, or use a local teacher")


def _check_entropy(loss: Loss, findings: Findings) -> None:
    bonus = loss.entropy
    unused = given(bonus, "delta", "gain", "coef_min", "coef_max") if bonus.target is None else []
    if unused:
        what = "adapts the weight of the entropy bonus to a target, and there is none"
        findings.error(f"train.loss.entropy.{unused[0]}", what, "set train.loss.entropy.target, or remove it")
    if bonus.coef_min > bonus.coef_max:
        what = f"is {bonus.coef_min:g}, above coef_max ({bonus.coef_max:g})"
        findings.error("train.loss.entropy.coef_min", what, "swap the two")


def _check_kl(loss: Loss, findings: Findings) -> None:
    kl = loss.kl
    # A KL penalty in the reward is not a term of the loss, so it works with every loss.
    if not loss.takes_kl and kl.where == "loss" and given(kl, "beta", "estimator", "where"):
        takers = ", ".join(other.choice() for other in BUILT_IN if other.takes_kl)
        own = "; its own drift penalty is kl_tau" if "kl_tau" in loss.parameters() else ""
        what = f"{loss.type} has no KL term{own}"
        findings.error("train.loss.kl", what, f"remove it, set train.loss.kl.in to reward, or use one of {takers}")
    elif kl.in_loss and kl.estimator == "k1":
        what = "k1 has a zero-mean noise gradient when it is part of the loss"
        findings.error("train.loss.kl.estimator", what, "use k3, or set train.loss.kl.in to reward")
    elif kl.beta > 0 and kl.where == "reward" and "estimator" in kl.model_fields_set and kl.estimator != "k1":
        what = f"is {kl.estimator}, but the KL penalty in the reward always uses k1"
        findings.error("train.loss.kl.estimator", what, "remove it, or set train.loss.kl.in to loss")


def _check_old(train: TrainConfig, findings: Findings) -> None:
    if train.recompute_old is not False:
        return
    if isinstance(train.loss, Decoupled):
        what = "is false, so the importance weight between old policy and sampler of decoupled would always be 1"
        findings.error("train.recompute_old", what, "set it to auto, or use another loss")
    elif train.loss.needs_old:
        what = f"is false: in bf16, rounding in the sampler alone can exceed the narrow clip range of {train.loss.type}"
        findings.notice("train.recompute_old", what, "auto computes old_logprobs with a forward pass")


def check_adapter_off(train: TrainConfig, findings: Findings) -> None:
    if train.reference == "adapter-off" and not train.lora:
        findings.error("train.reference", "adapter-off needs train.lora: true", "use frozen, or enable LoRA")


def _check_reference(train: TrainConfig, findings: Findings) -> None:
    beta = train.loss.kl.beta
    check_adapter_off(train, findings)
    if train.reference in ("adapter-off", "frozen") and beta == 0:
        what = f"is {train.reference}, but train.loss.kl.beta is 0, so the reference would have no effect"
        findings.error("train.reference", what, "remove it, or set beta above 0")
    if train.reference == "none" and beta > 0:
        what = f"is none, but train.loss.kl.beta is {beta:g}"
        findings.error("train.reference", what, "remove it, or set beta to 0")


def _advise_ratio_type(loss: Loss, findings: Findings, orch: OrchConfig | None) -> None:
    if orch is None or not isinstance(loss, Masked) or loss.ratio_type != "sequence":
        return
    tokens = orch.sampling.max_tokens
    if tokens is None or tokens > SEQUENCE_RATIO_TOKENS:
        count = f"up to {tokens}" if tokens else "all"
        what = f"sequence multiplies the ratios of {count} tokens, and such products vanish or explode with length"
        findings.notice("train.loss.ratio_type", what, f"token is safer above {SEQUENCE_RATIO_TOKENS} tokens")
