"""Rules of the loss: knobs it does not use, corrections and KL where there is none. Called by checks.py only."""

from __future__ import annotations

import re

from shoal.config.base import USER_CODE_PATTERN, given
from shoal.config.catalogue import CORRECTION_CATALOGUE, LOSS_CATALOGUE, LossSpec
from shoal.config.fields import nearest
from shoal.config.loss import LossConfig
from shoal.config.problems import Findings, show
from shoal.config.schema import OrchConfig, TrainConfig

SEQUENCE_RATIO_TOKENS = 64


def check_loss(train: TrainConfig, findings: Findings, orch: OrchConfig | None = None) -> None:
    loss = train.loss
    if loss.custom:
        _check_custom(loss, findings)
    elif loss.type not in LOSS_CATALOGUE:
        near = nearest(loss.type, list(LOSS_CATALOGUE))
        known = ", ".join(LOSS_CATALOGUE)
        fix = f"did you mean `{near}`? known: {known}" if near else f"known: {known}, or module:function"
        findings.error("train.loss.type", f"there is no loss {show(loss.type)}", fix)
    else:
        spec = LOSS_CATALOGUE[loss.type]
        _check_parameters(loss, spec, findings)
        _check_correction(train, spec, findings)
        _check_kl(train, spec, findings)
        _check_old(train, spec, findings)
        if not spec.uses_ratio and given(loss, "ratio_log_cap"):
            findings.error(
                "train.loss.ratio_log_cap", f"is not used by {spec.name}, which clamps no ratio", "remove it"
            )
        _advise_ratio_type(loss, findings, orch)
    _check_reference(train, findings)


def _check_custom(loss: LossConfig, findings: Findings) -> None:
    if not re.match(USER_CODE_PATTERN, loss.type):
        what = f"{show(loss.type)} is not module:function"
        findings.error("train.loss.type", what, "write it as my_package.losses:my_loss")
    for name in loss.given_parameters():
        what = f"is a parameter of built-in losses, not of {show(loss.type)}"
        findings.error(f"train.loss.{name}", what, "put the arguments of your own loss under train.loss.args")
    if loss.correction.type != "none":
        what = f"a loss of your own gets no correction weight, so {loss.correction.type} would do nothing"
        findings.error("train.loss.correction.type", what, "remove it, and weigh by the log-probs the loss is given")


def _check_parameters(loss: LossConfig, spec: LossSpec, findings: Findings) -> None:
    if loss.args:
        findings.error("train.loss.args", f"is for module:function losses, not for {loss.type}", "remove it")
    own = loss.given_parameters()
    for name, reason in spec.problems(own).items():
        what = f"{reason} ({name} is {show(own.get(name))})"
        findings.error(f"train.loss.{name}", what, _parameter_fix(name, reason, loss.type, spec))


def _parameter_fix(name: str, reason: str, loss_type: str, spec: LossSpec) -> str:
    if not reason.startswith("is not used by"):
        return (
            f"{loss_type} takes {', '.join(f'{p.name} {p.range_text}' for p in spec.params if p.name == name)}".rstrip()
        )
    near = nearest(name, [param.name for param in spec.params])
    users = [other.name for other in dict.fromkeys(LOSS_CATALOGUE.values()) if other.param(name) is not None]
    own = ", ".join(param.name for param in spec.params)
    hint = f"nearest is `{near}`; " if near else ""
    return f"{hint}{loss_type} takes {own}; {name} is used by {', '.join(users)}"


def _check_correction(train: TrainConfig, spec: LossSpec, findings: Findings) -> None:
    correction = train.loss.correction
    own = correction.given_parameters()
    if correction.type == "none":
        for name in own:
            findings.error(
                f"train.loss.correction.{name}",
                "is not used without a correction",
                "set correction.type to tis or icepop",
            )
        return
    if not spec.takes_correction:
        takers = [other.name for other in dict.fromkeys(LOSS_CATALOGUE.values()) if other.takes_correction]
        what = f"{spec.name} has no correction weight, so {correction.type} would do nothing"
        findings.error("train.loss.correction.type", what, f"remove it, or use one of {', '.join(takers)}")
    for name, reason in CORRECTION_CATALOGUE[correction.type].problems(own).items():
        what = f"{reason} ({name} is {show(own[name])})"
        takes = ", ".join(param.name for param in CORRECTION_CATALOGUE[correction.type].params)
        findings.error(f"train.loss.correction.{name}", what, f"{correction.type} takes {takes}")
    if train.recompute_old is False:
        what = "is false, so old log-probs are the sampler's and the correction would always be 1"
        findings.error("train.recompute_old", what, "leave it at auto, or remove train.loss.correction")


def _check_kl(train: TrainConfig, spec: LossSpec, findings: Findings) -> None:
    kl = train.loss.kl
    # Folded into the reward it is no term of the loss, so every loss can have it.
    if not spec.takes_kl and kl.where == "loss" and given(kl, "beta", "estimator", "where"):
        takers = ", ".join(other.name for other in dict.fromkeys(LOSS_CATALOGUE.values()) if other.takes_kl)
        own = "; its own drift penalty is kl_tau" if spec.param("kl_tau") else ""
        findings.error(
            "train.loss.kl", f"{spec.name} has no KL term{own}", f"remove it, set in: reward, or use one of {takers}"
        )
        return
    if kl.beta == 0:
        return
    if kl.where == "loss" and kl.estimator == "k1":
        what = "k1 as a loss has a gradient of zero-mean noise"
        findings.error("train.loss.kl.estimator", what, "use k3, or set train.loss.kl.in to reward")
    if kl.where == "reward" and "estimator" in kl.model_fields_set and kl.estimator != "k1":
        what = f"is {kl.estimator}, but the KL folded into the reward is k1"
        findings.error("train.loss.kl.estimator", what, "leave it out, or set train.loss.kl.in to loss")


def _check_old(train: TrainConfig, spec: LossSpec, findings: Findings) -> None:
    if train.recompute_old is not False:
        return
    if spec.name == "decoupled":
        what = "is false, but decoupled weighs by the gap between old policy and sampler, which would always be 1"
        findings.error("train.recompute_old", what, "leave it at auto, or use another loss")
    elif spec.needs_old:
        what = f"is false: in bf16 the sampler's rounding alone can push sequences out of {spec.name}'s narrow clip"
        findings.notice("train.recompute_old", what, "auto takes a forward instead")


def _check_reference(train: TrainConfig, findings: Findings) -> None:
    if train.reference == "adapter-off" and not train.lora:
        findings.error("train.reference", "adapter-off needs train.lora: true", "use frozen, or turn LoRA on")
    if train.reference in ("adapter-off", "frozen") and train.loss.kl.beta == 0:
        what = f"is {train.reference}, but without train.loss.kl.beta nothing is compared with a reference"
        findings.error("train.reference", what, "leave it out, or set beta above 0")
    if train.reference == "none" and train.loss.kl.beta > 0:
        what = f"is none, but train.loss.kl.beta is {train.loss.kl.beta:g}"
        findings.error("train.reference", what, "leave it out, or set beta to 0")


def _advise_ratio_type(loss: LossConfig, findings: Findings, orch: OrchConfig | None) -> None:
    if loss.ratio_type != "sequence" or orch is None:
        return
    tokens = orch.sampling.max_tokens
    if tokens is None or tokens > SEQUENCE_RATIO_TOKENS:
        count = f"up to {tokens}" if tokens else "all"
        what = f"sequence multiplies the ratios of {count} tokens, and such products collapse with length"
        findings.notice("train.loss.ratio_type", what, f"token is safer over {SEQUENCE_RATIO_TOKENS} tokens")
