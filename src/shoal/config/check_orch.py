"""Rules inside the `orch` section and of a data set. Called by checks.py; of a data file only the first row is read."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from shoal.config.base import given
from shoal.config.catalogue import keeps_uniform
from shoal.config.fields import nearest
from shoal.config.orch import AdvantageConfig, DatasetConfig, OrchConfig, TemperatureSchedule
from shoal.config.problems import Findings, show

REPLAYED_IDS = 256  # kept ids a token that the embedded engine stores for truncated sampling
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
    """The port an HTTP address names or implies; None if it is no such address."""
    try:
        url = urlsplit(address)
        implied = {"http": 80, "https": 443}.get(url.scheme) if url.hostname else None
        return implied and (implied if url.port is None else url.port)
    except ValueError:  # a port that is no number, or half an IPv6 address
        return None


def _group_statistics(advantage: AdvantageConfig) -> bool:
    return advantage.mean == "group" or advantage.std == "group" or advantage.leave_one_out


def _check_batch(orch: OrchConfig, findings: Findings) -> None:
    batch, group = orch.batch_size, orch.rollouts_per_example
    if batch % group:
        lower = batch // group * group
        near = f"{lower} or {lower + group}" if lower else str(group)
        what = f"{group} rollouts a prompt do not divide batch_size ({batch})"
        findings.error("orch.rollouts_per_example", what, f"set orch.batch_size to {near}")
    if group == 1 and _group_statistics(orch.advantage) and orch.advantage.function is None:
        what = "a group of one has nothing to be compared with, so every advantage would be 0"
        findings.error(
            "orch.rollouts_per_example", what, "use 2 or more (8 to 16 is usual), or orch.advantage.mean=batch"
        )
    elif 1 < group < SMOKE_GROUP:
        findings.notice("orch.rollouts_per_example", f"groups of {group} suit a smoke run", "8 to 16 is usual")


def _check_sampling(orch: OrchConfig, findings: Findings) -> None:
    sampling = orch.sampling
    temperature = sampling.temperature
    ends = (temperature.start, temperature.end) if isinstance(temperature, TemperatureSchedule) else (temperature,)
    if min(ends) == 0 and orch.rollouts_per_example > 1:
        what = "0 makes all rollouts of a group equal, so there is nothing to learn from"
        findings.error("orch.sampling.temperature", what, "use a temperature above 0 (1.0 is usual)")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        what = f"is {sampling.min_tokens}, more than max_tokens ({sampling.max_tokens})"
        findings.error("orch.sampling.min_tokens", what, "lower it")
    if sampling.top_k > REPLAYED_IDS:
        what = f"is {sampling.top_k}, but at most {REPLAYED_IDS} kept tokens are stored for training"
        findings.error("orch.sampling.top_k", what, f"use at most {REPLAYED_IDS}, or -1 for the whole vocabulary")
    elif sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        what = (
            f"is truncated; the kept set of every token is stored (at most {REPLAYED_IDS} ids) and replayed in training"
        )
        findings.notice("orch.sampling", what)


def _check_advantage(orch: OrchConfig, findings: Findings) -> None:
    advantage = orch.advantage
    others = given(advantage, "mean", "std", "leave_one_out", "eps")
    if advantage.function is not None and others:
        what = f"replaces the built-in normaliser, so {', '.join(others)} would have no effect"
        findings.error("orch.advantage.function", what, "keep one of them")
    if advantage.leave_one_out and advantage.mean != "group":
        what = f"needs orch.advantage.mean group, not {advantage.mean}"
        findings.error("orch.advantage.leave_one_out", what, "set mean to group, or leave_one_out to false")
    if advantage.std == "none" and given(advantage, "eps"):
        findings.error("orch.advantage.eps", "is not used with std none", "remove it")
    if advantage.std is not None:
        check_uniform(orch, advantage.std, findings)


def check_uniform(orch: OrchConfig, std: str, findings: Findings) -> None:
    """`std` as the run has it; the loss decides where orch.advantage.std is not given."""
    mean, uniform = orch.advantage.mean, orch.groups.uniform
    if keeps_uniform(mean, std) and uniform in ("refill", "skip"):
        what = f"is {uniform}, but batch statistics keep groups whose rewards are all equal"
        findings.error("orch.groups.uniform", what, "leave it out, or use group statistics in orch.advantage")
    if uniform == "keep" and std == "group" and mean != "group":
        what = f"is keep, but with orch.advantage.mean {mean} equal rewards would be divided by their spread, zero"
        findings.error("orch.groups.uniform", what, "leave it out, or set orch.advantage.std to batch or none")


def _check_reward(orch: OrchConfig, findings: Findings) -> None:
    reward = orch.reward
    if reward.scale == 0:
        findings.error("orch.reward.scale", "0 makes all rewards equal", "leave it out for 1")
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        findings.error(
            "orch.reward.clip", f"bounds are crossed: {show(reward.clip)}", "write [low, high] with low < high"
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
                    f"{key}.{index}", f"a second environment called {show(env.label)}", "give it another name:"
                )
            seen.add(env.label)


def _check_staleness(orch: OrchConfig, findings: Findings) -> None:
    if orch.max_off_policy_steps is None:
        return
    if orch.weight_sync_interval == 0:
        what = "is not used with weight_sync_interval 0, where nothing goes stale"
        findings.error("orch.max_off_policy_steps", what, "remove it")
    reached = orch.max_async_level + max(orch.weight_sync_interval, 1) - 1
    if orch.max_off_policy_steps < reached:
        what = f"is {orch.max_off_policy_steps}, but rollouts can get {reached} versions old; those are dropped"
        findings.notice("orch.max_off_policy_steps", what)


def _check_eval(orch: OrchConfig, findings: Findings) -> None:
    if orch.eval is None:
        return
    trained = {env.label: env for env in orch.env}
    for index, env in enumerate(orch.eval.env or []):
        other = trained.get(env.label)
        if other is not None and (env.id, env.args) != (other.id, other.args):
            what = f"is called {show(env.label)} like an environment of training, but is another"
            findings.error(f"orch.eval.env.{index}", what, "give it another name:")
    cadences = given(orch.eval, "interval", "interval_epochs", "interval_seconds")
    for name in cadences[1:]:
        findings.error(f"orch.eval.{name}", f"excludes orch.eval.{cadences[0]}, which is set too", "keep one of them")
    if orch.weight_sync_interval == 0:
        what = "would score the same weights every time: with weight_sync_interval 0 the sampler keeps the first ones"
        findings.error("orch.eval", what, "remove it, or set orch.weight_sync_interval to 1 or more")
    elif orch.eval.interval % orch.weight_sync_interval:
        what = f"is no multiple of weight_sync_interval ({orch.weight_sync_interval})"
        findings.notice("orch.eval.interval", what, "an evaluation scores the weights of the last sync")


def check_dataset(dataset: DatasetConfig, key: str, findings: Findings) -> None:
    """Existence, split and columns of local data; a hub data set is checked when it is opened."""
    if dataset.path is not None and dataset.name is not None:
        findings.error(f"{key}.name", "excludes path, which is set too", "keep one of the two")
    elif dataset.path is None and dataset.name is None:
        findings.error(key, "names no data", f"set {key}.path or {key}.name")
    if dataset.path is None:
        return
    file = _data_file(dataset, key, findings)
    if file is not None:
        _check_columns(dataset, file, key, findings)


def _data_file(dataset: DatasetConfig, key: str, findings: Findings) -> Path | None:
    path = Path(dataset.path or "").expanduser()
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            what = f"{show(dataset.path)} is not one of {', '.join(DATA_SUFFIXES)}"
            findings.error(f"{key}.path", what, "convert it, one JSON object a line is simplest")
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
        findings.error(f"{key}.split", what, f"did you mean `{near}`?" if near else f"there is {', '.join(splits)}")
    elif not files:
        findings.error(f"{key}.path", f"{show(dataset.path)} holds no data", f"put {dataset.split}.jsonl in it")
    return chosen[0] if chosen else None


def _check_columns(dataset: DatasetConfig, file: Path, key: str, findings: Findings) -> None:
    columns = _first_columns(file)
    for ours, theirs in dataset.columns.items():
        if columns is not None and theirs not in columns:
            near = nearest(theirs, columns)
            what = f"{show(str(file))} has no column {show(theirs)}"
            fix = f"did you mean `{near}`?" if near else f"it has {', '.join(columns)}"
            findings.error(f"{key}.columns.{ours}", what, fix)


def _first_columns(file: Path) -> list[str] | None:
    """Column names of a text file's first row; None where only a reader could tell."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            first = next((line for line in islice(lines, 100) if line.strip()), "")
        if file.suffix == ".csv":
            return [name.strip().strip('"') for name in first.split(",")]
        row = json.loads(first) if file.suffix == ".jsonl" else None
    except (OSError, ValueError):
        return None
    return list(row) if isinstance(row, dict) else None
