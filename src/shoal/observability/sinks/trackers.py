"""The experiment trackers Shoal can report to. Each is imported only when it is opened, in its sink's own thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.protocols import MetricSink


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """What a tracker is told about a run."""

    folder: Path
    project: str = "shoal"
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name or self.folder.name


@dataclass(frozen=True, slots=True)
class Tracker:
    package: str
    install: str
    open: Callable[[TrackerRun], MetricSink]


class WandbSink:
    def __init__(self, run: TrackerRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.project, name=run.title, dir=str(run.folder / "logs"), config=dict(run.config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    def __init__(self, run: TrackerRun) -> None:
        tensorboard = importlib.import_module("tensorboardX")
        self._writer = tensorboard.SummaryWriter(logdir=str(run.folder / "logs" / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    def __init__(self, run: TrackerRun) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(project=run.project, name=run.title, config=dict(run.config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    def __init__(self, run: TrackerRun) -> None:
        self._client = importlib.import_module("mlflow").MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self._run_id = self._client.create_run(experiment_id, run_name=run.title).info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS = {
    "wandb": Tracker("wandb", "pip install 'shoal[wandb]'", WandbSink),
    "tensorboard": Tracker("tensorboardX", "pip install 'shoal[tensorboard]'", TensorboardSink),
    "trackio": Tracker("trackio", "pip install 'shoal[trackio]'", TrackioSink),
    "mlflow": Tracker("mlflow", "pip install mlflow-skinny", MlflowSink),
}
