"""A supervised run: the model, its policy and the rows, trained on one device with the recorder of a run around it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.build import ends
from shoal.build.fits import within_memory
from shoal.build.model import Model, PolicyFiles, load, make_policy
from shoal.build.plan import tell, training_plan
from shoal.build.run import make_sinks
from shoal.config.schema import SftConfig
from shoal.errors import Interrupted
from shoal.observability.console import BaseConsole
from shoal.observability.events import EventLog
from shoal.observability.run_dir import RunDir
from shoal.observability.text import count
from shoal.orchestrator.cadence import SaveCadence
from shoal.orchestrator.signals import stop_signals
from shoal.orchestrator.supervised import SupervisedRecorder
from shoal.types import Task

if TYPE_CHECKING:
    from shoal.trainer.sft import SupervisedSteps

REMEDIES = "set train.recompute=true"


@dataclass
class Lesson:
    """What is trained, on what, and how far."""

    steps: SupervisedSteps
    files: PolicyFiles
    total: int  # steps of the whole run
    done: int = 0


def train_on_completions(
    config: SftConfig, tasks: Sequence[Task], bad_rows: Sequence[str], run_dir: RunDir, console: BaseConsole
) -> tuple[str, int]:
    """Train to the end or to a signal, and export; returns the outcome and the steps done."""
    events = EventLog(run_dir, console)
    with console.progress("looking for a checkpoint", quiet=True):
        checkpoint = ends.newest_checkpoint(run_dir, events)
    for notice in bad_rows:
        events.warn("data", notice)
    lesson = _prepare(config, tasks, events, console)
    if checkpoint is not None:
        console.waiting(f"reading {checkpoint.path.name}")
        lesson.files.load(checkpoint.path)
        lesson.done = checkpoint.step
    _train(config, lesson, run_dir, events, console)
    return "finished", lesson.done


def _prepare(config: SftConfig, tasks: Sequence[Task], events: EventLog, console: BaseConsole) -> Lesson:
    """The model and its policy, and the rows that fit into a sequence."""
    from shoal.trainer.sft import SupervisedSteps, supervised_samples

    train = config.train
    with console.progress(f"loading {train.model}"):
        model = load(train)
    for notice in model.notices:
        console.note(notice)
    samples, too_long = supervised_samples(tasks, model.chat, _end_id(model), train.sequence_len)
    if too_long:
        events.warn("data", f"{too_long} of {len(tasks)} rows do not fit into train.sequence_len and are set aside")
    total = train.max_steps or max(1, len(samples) // config.batch_size) * (train.epochs or 1)
    with console.progress("measuring memory", quiet=model.decoder.device.type == "cpu"):
        policy = make_policy(train, model, total)
        plan = training_plan(train, config.batch_size, model, policy)
    if plan is not None:
        tell(plan, None, console, events)
    rows = train.per_device_train_batch_size or (1 if plan is None else None)
    tokens = plan.micro_batch_tokens if plan is not None and rows is None else None
    steps = SupervisedSteps(policy, samples, config.batch_size, train.sequence_len, rows, tokens, train.seed)
    return Lesson(steps, PolicyFiles(policy, model.chat), total)


def _train(config: SftConfig, lesson: Lesson, run_dir: RunDir, events: EventLog, console: BaseConsole) -> None:
    """The steps that are left, and the final weights."""
    from shoal.trainer.sft import train_supervised

    train, command = config.train, ends.resume_command(config)
    every = train.save_epochs * lesson.steps.steps_per_epoch if train.save_epochs else train.save_steps
    save = SaveCadence(every, train.save_seconds)
    with contextlib.closing(make_sinks(config, run_dir, events)) as sinks:
        console.waiting(f"training of step {lesson.done + 1}")
        said = f"supervised training of {train.model} for {count(lesson.total, 'step')} in {run_dir.path}"
        console.begin(said, lesson.total, lesson.done)
        with stop_signals(lambda: ends.give_up(run_dir, command), console.note) as stop:
            record = SupervisedRecorder(
                run_dir, events, console, sinks, lesson.files, save, lesson.total, train.save_total_limit, command, stop
            )
            work = (train_supervised, lesson.steps, lesson.done + 1, lesson.total, record)
            lesson.done = within_memory(REMEDIES, *work)
            if stop:
                raise Interrupted(f"interrupted after step {lesson.done}; the state is saved", stop[0])
            console.waiting("writing the final weights")  # to their end: a signal that comes meanwhile finds it done
            with run_dir.export() as folder:
                lesson.files.export(folder)


def _end_id(model: Model) -> int:
    """What a completion is taught to end with: the template's own end of a turn, where it has one."""
    from shoal.models.load import turn_end_id

    end = turn_end_id(model.chat.tokenizer)
    return end if end is not None else model.eos_token_ids[-1]
