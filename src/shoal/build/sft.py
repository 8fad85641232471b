"""Supervised and preference training on one device, with the metrics, journal and checkpoints of a run.

Called by api.sft and api.dpo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shoal.build.load import resume_command
from shoal.build.model import LoadedModel, PolicyFiles, explain_oom, load, make_policy
from shoal.build.parts import make_sinks
from shoal.build.signals import stop_signals
from shoal.build.workspace import Stages, end_at_once, newest_checkpoint
from shoal.config.schema import DpoConfig, SupervisedConfig
from shoal.core.errors import Interrupted, StoppedByPolicy
from shoal.core.metrics import throughput
from shoal.core.protocols import Files
from shoal.core.state import SaveCadence
from shoal.core.stop_rules import MAX_NON_FINITE
from shoal.core.types import Sample, Task
from shoal.envs.datasets import DataNotice
from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir
from shoal.watch.console import BaseConsole, Console
from shoal.watch.observer import Phases
from shoal.watch.text import count
from shoal.watch.trackers import MetricSink

if TYPE_CHECKING:
    from shoal.trainer.supervised import SupervisedSteps


def _phases() -> Phases:
    from shoal.models.graph_cache import capture_seconds

    return Phases(counters={"capture": capture_seconds})


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
    stop: Sequence[int]  # the exit code, once a signal has arrived
    _phases: Phases = field(default_factory=_phases)
    _non_finite: int = 0  # steps in a row

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Record a step. Returns true if training must stop after it."""
        self.events.step = step
        times = self._phases.take()
        metrics = {**metrics, **{name: times[name] for name in ("time/step", "time/capture") if name in times}}
        metrics |= throughput({**metrics, "time/train": times["time/step"]}, metrics["tokens/completion"])
        self.sinks.log(step, metrics)
        self.run_dir.append_journal(step, {"version": step})
        self.console.step(step, metrics)
        self._non_finite = self._non_finite + 1 if metrics["optim/skipped"] else 0
        if self._non_finite:
            self.events.warn("non-finite", f"step {step}: the gradient is not finite; the optimizer step is skipped")
        gives_up = self._non_finite >= MAX_NON_FINITE
        if self.stop or gives_up or self.save.due(step) or (step == self.total and not self.save.off):
            self._save(step)
        if step < self.total:
            self.console.waiting(f"training of step {step + 1}")
        if gives_up:
            raise StoppedByPolicy(
                f"stopped after {MAX_NON_FINITE} steps in a row with non-finite gradients; lower train.learning_rate "
                "or check the data, then resume from the last checkpoint"
            )
        return bool(self.stop)

    def _save(self, step: int) -> None:
        self.console.waiting(f"saving the checkpoint of step {step}")
        with self.run_dir.checkpoint(step) as folder:
            self.files.save(folder)
        self.save.saved()
        self.run_dir.prune_checkpoints(self.save_total_limit)
        self.run_dir.write_status(
            "running", step=step, reason="checkpoint", resumable=True, next_command=self.next_command
        )


REMEDIES = "set train.recompute=true"


@dataclass
class SupervisedState:
    """The model, the data and the position of the training."""

    steps: SupervisedSteps
    files: PolicyFiles
    total: int  # steps of the whole run
    done: int = 0


def train_on_completions(
    config: SupervisedConfig,
    tasks: Sequence[Task],
    bad_rows: Sequence[DataNotice],
    run_dir: RunDir,
    console: BaseConsole,
) -> tuple[str, int]:
    """Train to the end or to a signal, then export. Returns the outcome and the number of steps."""
    events = EventLog(run_dir, console)
    with console.progress("looking for a checkpoint", quiet=True):
        checkpoint = newest_checkpoint(run_dir, events)
    for notice in bad_rows:
        notice.record(events, console.note)
    state = _prepare(config, tasks, events, console)
    if checkpoint is not None:
        console.waiting(f"reading {checkpoint.path.name}")
        state.files.load(checkpoint.path)
        state.done = checkpoint.step
    _train(config, state, run_dir, events, console)
    return "finished", state.done


def _prepare(
    config: SupervisedConfig, tasks: Sequence[Task], events: EventLog, console: BaseConsole
) -> SupervisedState:
    """Load the model, and make the samples of the rows that fit into a sequence."""
    from shoal.build.memory_plan import reference_line, report_plan, training_plan

    train, stage = config.train, Stages(console)
    with stage("load", f"loading {train.model}"):
        model = load(train, {"chat_template": config.chat_template})
    for notice in model.notices:
        console.note(notice)
    with stage("data", "encoding the rows"):
        items, make_steps = _items(config, tasks, model, events)
    total = train.max_steps or max(1, len(items) // config.batch_size) * (train.epochs or 1)
    with stage("memory", "measuring memory", quiet=model.decoder.device.type == "cpu"):
        policy = make_policy(train, model, total)
        plan = training_plan(train, config.batch_size * len(items[0]), model, policy)
    for line in reference_line(policy):
        console.note(line)
    if plan is not None:
        report_plan(plan, None, console, events)
    rows = train.per_device_train_batch_size or (1 if plan is None else None)
    tokens = plan.micro_batch_tokens if plan is not None and rows is None else None
    steps = make_steps(policy, items, config.batch_size, train.sequence_len, rows, tokens, train.seed)
    stage.report(events, train.device)
    return SupervisedState(steps, PolicyFiles(policy, model.chat), total)


def _items(
    config: SupervisedConfig, tasks: Sequence[Task], model: LoadedModel, events: EventLog
) -> tuple[Sequence[Sequence[Sample]], Callable[..., SupervisedSteps]]:
    """The samples of each row of the data set, and what makes the steps that train on them."""
    from shoal.models.load import switch_off_dropout
    from shoal.trainer.supervised import PreferenceSteps, SupervisedSteps, preference_pairs, supervised_samples

    limits = (model.chat, _end_id(model), config.train.sequence_len)
    if isinstance(config, DpoConfig):
        switch_off_dropout(model.decoder.model)  # of an adapter: both passes of a step compute the same log-probs
        items, too_long = preference_pairs(tasks, *limits)
        make_steps = partial(PreferenceSteps, loss=config.loss)
    else:
        samples, too_long = supervised_samples(tasks, *limits)
        items, make_steps = [[sample] for sample in samples], SupervisedSteps
    if too_long:
        events.warn("data", f"{too_long} of {len(tasks)} rows do not fit into train.sequence_len and are skipped")
    return items, make_steps


def _train(
    config: SupervisedConfig, state: SupervisedState, run_dir: RunDir, events: EventLog, console: BaseConsole
) -> None:
    """Train the remaining steps and write the final weights."""
    from shoal.trainer.supervised import train_supervised

    train, command = config.train, resume_command(config)
    every = train.save_epochs * state.steps.steps_per_epoch if train.save_epochs else train.save_steps
    save = SaveCadence(every, train.save_seconds)
    with contextlib.closing(make_sinks(config, run_dir, events)) as sinks:
        console.waiting(f"training of step {state.done + 1}")
        title = f"{config.training} of {train.model} for {count(state.total, 'step')} in {run_dir.path}"
        console.begin(title, state.total, state.done)
        with stop_signals(lambda: end_at_once(run_dir, command), console.note) as stop:
            record = SupervisedRecorder(
                run_dir, events, console, sinks, state.files, save, state.total, train.save_total_limit, command, stop
            )
            work = (train_supervised, state.steps, state.done + 1, state.total, record)
            state.done = explain_oom(REMEDIES, *work)
            if stop:
                raise Interrupted(f"interrupted after step {state.done}; the state is saved", stop[0])
            console.waiting("writing the final weights")  # a signal during this is ignored: training is done
            with run_dir.export() as folder:
                state.files.export(folder)


def _end_id(model: LoadedModel) -> int:
    """The token that ends a completion: the end of a turn in the chat template, if it has one."""
    from shoal.models.tokenizer import turn_end_id

    end = turn_end_id(model.chat.tokenizer)
    return end if end is not None else model.eos_token_ids[-1]
