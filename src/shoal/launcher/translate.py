"""Translates the launcher's flat keys to the schema, and schema keys in messages back to the launcher's.

`KEYS` in read.py translates most keys. This file has those that depend on each other.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.build.load import check_launch
from shoal.config.load import COMMAND_LINE, ConfigDraft, validate
from shoal.config.problems import Origins, show, split_path
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError
from shoal.core.section import NAME_PATTERN
from shoal.launcher.read import KEYS, AllocationError, FlatKeys, parse_allocation
from shoal.surfaces.names import replace_keys

OUTPUTS = "outputs"
UNITS = ("epochs", "steps", "secs")
# Schema keys in messages without a launcher key of the same meaning → the key to name instead.
_ALSO = {"orch.seq_len": "mb_spec.max_tokens_per_mb", "seq_len": "mb_spec.max_tokens_per_mb",
         "train.output_dir": "trial_name", "train.resume_from_checkpoint": "recover.mode",
         "orch.dataset.split": "train_dataset.path",
         "orch.advantage.mean=batch": "actor.group_reward_norm=false"}  # fmt: skip


@dataclass
class Translated:
    """The configuration in the schema, notices, and environment variables for trackers."""

    loaded: ConfigDraft[RunConfig]
    notices: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    came_from: dict[str, str] = field(default_factory=dict)  # schema key → the launcher's key that set it

    def wording(self, message: str) -> str:
        return with_launcher_keys(message, self.came_from)


@dataclass(frozen=True)
class LauncherTask:
    """The environment of the script, and its reward function if it has one (`file.py:function`)."""

    env: str = "gsm8k"
    reward: str | None = None


class _KeyTranslation:
    """Collects schema values, each with its launcher key and place."""

    def __init__(self, flat: FlatKeys) -> None:
        self.flat = flat
        self.data: dict[str, Any] = {}
        self.origins = Origins(default=COMMAND_LINE)
        self.notices: list[str] = []
        self.came_from: dict[str, str] = {}

    def put(self, schema_key: str, value: Any, key: str) -> None:
        *above, last = schema_key.split(".")
        target = self.data
        for part in above:
            target = target.setdefault(part, {})
        target[last] = value
        self.origins.places[split_path(schema_key)] = self.flat.at(key)
        self.came_from[schema_key] = key


def translate(flat: FlatKeys, task: LauncherTask) -> Translated:
    draft = _KeyTranslation(flat)
    for key, row in KEYS.items():
        value = flat.get(key)
        if value is not None and not row.composed:
            for schema_key in row.keys:
                draft.put(schema_key, _converted(flat, key, value), key)
    for compose in (_folder, _model, _length, _steps, _loss, _rewards, _data, _saving, _evaluation, _allocation):
        compose(draft)
    draft.data["orch"]["env"] = [{"id": task.env}]
    if task.env != "gsm8k" and "train_dataset.path" not in flat.values:
        draft.data["orch"].pop("dataset", None)  # the default data set belongs to gsm8k
    if task.reward is not None:
        draft.data["orch"].setdefault("reward", {})["function"] = task.reward
    environment = _tracker_environment(draft)
    try:
        config = validate(RunConfig, draft.data, draft.origins, check_launch)
    except ConfigError as error:
        raise ConfigError(with_launcher_keys(str(error), draft.came_from)) from None
    return Translated(ConfigDraft(config, draft.origins), draft.notices, environment, draft.came_from)


def with_launcher_keys(message: str, came_from: dict[str, str]) -> str:
    """`message` with the launcher's keys in place of schema keys."""
    words = {**{to: key for key, row in KEYS.items() for to in row.keys}, **came_from, **_ALSO}
    message = re.sub(r"; the default is [^;\n]*", "", message)  # of the schema, not of the launcher
    return replace_keys(message, words)


def _converted(flat: FlatKeys, key: str, value: Any) -> Any:
    convert = KEYS[key].convert
    try:
        return convert(value) if convert is not None else value
    except ValueError as error:
        raise flat.error(key, f"{error}, not {show(value, tuple(key.split('.')))}") from None


def _folder(draft: _KeyTranslation) -> None:
    names = []
    for key in ("experiment_name", "trial_name"):
        name = draft.flat.get(key)
        if name is None:
            raise draft.flat.error(key, "is required; set it in the file, or as experiment_name=…")
        if not re.match(NAME_PATTERN, str(name)):
            raise draft.flat.error(
                key, f"{show(name)} is not a valid folder name; use letters, digits, dots and dashes"
            )
        names.append(str(name))
    draft.put("train.output_dir", str(Path(OUTPUTS, *names)), "trial_name")


def _model(draft: _KeyTranslation) -> None:
    """The tokenizer is that of the model and the reference is the initial model. Other paths are errors."""
    flat, model = draft.flat, draft.flat.get("actor.path")
    if model is None:
        raise flat.error("actor.path", "is required; name the model's folder, hub id or GGUF file")
    for key, what in (("tokenizer_path", "the tokenizer"), ("ref.path", "the reference model")):
        if flat.get(key) not in (None, model):
            raise flat.error(
                key,
                f"{show(flat.get(key))} is another path, but {what} must be that of actor.path; write ${{actor.path}}",
            )


def _length(draft: _KeyTranslation) -> None:
    flat, inner, outer = draft.flat, "actor.mb_spec.max_tokens_per_mb", "mb_spec.max_tokens_per_mb"
    given = [key for key in (inner, outer) if key in flat.values]
    typed = [key for key in given if flat.at(key) == COMMAND_LINE]
    given = typed or given  # the command line overrides either key of the file
    if len({flat.values[key] for key in given}) > 1:
        raise flat.error(inner, f"is {show(flat.values[inner])} but {outer} is {show(flat.values[outer])}; keep one")
    key = given[0] if given else outer
    draft.put("train.sequence_len", flat.get(key), key)


def _steps(draft: _KeyTranslation) -> None:
    """total_train_steps has priority over total_train_epochs."""
    key = "total_train_steps" if "total_train_steps" in draft.flat.values else "total_train_epochs"
    draft.put(KEYS[key].keys[0], draft.flat.get(key), key)


def _loss(draft: _KeyTranslation) -> None:
    """Drops defaults that the selected loss does not have. The schema rejects such keys if the user set them.

    A cap in the file is dropped too if the decoupled loss is disabled, so that one override can disable it.
    """
    flat, cap, kl = draft.flat, "actor.behav_imp_weight_cap", draft.flat.get("actor.kl_ctl")
    decoupled = flat.get("actor.use_decoupled_loss")
    if decoupled is False and cap in flat.values and flat.at(cap) != COMMAND_LINE:
        draft.notices.append(f"{cap}: no effect while actor.use_decoupled_loss is false")
    elif cap in flat.values or decoupled:
        draft.put("train.loss.cap", flat.get(cap), cap)
    if kl:
        draft.put("train.loss.kl.beta", kl, "actor.kl_ctl")
        draft.put("train.loss.kl.in", "reward", "actor.kl_ctl")


def _rewards(draft: _KeyTranslation) -> None:
    """A scale cancels out if advantages are divided by a standard deviation, so the default is dropped then."""
    key = "actor.reward_scaling"
    if key in draft.flat.values or draft.flat.get("actor.adv_norm") == "none":
        draft.put("orch.reward.scale", draft.flat.get(key), key)


def _data(draft: _KeyTranslation) -> None:
    flat, key = draft.flat, "train_dataset.path"
    path = flat.get(key)
    if not isinstance(path, str) or not path:
        raise flat.error(key, "must be a folder, a file or the name of a hub dataset")
    local = Path(path).expanduser().exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
    draft.put("orch.dataset.path" if local else "orch.dataset.name", path, key)
    prompts, group = flat.get("train_dataset.batch_size"), flat.get("gconfig.n_samples")
    for name, count in (("train_dataset.batch_size", prompts), ("gconfig.n_samples", group)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise flat.error(name, f"must be a whole number of at least 1, not {show(count)}")
    draft.put("orch.batch_size", prompts * group, "train_dataset.batch_size")


def _frequency(flat: FlatKeys, section: str) -> dict[str, Any]:
    return {key: flat.values[key] for unit in UNITS if (key := f"{section}.freq_{unit}") in flat.values}


def _saving(draft: _KeyTranslation) -> None:
    """`saver` and `recover` both become checkpoints, with one interval."""
    flat = draft.flat
    saver, recover = _frequency(flat, "saver"), _frequency(flat, "recover")
    if recover and not _converted(flat, "recover.mode", flat.get("recover.mode")):
        draft.notices.append(f"{', '.join(recover)}: no effect while recover.mode is disabled")
        recover = {}
    if not _converted(flat, "saver.mode", flat.get("saver.mode")):
        if saver:
            draft.notices.append(f"{', '.join(saver)}: no effect while saver.mode is disabled")
        saver = {}
        if not recover:  # save only the last step
            steps = flat.get("total_train_steps")
            unit, last = ("epochs", flat.get("total_train_epochs")) if steps is None else ("steps", steps)
            draft.put(f"train.save_{unit}", last, "saver.mode")
    for key, value in {**recover, **saver}.items():
        draft.put(KEYS[key].keys[0], value, key)


def _evaluation(draft: _KeyTranslation) -> None:
    frequency = _frequency(draft.flat, "evaluator")
    if not _converted(draft.flat, "evaluator.mode", draft.flat.get("evaluator.mode")):
        if frequency:
            draft.notices.append(f"{', '.join(frequency)}: no effect while evaluator.mode is disabled")
        return
    for key, value in frequency.items():
        draft.put(KEYS[key].keys[0], value, key)


def _allocation(draft: _KeyTranslation) -> None:
    flat, key = draft.flat, "allocation_mode"
    try:
        allocation = parse_allocation(flat.get(key))
    except AllocationError as error:
        raise flat.error(key, str(error)) from None
    attached = "rollout.base_url" in flat.values  # sizes of an external server are unknown
    for schema_key, value in allocation.schema_values(starts_server=not attached).items():
        draft.put(schema_key, value, key)
    if allocation.engine != "embedded" and not attached and "rollout.engine_python" not in flat.values:
        if find_spec(allocation.engine) is None:
            raise flat.error(
                key,
                f"{allocation.engine} is not installed; use {allocation.without_server}, or set the Python that "
                "has it (rollout.engine_python=…) or a running server (rollout.base_url=http://host:port/v1)",
            )
        draft.put("infer.engine_python", sys.executable, key)


def _tracker_environment(draft: _KeyTranslation) -> dict[str, str]:
    """Environment variables for wandb. The API key is not written to any file of the run."""
    flat, name = draft.flat, "stats_logger.wandb.wandb_api_key"
    mode, key = flat.get("stats_logger.wandb.mode"), flat.get(name)
    if key is not None and flat.at(name) == COMMAND_LINE:
        draft.notices.append(f"{name}: is visible in the process list; export WANDB_API_KEY instead")
    if mode == "disabled":
        if key is not None:
            draft.notices.append(f"{name}: no effect while stats_logger.wandb.mode is disabled")
        return {}
    return {"WANDB_MODE": str(mode)} | ({"WANDB_API_KEY": str(key)} if key is not None else {})
