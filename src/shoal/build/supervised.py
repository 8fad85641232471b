"""A supervised run: the model, its policy and the rows, trained on one device with the recorder of a run around it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.build import ends
from shoal.build.model import Model, PolicyFiles, load, make_policy
from shoal.build.run import make_sinks
from shoal.config.schema import SftConfig
from shoal.errors import Interrupted
from shoal.observability.console import BaseConsole
from shoal.observability.events import EventLog
from shoal.observability.run_dir import RunDir
from shoal.orchestrator.cadence import SaveCadence
from shoal.orchestrator.signals import stop_signals
from shoal.orchestrator.supervised import SupervisedRecorder
from shoal.types import Task


def train_on_completions(
    config: SftConfig, tasks: Sequence[Task], bad_rows: Sequence[str], run_dir: RunDir, console: BaseConsole
) -> tuple[str, int]:
    """Train to the end or to a signal, and export; returns the outcome and the steps done."""
    from shoal.trainer.sft import SupervisedSteps, supervised_samples, train_supervised

    train = config.train
    events = EventLog(run_dir, console)
    with console.progress("looking for a checkpoint", quiet=True):
        checkpoint = ends.newest_checkpoint(run_dir, events)
    for notice in bad_rows:
        events.warn("data", notice)
    with console.progress(f"loading {train.model}"):
        model = load(train)
    if model.precision.notice:
        console.note(model.precision.notice)
    samples, too_long = supervised_samples(tasks, model.chat, _end_id(model), train.sequence_len)
    if too_long:
        events.warn("data", f"{too_long} of {len(tasks)} rows do not fit into train.sequence_len and are set aside")
    per_epoch = max(1, len(samples) // config.batch_size)
    total = train.max_steps or per_epoch * (train.epochs or 1)
    policy = make_policy(train, model, total)
    files = PolicyFiles(policy, model.chat)
    steps = SupervisedSteps(
        policy, samples, config.batch_size, train.sequence_len, train.per_device_train_batch_size or 1, train.seed
    )
    first = 1
    if checkpoint is not None:
        console.waiting(f"reading {checkpoint.path.name}")
        files.load(checkpoint.path)
        first = checkpoint.step + 1
    save = SaveCadence(train.save_epochs * per_epoch if train.save_epochs else train.save_steps, train.save_seconds)
    sinks = make_sinks(config, run_dir, events)
    console.waiting(f"training of step {first}")
    console.begin(f"supervised training of {train.model} for {total} steps in {run_dir.path}", total, first - 1)
    try:
        command = ends.resume_command(config)
        with stop_signals(lambda: ends.give_up(run_dir, command), console.note) as stop:
            record = SupervisedRecorder(
                run_dir, events, console, sinks, files, save, total, train.save_total_limit, command, stop
            )
            done = train_supervised(steps, first, total, record)
            if stop:
                raise Interrupted(f"interrupted after step {done}; the state is saved", stop[0])
            console.waiting("writing the final weights")  # to their end: a signal that comes meanwhile finds it done
            with run_dir.export() as folder:
                files.export(folder)
    finally:
        sinks.close()
    return "finished", done


def _end_id(model: Model) -> int:
    """What a completion is taught to end with: the template's own end of a turn, where it has one."""
    from shoal.models.load import turn_end_id

    end = turn_end_id(model.chat.tokenizer)
    return end if end is not None else model.eos_token_ids[-1]
