"""Experiment trackers (wandb, tensorboard, trackio, mlflow), and metrics and completions in the form they expect.

A tracker is imported only when it is opened, in the thread of its sink. `train.metric_names` selects the metric names
of TRL or verl, so that existing dashboards keep working; a metric without a counterpart keeps its name. metrics.jsonl
always has Shoal's names. Called by observer.py.
"""

from __future__ import annotations

import contextlib
import importlib
import netrc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from shoal.core.types import Rollout, RolloutGroup
from shoal.runs.secrets import redact


class MetricSink(Protocol):
    """A destination of metrics, such as a tracker. A failure is counted and never stops training."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_completions(self, step: int, rows: Sequence[Any], /) -> None:
        """Log some completions of the step, as a table if the tracker supports tables."""

    def close(self) -> Any: ...


# The callbacks of Hugging Face's Trainer add the prefix train/ to training metrics.
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
    "dpo/loss": "train/loss",
    "dpo/accuracy": "train/rewards/accuracies",
    "dpo/margin": "train/rewards/margins",
    "dpo/chosen_reward": "train/rewards/chosen",
    "dpo/rejected_reward": "train/rewards/rejected",
    "dpo/chosen_logprobs": "train/logps/chosen",
    "dpo/rejected_logprobs": "train/logps/rejected",
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
COLUMNS = ("step", "env", "prompt", "completion", "reward", "parts", "advantage", "status")
SCHEMES = {"native": ({}, ()), "trl": (_TRL, _TRL_FAMILIES), "verl": (_VERL, _VERL_FAMILIES)}


def rename(scheme: str, metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """The metrics of a step under the names of `scheme`, plus the values that only exist there."""
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


def completion_rows(step: int, groups: Sequence[RolloutGroup], limit: int) -> list[dict[str, Any]]:
    """At most `limit` rows: one rollout of each group, then a second one of each, and so on."""
    return [_row(step, rollout) for rollout in islice(_in_turn(groups), limit)]


def _in_turn(groups: Sequence[RolloutGroup]) -> Iterator[Rollout]:
    for rollouts in zip_longest(*(group.rollouts for group in groups)):
        yield from (rollout for rollout in rollouts if rollout is not None)


def _row(step: int, rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.prompt
    return {
        "step": step,
        "env": prompt.env,
        "prompt": _text(prompt.messages),
        "completion": _text(rollout.messages[len(prompt.messages) :]),
        "reward": rollout.reward,
        "parts": ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items()),
        "advantage": rollout.advantage,
        "status": rollout.status,
    }


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table. Characters that could be markup are escaped."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;"), ("\n", " ⏎ ")):
        text = text.replace(mark, written)
    return text


Rows = Sequence[Mapping[str, Any]]
RUN_ID_TAG = "shoal.run_id"


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """The data of a run that a tracker receives."""

    folder: Path
    project: str = "shoal"
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    metric_names: str = "native"
    completions: int = 0  # rows of the completions table per step
    run_id: str | None = None  # from status.json: a resumed run continues the same tracker run

    @property
    def title(self) -> str:
        return self.name or self.folder.name


@dataclass(frozen=True, slots=True)
class Tracker:
    package: str
    install: str
    open: Callable[[TrackerRun], MetricSink]
    problem: Callable[[], str | None] = lambda: None  # of the account, checked before anything loads


class WandbSink:
    """Online or offline, set by WANDB_MODE or `wandb offline`. Local files are in logs/."""

    def __init__(self, run: TrackerRun) -> None:
        self._wandb = importlib.import_module("wandb")
        words = sys.argv[:]  # wandb stores the command line, which may hold the API key
        sys.argv[:] = [redact(word) for word in words]
        try:
            self._run = self._wandb.init(
                project=run.project,
                name=run.title,
                id=run.run_id,
                dir=str(run.folder / "logs"),
                config=dict(run.config),
                resume="allow",
            )
        finally:
            sys.argv[:] = words

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        data = [[row[name] for name in COLUMNS] for row in rows]
        self._run.log({"completions": self._wandb.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    def __init__(self, run: TrackerRun) -> None:
        tensorboard = importlib.import_module("tensorboardX")
        self._writer = tensorboard.SummaryWriter(logdir=str(run.folder / "logs" / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_completions(self, step: int, rows: Rows) -> None:
        self._writer.add_text("completions", as_markdown(rows), step)

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    def __init__(self, run: TrackerRun) -> None:
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=run.project,
            name=run.title,
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        import pandas

        frame = pandas.DataFrame([{name: row[name] for name in COLUMNS} for row in rows])
        self._run.log({"completions": self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Writes to MLFLOW_TRACKING_URI, or to files in logs/mlflow if it is not set."""

    def __init__(self, run: TrackerRun) -> None:
        mlflow = importlib.import_module("mlflow")
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (run.folder / "logs" / "mlflow").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self._run_id = self._reopen_run(experiment_id, run.run_id)
        if self._run_id is None:
            tags = {RUN_ID_TAG: run.run_id} if run.run_id else {}
            self._run_id = self._client.create_run(experiment_id, run_name=run.title, tags=tags).info.run_id

    def _reopen_run(self, experiment_id: str, run_id: str | None) -> str | None:
        """Reopen the MLflow run of an earlier process of this run. MLflow assigns ids, so ours is a tag."""
        if run_id is None:
            return None
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{run_id}'", max_results=1)
        for earlier in found:
            self._client.update_run(earlier.info.run_id, status="RUNNING")
            return earlier.info.run_id
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def log_completions(self, step: int, rows: Rows) -> None:
        data = {name: [row[name] for row in rows] for name in COLUMNS}
        self._client.log_table(self._run_id, data, artifact_file=f"completions/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _wandb_problem() -> str | None:
    """What is wrong with the API key of an online run; None if it may be used. Nothing is sent."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    ways = "export WANDB_API_KEY, run `wandb login`, or export WANDB_MODE=offline"
    key = os.environ.get("WANDB_API_KEY", "")
    if key:
        return None if len(key.strip()) >= WANDB_KEY_LENGTH else f"WANDB_API_KEY is not an API key (too short); {ways}"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [os.environ.get("NETRC", "~/.netrc"), "~/_netrc"]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        for file in (Path(name).expanduser() for name in files):
            if file.is_file() and netrc.netrc(str(file)).authenticators(host):
                return None
    return f"there is no API key; {ways}"


WANDB_KEY_LENGTH = 40
TRACKERS = {
    "wandb": Tracker("wandb", "pip install 'shoal[wandb]'", WandbSink, _wandb_problem),
    "tensorboard": Tracker("tensorboardX", "pip install 'shoal[tensorboard]'", TensorboardSink),
    "trackio": Tracker("trackio", "pip install 'shoal[trackio]'", TrackioSink),
    "mlflow": Tracker("mlflow", "pip install 'shoal[mlflow]'", MlflowSink),
}
