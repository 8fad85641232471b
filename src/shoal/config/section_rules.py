"""Checks inside one section: `train` (shared by GRPO and supervised training), `orch`, and datasets.

Called by rules.py. Of a data file only the first row is read.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from shoal.config.fields import given, marked, nearest
from shoal.config.model_names import model_problem
from shoal.config.orch import AdvantageConfig, DatasetConfig, OrchConfig, TemperatureSchedule
from shoal.config.problems import Findings, show
from shoal.config.train import TrainConfig
from shoal.core.losses import keeps_uniform

# Usual range of the peak learning rate for RL. LoRA needs about ten times as much.
FULL_RATES = (5e-7, 5e-5)
LORA_FACTOR = 10
# Key → PEFT's key: properties that an existing adapter fixes.
ADAPTER_KEYS = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def check_train(train: TrainConfig, findings: Findings, supervised: bool = False) -> None:
    _check_exclusive(train, findings)
    _check_model(train, findings)
    _check_lora(train, findings)
    _check_schedule(train, findings)
    if not supervised:
        _advise_rate(train, findings)
    for name in given(train, "metric_names", "log_completions") if not train.report_to else []:
        findings.error(
            f"train.{name}",
            "applies to trackers, but train.report_to is empty",
            "set train.report_to, or remove this key",
        )
    _check_devices(train, findings, supervised)


def _check_devices(train: TrainConfig, findings: Findings, supervised: bool) -> None:
    if supervised and train.gpus > 1:
        findings.error("train.gpus", f"is {train.gpus}, but supervised training runs on one device", "set train.gpus=1")
    if train.sharding == "none":
        return
    stored = next((name for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4") if getattr(train, name)), None)
    not_sharded = {
        "supervised training": supervised,
        "train.optimizer: adamw_8bit": train.optimizer == "adamw_8bit",
        "train.recipe: fp8-hybrid": train.recipe == "fp8-hybrid",
        f"a quantised base (train.{stored})": stored is not None,
    }
    for what, asked in not_sharded.items():
        if asked:
            findings.error("train.sharding", f"fsdp cannot be combined with {what}", "set train.sharding=none")


def _check_exclusive(train: TrainConfig, findings: Findings) -> None:
    for names in (
        ("max_steps", "epochs"),
        ("warmup_steps", "warmup_ratio"),
        ("save_steps", "save_epochs", "save_seconds"),
        ("qlora_fp8", "qlora_bnb", "qlora_fp4"),
    ):
        set_names = [name for name in names if getattr(train, name) not in (None, False)]
        for name in set_names[1:]:
            findings.error(f"train.{name}", f"cannot be combined with train.{set_names[0]}", "keep one of them")


def _check_model(train: TrainConfig, findings: Findings) -> None:
    teacher = train.teacher
    for key, model in (("train.model", train.model), ("train.teacher.model", teacher and teacher.model)):
        if model is not None and (problem := model_problem(model)) is not None:
            findings.error(key, *problem)
    adapter = teacher.adapter if teacher is not None else None
    if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        what = f"{show(adapter)} has no adapter_config.json"
        findings.error("train.teacher.adapter", what, "use an adapter folder written by PEFT")
    if train.adapter_path is not None:
        _check_adapter(train, train.adapter_path, findings)


def _check_adapter(train: TrainConfig, adapter_path: str, findings: Findings) -> None:
    if not train.lora:
        findings.error("train.adapter_path", "needs train.lora: true", "set it, or remove train.adapter_path")
    file = Path(adapter_path).expanduser() / "adapter_config.json"
    try:
        adapter = dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        what = f"{show(adapter_path)} has no readable adapter_config.json"
        findings.error("train.adapter_path", what, "use an adapter folder written by PEFT")
        return
    for ours, theirs in ADAPTER_KEYS.items():
        wanted, found = getattr(train, ours), adapter.get(theirs)
        if given(train, ours) and wanted != found:
            what = f"is {show(wanted)}, but the adapter at train.adapter_path has {show(found)}"
            findings.error(f"train.{ours}", what, "remove it: the adapter defines this value")


def _check_lora(train: TrainConfig, findings: Findings) -> None:
    for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4"):
        if getattr(train, name) and not train.lora:
            what = "quantises the frozen base, so it needs train.lora: true"
            findings.error(f"train.{name}", what, "set train.lora=true or remove it")
    if train.quantised and train.recipe == "fp8-hybrid":
        what = "has no effect with a quantised base, which is dequantised to bf16 for each matmul"
        findings.notice("train.recipe", f"fp8-hybrid {what}")
    if not train.lora:
        inert = [f"train.{name}" for name in given(train, *marked(TrainConfig, "lora_only"))]
        if inert:
            findings.notice("train.lora", f"is false, so these keys have no effect: {', '.join(inert)}")
    if train.lora and train.lora_target_modules == []:
        findings.error(
            "train.lora_target_modules", "is empty, so nothing would be trained", "remove it to train all linear layers"
        )


def _check_schedule(train: TrainConfig, findings: Findings) -> None:
    if train.lr_scheduler_type == "constant" and given(train, "final_lr_fraction"):
        what = "is not used by a constant learning rate"
        findings.error(
            "train.final_lr_fraction", what, "remove it, or set train.lr_scheduler_type to cosine, linear or wsd"
        )
    noise = train.noise_scheduler
    if noise.enabled and noise.sigma_end > noise.sigma_start:
        what = f"is {noise.sigma_end:g}, above sigma_start ({noise.sigma_start:g}), but noise must decay"
        findings.error("train.noise_scheduler.sigma_end", what, "swap the two")


def _advise_rate(train: TrainConfig, findings: Findings) -> None:
    factor = LORA_FACTOR if train.lora else 1
    low, high = FULL_RATES[0] * factor, FULL_RATES[1] * factor
    if not low <= train.learning_rate <= high:
        kind = "LoRA" if train.lora else "full fine-tuning"
        what = f"{train.learning_rate:g} is unusual for {kind}"
        findings.notice("train.learning_rate", what, f"try {low:g} to {high:g}")


REPLAYED_IDS = 256  # kept ids per token that the embedded engine stores for truncated sampling
SMOKE_GROUP = 8
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def check_orch(orch: OrchConfig, findings: Findings) -> None:
    _check_batch(orch, findings)
    _check_sampling(orch, findings)
    _check_advantage(orch, findings)
    _check_reward(orch, findings)
    _check_truncated(orch, findings)
    _check_groups(orch, findings)
    _check_buffer(orch, findings)
    _check_envs(orch, findings)
    _check_staleness(orch, findings)
    _check_eval(orch, findings)
    if port_of(orch.client.base_url) is None:
        findings.error(
            "orch.client.base_url", f"{show(orch.client.base_url)} is not an address", "write http://host:port/v1"
        )
    if orch.dataset is not None:
        check_dataset(orch.dataset, "orch.dataset", findings)


def port_of(address: str) -> int | None:
    """The explicit or default port of an HTTP address; None if the address is not valid."""
    try:
        url = urlsplit(address)
        implied = {"http": 80, "https": 443}.get(url.scheme) if url.hostname else None
        return implied and (implied if url.port is None else url.port)
    except ValueError:  # a port that is not a number, or an incomplete IPv6 address
        return None


def _group_statistics(advantage: AdvantageConfig) -> bool:
    return advantage.mean == "group" or advantage.std == "group" or advantage.leave_one_out


def _check_batch(orch: OrchConfig, findings: Findings) -> None:
    batch, group = orch.batch_size, orch.rollouts_per_example
    if batch % group:
        lower = batch // group * group
        near = f"{lower} or {lower + group}" if lower else str(group)
        what = f"is {group}, which does not divide orch.batch_size ({batch})"
        findings.error("orch.rollouts_per_example", what, f"set orch.batch_size to {near}")
    if group == 1 and _group_statistics(orch.advantage) and orch.advantage.function is None:
        what = "is 1, and in a group of one every advantage is 0"
        findings.error(
            "orch.rollouts_per_example", what, "use 2 or more (8 to 16 is usual), or orch.advantage.mean=batch"
        )
    elif 1 < group < SMOKE_GROUP:
        findings.notice("orch.rollouts_per_example", f"is {group}, which is small", "8 to 16 is usual")


def _check_sampling(orch: OrchConfig, findings: Findings) -> None:
    sampling = orch.sampling
    temperature = sampling.temperature
    ends = (temperature.start, temperature.end) if isinstance(temperature, TemperatureSchedule) else (temperature,)
    if min(ends) == 0 and orch.rollouts_per_example > 1:
        what = "0 makes all rollouts of a group equal, so there is no training signal"
        findings.error("orch.sampling.temperature", what, "use a temperature above 0 (1.0 is usual)")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        what = f"is {sampling.min_tokens}, more than max_tokens ({sampling.max_tokens})"
        findings.error("orch.sampling.min_tokens", what, "lower it")
    if sampling.top_k > REPLAYED_IDS:
        what = f"is {sampling.top_k}, but training replays at most {REPLAYED_IDS} kept tokens"
        findings.error("orch.sampling.top_k", what, f"use at most {REPLAYED_IDS}, or -1 for the whole vocabulary")
    elif sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        what = f"is truncated, so the kept tokens of each position are stored (at most {REPLAYED_IDS} ids) for training"
        findings.notice("orch.sampling", what)


def _check_advantage(orch: OrchConfig, findings: Findings) -> None:
    advantage = orch.advantage
    others = given(advantage, *(name for name in AdvantageConfig.model_fields if name != "function"))
    if advantage.function is not None and others:
        what = f"replaces the built-in estimator, so {', '.join(others)} would have no effect"
        findings.error("orch.advantage.function", what, "keep one of them")
    if advantage.leave_one_out and advantage.mean != "group":
        what = f"needs orch.advantage.mean group, not {advantage.mean}"
        findings.error("orch.advantage.leave_one_out", what, "set mean to group, or leave_one_out to false")
    if advantage.std in ("none", "mean") and given(advantage, "eps"):
        findings.error("orch.advantage.eps", f"is not used with std {advantage.std}", "remove it")
    _check_credit(orch, findings)
    if advantage.std is not None:
        check_uniform(orch, advantage.std, findings)


def _check_credit(orch: OrchConfig, findings: Findings) -> None:
    advantage = orch.advantage
    if advantage.std == "mean" and (advantage.mean != "group" or advantage.leave_one_out):
        what = "mean divides by the mean reward of the group, so it needs mean: group without leave_one_out"
        findings.error("orch.advantage.std", what, "remove orch.advantage.mean and leave_one_out")
    if advantage.rescale and not advantage.per_part:
        findings.error("orch.advantage.rescale", "is not used without per_part", "set per_part to true, or remove it")
    if advantage.per_part and advantage.credit != "outcome":
        what = f"cannot be combined with credit {advantage.credit}"
        findings.error("orch.advantage.per_part", what, "keep one of them")
    changed = [f"orch.reward.{name}" for name in given(orch.reward, "scale", "bias", "clip")]
    if orch.truncated.type == "zero":
        changed.append("orch.truncated")
    if advantage.per_part and changed:
        what = f"compares the parts of the reward, which {', '.join(changed)} would not change"
        findings.error("orch.advantage.per_part", what, f"remove {changed[0]}, or per_part")
    if given(advantage, "discount") and advantage.credit not in ("return", "token"):
        what = f"is not used with credit {advantage.credit}"
        findings.error("orch.advantage.discount", what, "set credit to return or token, or remove it")


def check_uniform(orch: OrchConfig, std: str, findings: Findings) -> None:
    """`std` is the effective value: the loss decides if orch.advantage.std is not set."""
    mean, uniform = orch.advantage.mean, orch.groups.uniform
    if keeps_uniform(mean, std) and uniform in ("refill", "skip"):
        what = f"is {uniform}, but batch statistics keep zero-variance groups"
        findings.error("orch.groups.uniform", what, "remove it, or use group statistics in orch.advantage")
    if uniform == "keep" and std == "group" and mean != "group":
        what = f"is keep, but with orch.advantage.mean {mean} and std group a zero-variance group has the std 0"
        findings.error("orch.groups.uniform", what, "remove it, or set orch.advantage.std to batch or none")


def _check_reward(orch: OrchConfig, findings: Findings) -> None:
    reward = orch.reward
    if reward.scale == 0:
        findings.error("orch.reward.scale", "is 0, which makes all rewards equal", "remove it for the default 1")
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        findings.error(
            "orch.reward.clip", f"is {show(reward.clip)}, with low not below high", "write [low, high] with low < high"
        )


def _check_truncated(orch: OrchConfig, findings: Findings) -> None:
    truncated, max_tokens = orch.truncated, orch.sampling.max_tokens
    if truncated.type != "overlong":
        for name in ("tokens", "factor"):
            if getattr(truncated, name) is not None:
                findings.error(
                    f"orch.truncated.{name}", f"is not used with {truncated.type}", "set type to overlong, or remove it"
                )
    elif truncated.tokens is not None and max_tokens is not None and truncated.tokens >= max_tokens:
        what = f"is {truncated.tokens}, not less than max_tokens ({max_tokens})"
        findings.error("orch.truncated.tokens", what, "lower it")


def _check_groups(orch: OrchConfig, findings: Findings) -> None:
    if orch.groups.uniform in ("skip", "keep") and given(orch.groups, "max_refill"):
        what = f"is not used with uniform {orch.groups.uniform}"
        findings.error("orch.groups.max_refill", what, "remove it, or set uniform to refill")


def _check_buffer(orch: OrchConfig, findings: Findings) -> None:
    buffer = orch.buffer
    for kind in ("easy", "hard"):
        threshold, fraction = getattr(buffer, f"{kind}_threshold"), getattr(buffer, f"{kind}_fraction")
        if (threshold is None) != (fraction is None):
            missing = f"{kind}_{'threshold' if threshold is None else 'fraction'}"
            other = f"{kind}_{'fraction' if threshold is None else 'threshold'}"
            findings.error(f"orch.buffer.{other}", f"needs orch.buffer.{missing}", "set both or neither")
    easy, hard = buffer.easy_threshold, buffer.hard_threshold
    if easy is not None and hard is not None and easy <= hard:
        what = f"is {easy:g}, not above hard_threshold ({hard:g})"
        findings.error("orch.buffer.easy_threshold", what, "swap the two")


def _check_envs(orch: OrchConfig, findings: Findings) -> None:
    for key, envs in orch.env_lists:
        seen: set[str] = set()
        for index, env in enumerate(envs):
            if env.label in seen:
                findings.error(
                    f"{key}.{index}", f"is a second environment with the name {show(env.label)}", "set another `name`"
                )
            seen.add(env.label)
    points = {max(1, step) for env in orch.env if isinstance(env.weight, dict) for step in env.weight}
    # Weights are linear between the points, so a sum of 0 at any step is 0 at a point too.
    if empty := [step for step in sorted(points) if not any(env.weight_at(step) for env in orch.env)]:
        what = f"the weights of all environments are 0 at step {empty[0]}"
        findings.error("orch.env", what, "give at least one environment a weight above 0 there")


def _check_staleness(orch: OrchConfig, findings: Findings) -> None:
    if orch.max_off_policy_steps is None:
        return
    if orch.weight_sync_interval == 0:
        what = "is not used with weight_sync_interval 0, where rollouts never become stale"
        findings.error("orch.max_off_policy_steps", what, "remove it")
    reached = orch.max_async_level + max(orch.weight_sync_interval, 1) - 1
    if orch.max_off_policy_steps < reached:
        what = f"is {orch.max_off_policy_steps}, but rollouts can become {reached} versions old; older ones are dropped"
        findings.notice("orch.max_off_policy_steps", what)


def _check_eval(orch: OrchConfig, findings: Findings) -> None:
    if orch.eval is None:
        return
    trained = {env.label: env for env in orch.env}
    for index, env in enumerate(orch.eval.env or []):
        other = trained.get(env.label)
        if other is not None and (env.id, env.args) != (other.id, other.args):
            what = f"has the name {show(env.label)} of a different training environment"
            findings.error(f"orch.eval.env.{index}", what, "set another `name`")
    cadences = given(orch.eval, "interval", "interval_epochs", "interval_seconds")
    for name in cadences[1:]:
        findings.error(f"orch.eval.{name}", f"cannot be combined with orch.eval.{cadences[0]}", "keep one of them")
    if orch.weight_sync_interval == 0:
        what = "would always evaluate the initial weights, because orch.weight_sync_interval is 0"
        findings.error("orch.eval", what, "remove it, or set orch.weight_sync_interval to 1 or more")
    elif orch.eval.interval % orch.weight_sync_interval:
        what = f"is not a multiple of orch.weight_sync_interval ({orch.weight_sync_interval})"
        findings.notice("orch.eval.interval", what, "an evaluation uses the weights of the last sync")


def check_dataset(dataset: DatasetConfig, key: str, findings: Findings) -> None:
    """Existence, split and columns of local data. A hub dataset is checked when it is opened."""
    if dataset.path is not None and dataset.name is not None:
        findings.error(f"{key}.name", f"cannot be combined with {key}.path", "keep one of them")
    elif dataset.path is None and dataset.name is None:
        findings.error(key, "has neither path nor name", f"set {key}.path or {key}.name")
    if dataset.path is None:
        return
    file = _data_file(dataset, key, findings)
    if file is not None:
        _check_columns(dataset, file, key, findings)


def _data_file(dataset: DatasetConfig, key: str, findings: Findings) -> Path | None:
    path = Path(dataset.path or "").expanduser()
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            what = f"{show(dataset.path)} has none of the suffixes {', '.join(DATA_SUFFIXES)}"
            findings.error(f"{key}.path", what, "convert it, for example to one JSON object per line")
            return None
        return path
    if not path.is_dir():
        findings.error(f"{key}.path", f"{show(dataset.path)} does not exist", "check the path")
        return None
    files = sorted(entry for entry in path.rglob("*") if entry.suffix in DATA_SUFFIXES)
    chosen = [file for file in files if file.stem == dataset.split or file.stem.startswith(f"{dataset.split}-")]
    if files and not chosen:
        splits = sorted({file.stem.split("-")[0] for file in files})
        near = nearest(dataset.split, splits)
        what = f"there is no split {show(dataset.split)} in {show(dataset.path)}"
        findings.error(
            f"{key}.split", what, f"did you mean `{near}`?" if near else f"the splits are {', '.join(splits)}"
        )
    elif not files:
        findings.error(f"{key}.path", f"{show(dataset.path)} has no data files", f"add {dataset.split}.jsonl")
    return chosen[0] if chosen else None


def _check_columns(dataset: DatasetConfig, file: Path, key: str, findings: Findings) -> None:
    columns = _first_columns(file)
    for ours, theirs in dataset.columns.items():
        if columns is not None and theirs not in columns:
            near = nearest(theirs, columns)
            what = f"{show(str(file))} has no column {show(theirs)}"
            fix = f"did you mean `{near}`?" if near else f"the columns are {', '.join(columns)}"
            findings.error(f"{key}.columns.{ours}", what, fix)


def _first_columns(file: Path) -> list[str] | None:
    """Column names from the first row of a text file; None for other formats."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            first = next((line for line in islice(lines, 100) if line.strip()), "")
        if file.suffix == ".csv":
            return [name.strip().strip('"') for name in first.split(",")]
        row = json.loads(first) if file.suffix == ".jsonl" else None
    except (OSError, ValueError, RecursionError):  # RecursionError: reported with its line when the data is read
        return None
    return list(row) if isinstance(row, dict) else None
