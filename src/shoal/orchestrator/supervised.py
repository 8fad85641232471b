"""What follows each supervised step: metrics, journal, checkpoints, and when to stop. Called by api.sft; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import StoppedByPolicy
from shoal.observability.console import Console
from shoal.observability.events import EventLog
from shoal.observability.run_dir import RunDir
from shoal.observability.spans import Phases, throughput
from shoal.orchestrator.cadence import SaveCadence
from shoal.orchestrator.endings import MAX_NON_FINITE
from shoal.orchestrator.loop import Files
from shoal.protocols import MetricSink


@dataclass
class SupervisedRecorder:
    run_dir: RunDir
    events: EventLog
    console: Console
    sinks: MetricSink  # writes metrics.jsonl first
    files: Files
    save: SaveCadence
    total: int
    save_total_limit: int
    next_command: str
    stop: Sequence[int]  # holds an exit code once a signal arrived
    _phases: Phases = field(default_factory=Phases)
    _non_finite: int = 0  # steps in a row

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Record step `step`; true if it must be the last for now."""
        self.events.step = step
        time_s = self._phases.take()["time/step"]
        metrics = {**metrics, "time/step": time_s}
        metrics |= throughput({**metrics, "time/train": time_s}, metrics["tokens/completion"])
        self.sinks.log(step, metrics)
        self.run_dir.append_journal(step, {"version": step})
        self.console.step(step, metrics)
        self._count_skipped(step, bool(metrics["optim/skipped"]))
        gives_up = self._non_finite >= MAX_NON_FINITE
        if self.stop or gives_up or self.save.due(step) or (step == self.total and not self.save.off):
            self._save(step)
        if step < self.total:
            self.console.waiting(f"training of step {step + 1}")
        if gives_up:
            raise StoppedByPolicy(
                f"stopped after {MAX_NON_FINITE} steps in a row with non-finite gradients; lower train.learning_rate "
                "or look at the data, then resume from the last checkpoint"
            )
        return bool(self.stop)

    def _count_skipped(self, step: int, skipped: bool) -> None:
        self._non_finite = self._non_finite + 1 if skipped else 0
        if skipped:
            self.events.warn("non-finite", f"step {step}: the gradient is not finite; the optimizer step is skipped")

    def _save(self, step: int) -> None:
        self.console.waiting(f"saving the checkpoint of step {step}")
        with self.run_dir.checkpoint(step) as folder:
            self.files.save(folder)
        self.save.saved()
        self.run_dir.prune_checkpoints(self.save_total_limit)
        self.run_dir.write_status(
            "running", step=step, reason="checkpoint", resumable=True, next_command=self.next_command
        )
