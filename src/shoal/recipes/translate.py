"""`Config` onto the schema. Called by `main` and `setup_infra`, which therefore mean the same by every field."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from shoal.config.base import IN_MEMORY
from shoal.config.catalogue import LOSS_CATALOGUE
from shoal.config.layouts import LAYOUTS, Layout
from shoal.config.schema import RunConfig
from shoal.envs.readers import SUFFIXES
from shoal.errors import ArgumentError
from shoal.recipes.config import Config, TISConfig, WeightSyncScope
from shoal.surfaces.table import Translation

LABEL = "dataset"
POLICY_LOSSES = ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo")
DEFAULT_KL = {"grpo": 0.001, "reinforce": 0.001}
# Fields of the per-loss configurations → parameters of the loss.
LOSS_FIELDS = {"eps_clip": "clip_low", "eps_clip_high": "clip_high", "beta": "quad_beta"}


def check_config(surface: str, config: Any) -> None:
    """The first argument of every call here; a dictionary or a swapped one is told as that."""
    if not isinstance(config, Config):
        raise ArgumentError(f"{surface}: config: must be a Config, not a {type(config).__name__}; write Config(…)")


def translate(config: Config, in_memory: bool = False) -> tuple[RunConfig, list[str]]:
    """The resolved run and what there is to advise. `in_memory`: rows or a reward come as Python objects."""
    to = Translation("Config")
    if not config.deployment.tokenizer_model:
        to.refuse("deployment.tokenizer_model", "is required", "name the model whose tokenizer the deployment uses")
    if config.policy_loss not in POLICY_LOSSES:
        near = difflib.get_close_matches(str(config.policy_loss), POLICY_LOSSES, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(POLICY_LOSSES)}"
        to.refuse("policy_loss", f"there is no loss {config.policy_loss!r}", fix)
    plain = {
        "log_path": "train.output_dir", "base_model": "train.model", "max_seq_len": "train.sequence_len",
        "learning_rate": "train.learning_rate", "completions_per_prompt": "orch.rollouts_per_example",
        "max_completion_tokens": "orch.sampling.max_tokens", "temperature": "orch.sampling.temperature",
        "epochs": "train.epochs", "policy_loss": "train.loss.type", "ppo_n_minibatches": "train.minibatches",
        "seed": "train.seed",
    }  # fmt: skip
    to.put_all({name: (key, getattr(config, name)) for name, key in plain.items()})
    to.data["orch"]["groups"] = {"uniform": "skip"}
    _batch(to, config)
    _data(to, config, in_memory)
    _loss(to, config)
    notices = _reference(to, config)
    _shapes(to, config)
    _syncs(to, config)
    if config.wandb is not None:
        to.put("wandb", "train.report_to", ["wandb"])
        to.put("wandb.project", "train.report_project", config.wandb.project)
        to.put_all({"wandb.run_name": ("train.report_name", config.wandb.run_name)})
    run, advice = to.config(config.overrides)
    return run, [*notices, *advice]


def _batch(to: Translation, config: Config) -> None:
    for name in ("prompt_groups_per_step", "completions_per_prompt"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            to.refuse(name, f"must be a whole number of at least 1, not {value!r}")
    rollouts = config.prompt_groups_per_step * config.completions_per_prompt
    to.put("prompt_groups_per_step", "orch.batch_size", rollouts)


def _data(to: Translation, config: Config, in_memory: bool) -> None:
    data = config.dataset
    if in_memory or not isinstance(data, str):
        to.put("dataset", "orch.env", [{"id": IN_MEMORY, "name": LABEL}])
        return
    to.put("dataset", "orch.env", [{"id": "dataset", "name": LABEL}])
    to.put("dataset", f"orch.dataset.{'path' if is_path(data) else 'name'}", data)
    to.put_all({"max_rows": ("orch.dataset.max_rows", config.max_rows)})


def is_path(dataset: str) -> bool:
    return (
        Path(dataset).expanduser().exists() or dataset.endswith(tuple(SUFFIXES)) or dataset.startswith((".", "/", "~"))
    )


def _loss(to: Translation, config: Config) -> None:
    loss, spec = config.policy_loss, LOSS_CATALOGUE[config.policy_loss]
    if loss != "gspo":
        to.data["train"]["loss"]["aggregation"] = "token-mean"
    clipping = loss in ("grpo", "dapo")
    for name, default in (("eps_clip", 0.2), ("eps_clip_high", None)):
        value = getattr(config, name)
        if not clipping and value != default:
            where = f"set {loss}.{name}" if hasattr(getattr(config, loss), name) else "leave it out"
            to.refuse(name, f"is for grpo and dapo, not for {loss}", where)
        if clipping and value is not None:
            to.put(name, f"train.loss.{LOSS_FIELDS[name]}", value)
    for name in POLICY_LOSSES[1:]:
        own = getattr(config, name)
        if own is not None and name != loss:
            to.refuse(name, f"is not used with policy_loss {loss!r}", "leave it out")
        for field, value in vars(own).items() if own is not None else ():
            to.put_all({f"{name}.{field}": (f"train.loss.{LOSS_FIELDS.get(field, field)}", value)})
    if spec.uses_ratio or config.ratio_log_cap != 20.0:
        to.put("ratio_log_cap", "train.loss.ratio_log_cap", config.ratio_log_cap)
    # Its default is simply absent where the loss has no correction; a value of one's own is refused by the schema.
    if config.tis is not None and (spec.takes_correction or config.tis != TISConfig()):
        to.put("tis", "train.loss.correction.type", "tis")
        to.put("tis.cap", "train.loss.correction.cap", config.tis.cap)
        to.put("tis.level", "train.loss.correction.level", config.tis.level)


def _reference(to: Translation, config: Config) -> list[str]:
    """With LoRA the base is the reference; full fine-tuning has one only if a shape for it is named."""
    shape, lora, beta = config.infra.ref_training_shape_id, config.lora_rank != 0, config.kl_beta
    if lora:
        to.put("lora_rank", "train.lora", True)
        to.put("lora_rank", "train.lora_rank", config.lora_rank)
        if shape is not None:
            what = "is not used with LoRA, whose reference is the model with the adapter off"
            to.refuse("infra.ref_training_shape_id", what, "leave it out")
    if beta and not lora and shape is None:
        what = f"is {beta:g}, but full fine-tuning has no reference"
        to.refuse("kl_beta", what, "set infra.ref_training_shape_id, or lora_rank, or leave kl_beta out")
    usual = DEFAULT_KL.get(config.policy_loss)
    if beta is None and (lora or shape is not None):
        beta = usual
    if beta:
        to.put("kl_beta", "train.loss.kl.beta", beta)
    if shape is not None:
        to.put("infra.ref_training_shape_id", "train.reference", "frozen")
    if usual is not None and config.kl_beta is None and not lora and shape is None:
        return ["kl_beta: there is no reference (infra.ref_training_shape_id is unset), so the KL is off"]
    return []


def _shapes(to: Translation, config: Config) -> None:
    names = ("training_shape_id", "ref_training_shape_id")
    found = {name: _layout(to, f"infra.{name}", getattr(config.infra, name)) for name in names}
    ours, reference = found["training_shape_id"], found["ref_training_shape_id"]
    for key, value in ours.settings if ours is not None else ():
        to.put("infra.training_shape_id", f"train.{key}", value)
    if reference is not None and ours is not None and reference.device != ours.device:
        what = f"{reference.name} is on another device than {ours.name}"
        to.refuse("infra.ref_training_shape_id", what, "a reference runs beside its policy: name the same kind")


def _layout(to: Translation, argument: str, name: str | None) -> Layout | None:
    if name is not None and name not in LAYOUTS:
        near = difflib.get_close_matches(name, LAYOUTS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`shoal shapes` lists them"
        to.refuse(argument, f"there is no shape {name!r}", hint)
    return LAYOUTS[name] if name is not None else None


def _syncs(to: Translation, config: Config) -> None:
    sync: Any = config.weight_sync
    to.put("weight_sync.weight_sync_interval", "orch.weight_sync_interval", sync.weight_sync_interval)
    to.put("weight_sync.dcp_save_interval", "train.save_steps", sync.dcp_save_interval)
    to.put("weight_sync.weight_sync_timeout", "orch.sync_deadline_s", sync.weight_sync_timeout)
    to.put("weight_sync.dcp_timeout", "train.save_deadline_s", sync.dcp_timeout)
    if config.deployment.weight_sync_scope is WeightSyncScope.PER_DEPLOYMENT:
        to.put("deployment.weight_sync_scope", "infer.weights", "own")
