"""The launcher's flat keys onto the one schema, with messages in the words of the launcher's files.

Most keys are moved by the table (keys.py). Here are those that become something only together with others.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.base import NAME_PATTERN
from shoal.config.load import COMMAND_LINE, Loaded
from shoal.config.problems import Origins, render, show, split_path
from shoal.config.schema import RunConfig
from shoal.config.schema_errors import problems_from
from shoal.errors import ConfigError
from shoal.launcher.allocation import AllocationError, parse_allocation
from shoal.launcher.read import Flat
from shoal.surfaces.launcher import KEYS

OUTPUTS = "outputs"
UNITS = ("epochs", "steps", "secs")
# Schema keys that messages may name and that no launcher key stands for alone.
_ALSO = {"orch.seq_len": "mb_spec.max_tokens_per_mb", "seq_len": "mb_spec.max_tokens_per_mb",
         "train.output_dir": "trial_name", "train.resume_from_checkpoint": "recover.mode",
         "orch.dataset.split": "train_dataset.path",
         "orch.advantage.mean=batch": "actor.group_reward_norm=false"}  # fmt: skip


@dataclass
class Translated:
    """A configuration of the schema, what to tell the user, and variables for the trackers' own libraries."""

    loaded: Loaded[RunConfig]
    notices: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    came_from: dict[str, str] = field(default_factory=dict)  # schema key → the launcher's key that set it

    def wording(self, message: str) -> str:
        return in_launcher_words(message, self.came_from)


@dataclass(frozen=True)
class Task:
    """What the script trains on: an environment, and a reward of its own if it has one (`file.py:function`)."""

    env: str = "gsm8k"
    reward: str | None = None


class _Draft:
    """Schema keys as they are set, each with the launcher's key and place it came from."""

    def __init__(self, flat: Flat) -> None:
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


def translate(flat: Flat, task: Task) -> Translated:
    draft = _Draft(flat)
    for key, row in KEYS.items():
        value = flat.get(key)
        if value is not None and not row.composed:
            for schema_key in row.to:
                draft.put(schema_key, _converted(flat, key, value), key)
    for compose in (_folder, _model, _length, _steps, _loss, _rewards, _data, _saving, _evaluation, _allocation):
        compose(draft)
    draft.data["orch"]["env"] = [{"id": task.env}]
    if task.reward is not None:
        draft.data["orch"].setdefault("reward", {})["function"] = task.reward
    environment = _tracker_environment(draft)
    try:
        config = RunConfig.model_validate(draft.data)
    except ValidationError as error:
        message = render(problems_from(error, RunConfig, draft.data), draft.origins)
        raise ConfigError(in_launcher_words(message, draft.came_from)) from None
    return Translated(Loaded(config, draft.origins), draft.notices, environment, draft.came_from)


def in_launcher_words(message: str, came_from: dict[str, str]) -> str:
    """A message about the schema, with the keys of the launcher's file for the schema's."""
    words = {**{to: key for key, row in KEYS.items() for to in row.to}, **came_from, **_ALSO}
    message = re.sub(r"; the default is [^;\n]*", "", message)  # the schema's, which is not the launcher's
    for schema_key in sorted(words, key=len, reverse=True):
        message = message.replace(schema_key, words[schema_key])
    return message


def _converted(flat: Flat, key: str, value: Any) -> Any:
    convert = KEYS[key].convert
    try:
        return convert(value) if convert is not None else value
    except ValueError as error:
        raise flat.error(key, f"{error}, not {show(value, tuple(key.split('.')))}") from None


def _folder(draft: _Draft) -> None:
    names = []
    for key in ("experiment_name", "trial_name"):
        name = draft.flat.get(key)
        if name is None:
            raise draft.flat.error(key, "is required; write it in the file, or experiment_name=… after it")
        if not re.match(NAME_PATTERN, str(name)):
            raise draft.flat.error(key, f"{show(name)} cannot name a folder; use letters, digits, dots and dashes")
        names.append(str(name))
    draft.put("train.output_dir", str(Path(OUTPUTS, *names)), "trial_name")


def _model(draft: _Draft) -> None:
    """The tokenizer comes with the model, and the reference is the model at the start: other paths are refused."""
    flat, model = draft.flat, draft.flat.get("actor.path")
    if model is None:
        raise flat.error("actor.path", "is required; name the model's folder, hub id or GGUF file")
    for key, what in (("tokenizer_path", "the tokenizer comes from"), ("ref.path", "the reference is the start of")):
        if flat.get(key) not in (None, model):
            raise flat.error(
                key, f"{show(flat.get(key))} is another path, but {what} actor.path; write ${{actor.path}}"
            )


def _length(draft: _Draft) -> None:
    flat, inner, outer = draft.flat, "actor.mb_spec.max_tokens_per_mb", "mb_spec.max_tokens_per_mb"
    given = [key for key in (inner, outer) if key in flat.values]
    typed = [key for key in given if flat.at(key) == COMMAND_LINE]
    given = typed or given  # whichever way the file spells it, the command line stands instead
    if len({flat.values[key] for key in given}) > 1:
        raise flat.error(inner, f"is {show(flat.values[inner])} but {outer} is {show(flat.values[outer])}; keep one")
    key = given[0] if given else outer
    draft.put("train.sequence_len", flat.get(key), key)


def _steps(draft: _Draft) -> None:
    """A number of steps, where there is one, ends the run; else the epochs do."""
    key = "total_train_steps" if "total_train_steps" in draft.flat.values else "total_train_epochs"
    draft.put(KEYS[key].to[0], draft.flat.get(key), key)


def _loss(draft: _Draft) -> None:
    """Defaults that the chosen loss does not have are left out; what the user set is refused by the schema's checks.

    A cap in the file stands there for the loss that the file had in mind, so turning that off takes one override.
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


def _rewards(draft: _Draft) -> None:
    """A scale cancels out where advantages are divided by a spread, so the default is left out there."""
    key = "actor.reward_scaling"
    if key in draft.flat.values or draft.flat.get("actor.adv_norm") == "none":
        draft.put("orch.reward.scale", draft.flat.get(key), key)


def _data(draft: _Draft) -> None:
    flat, key = draft.flat, "train_dataset.path"
    path = flat.get(key)
    if not isinstance(path, str) or not path:
        raise flat.error(key, "must be a folder, a file or the name of a hub data set")
    local = Path(path).expanduser().exists() or path.startswith((".", "/", "~")) or path.count("/") != 1
    draft.put("orch.dataset.path" if local else "orch.dataset.name", path, key)
    prompts, group = flat.get("train_dataset.batch_size"), flat.get("gconfig.n_samples")
    for name, count in (("train_dataset.batch_size", prompts), ("gconfig.n_samples", group)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise flat.error(name, f"must be a whole number of at least 1, not {show(count)}")
    draft.put("orch.batch_size", prompts * group, "train_dataset.batch_size")


def _frequency(flat: Flat, section: str) -> dict[str, Any]:
    return {key: flat.values[key] for unit in UNITS if (key := f"{section}.freq_{unit}") in flat.values}


def _saving(draft: _Draft) -> None:
    """A checkpoint here is both what `saver` and what `recover` write, so there is one cadence."""
    flat = draft.flat
    saver, recover = _frequency(flat, "saver"), _frequency(flat, "recover")
    if recover and not _converted(flat, "recover.mode", flat.get("recover.mode")):
        draft.notices.append(f"{', '.join(recover)}: no effect while recover.mode is disabled")
        recover = {}
    if not _converted(flat, "saver.mode", flat.get("saver.mode")):
        if saver:
            draft.notices.append(f"{', '.join(saver)}: no effect while saver.mode is disabled")
        saver = {}
        if not recover:  # the last step alone is saved
            steps = flat.get("total_train_steps")
            unit, last = ("epochs", flat.get("total_train_epochs")) if steps is None else ("steps", steps)
            draft.put(f"train.save_{unit}", last, "saver.mode")
    for key, value in {**recover, **saver}.items():
        draft.put(KEYS[key].to[0], value, key)


def _evaluation(draft: _Draft) -> None:
    frequency = _frequency(draft.flat, "evaluator")
    if not _converted(draft.flat, "evaluator.mode", draft.flat.get("evaluator.mode")):
        if frequency:
            draft.notices.append(f"{', '.join(frequency)}: no effect while evaluator.mode is disabled")
        return
    for key, value in frequency.items():
        draft.put(KEYS[key].to[0], value, key)


def _allocation(draft: _Draft) -> None:
    flat, key = draft.flat, "allocation_mode"
    try:
        allocation = parse_allocation(flat.get(key))
    except AllocationError as error:
        raise flat.error(key, str(error)) from None
    attached = "rollout.base_url" in flat.values  # its sizes are its own affair
    for schema_key, value in allocation.schema_values(starts_server=not attached).items():
        draft.put(schema_key, value, key)
    if allocation.engine != "embedded" and not attached and "rollout.engine_python" not in flat.values:
        if find_spec(allocation.engine) is None:
            raise flat.error(
                key,
                f"{allocation.engine} is not installed here; use {allocation.without_server}, or name the Python that "
                "has it (rollout.engine_python=…) or a server that runs (rollout.base_url=http://host:port/v1)",
            )
        draft.put("infer.engine_python", sys.executable, key)


def _tracker_environment(draft: _Draft) -> dict[str, str]:
    """What wandb reads itself. The key is in no file and in no record of the run."""
    flat, name = draft.flat, "stats_logger.wandb.wandb_api_key"
    mode, key = flat.get("stats_logger.wandb.mode"), flat.get(name)
    if key is not None and flat.at(name) == COMMAND_LINE:
        draft.notices.append(f"{name}: is visible in the list of processes; export WANDB_API_KEY instead")
    if mode == "disabled":
        if key is not None:
            draft.notices.append(f"{name}: no effect while stats_logger.wandb.mode is disabled")
        return {}
    return {"WANDB_MODE": str(mode)} | ({"WANDB_API_KEY": str(key)} if key is not None else {})
