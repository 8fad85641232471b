"""What the loop is made of, how it is set, and what it remembers between steps. build/ fills these in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal.observability.console import Console
from shoal.observability.events import EventLog
from shoal.observability.run_dir import RunDir
from shoal.observability.spans import Phases
from shoal.observability.watchdog import Watchdog
from shoal.orchestrator.cadence import EvalCadence, SaveCadence
from shoal.orchestrator.collect import Collector
from shoal.orchestrator.evaluate import Evaluator
from shoal.orchestrator.learn import Learner, OnDevice
from shoal.orchestrator.prompts import PromptStream
from shoal.orchestrator.ranks import Alone
from shoal.orchestrator.records import TokenText
from shoal.protocols import MetricSink, Ranks, RolloutEngine, WeightChannel


class Files(Protocol):
    """The policy's side of a checkpoint."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


class RunSinks(MetricSink, Protocol):
    """The run directory's record of a step, and the trackers'."""

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """More about a step that is logged already."""
        ...


@dataclass
class Parts:
    """What build.py puts together."""

    engine: RolloutEngine
    weights: WeightChannel
    collector: Collector
    stream: PromptStream
    learner: Learner
    files: Files
    evaluator: Evaluator | None
    run_dir: RunDir
    events: EventLog
    console: Console
    watchdog: Watchdog
    sinks: RunSinks  # writes metrics.jsonl first
    phases: Phases
    on_device: OnDevice
    token_text: TokenText
    ranks: Ranks = field(default_factory=Alone)
    save_shards: Callable[[Path], None] | None = (
        None  # where weights are sharded: all ranks call it before `files.save`
    )

    def doing(self, what: str) -> None:
        """Progress was made, and this comes next: heartbeats and stall reports name it."""
        self.console.waiting(what)
        self.watchdog.beat(what)


@dataclass(frozen=True)
class LoopSettings:
    max_steps: int
    save: SaveCadence
    evaluation: EvalCadence | None = None
    save_total_limit: int | None = 2
    keep_best: bool = False
    stop_after: int | None = None  # evaluations without a better one
    sigma_at: Callable[[int], float] | None = None  # QeRL noise of a step
    next_command: str | None = None
    show_completions: int = 0  # with every console line
    sync_deadline_s: float = 600.0
    save_deadline_s: float = 600.0


@dataclass
class Progress:
    """Everything the loop itself remembers between steps."""

    step: int = 0  # steps done = version of the policy
    evaluated_start: bool = False
    scored: bool = False  # some rollout got a reward
    non_finite: int = 0
    flat: int = 0
    flat_reasons: list[str] = field(default_factory=list)  # why groups were dropped in those flat steps
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    owes_evaluation: bool = False  # of this step; a signal cut it short
