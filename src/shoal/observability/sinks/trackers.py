"""The experiment trackers Shoal can report to. Each is imported only when it is opened, in its sink's own thread."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observability.sinks.tables import COLUMNS, as_markdown
from shoal.protocols import MetricSink

Rows = Sequence[Mapping[str, Any]]
OUR_RUN = "shoal.run_id"


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """What a tracker is told about a run."""

    folder: Path
    project: str = "shoal"
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    metric_names: str = "native"
    completions: int = 0  # rows of the completions table a step
    run_id: str | None = None  # as in status.json: a run that is resumed continues the tracker's run, too

    @property
    def title(self) -> str:
        return self.name or self.folder.name


@dataclass(frozen=True, slots=True)
class Tracker:
    package: str
    install: str
    open: Callable[[TrackerRun], MetricSink]


class WandbSink:
    """Online or offline as WANDB_MODE and `wandb offline` say; files lie under logs/."""

    def __init__(self, run: TrackerRun) -> None:
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=run.project,
            name=run.title,
            id=run.run_id,
            dir=str(run.folder / "logs"),
            config=dict(run.config),
            resume="allow",
        )

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
    """To MLFLOW_TRACKING_URI, or to files under logs/mlflow where none is set."""

    def __init__(self, run: TrackerRun) -> None:
        mlflow = importlib.import_module("mlflow")
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (run.folder / "logs" / "mlflow").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self._run_id = self._same_run(experiment_id, run.run_id)
        if self._run_id is None:
            tags = {OUR_RUN: run.run_id} if run.run_id else {}
            self._run_id = self._client.create_run(experiment_id, run_name=run.title, tags=tags).info.run_id

    def _same_run(self, experiment_id: str, run_id: str | None) -> str | None:
        """The run that an earlier process of this run reported to, open again; MLflow chooses ids, so ours is a tag."""
        if run_id is None:
            return None
        found = self._client.search_runs([experiment_id], f"tags.`{OUR_RUN}` = '{run_id}'", max_results=1)
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


TRACKERS = {
    "wandb": Tracker("wandb", "pip install 'shoal[wandb]'", WandbSink),
    "tensorboard": Tracker("tensorboardX", "pip install 'shoal[tensorboard]'", TensorboardSink),
    "trackio": Tracker("trackio", "pip install 'shoal[trackio]'", TrackioSink),
    "mlflow": Tracker("mlflow", "pip install 'shoal[mlflow]'", MlflowSink),
}
