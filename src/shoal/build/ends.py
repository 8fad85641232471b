"""How a run ends and how it goes on: its status, and the checkpoint to continue from. No torch."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.build.launch import is_main
from shoal.config.load import load_run, load_sft
from shoal.config.schema import RunConfig, SftConfig
from shoal.errors import EXIT_INTERRUPTED, ConfigError, Interrupted, ShoalError, StoppedByPolicy, Terminated
from shoal.observability.checkpoints import Checkpoint, onward
from shoal.observability.events import EventLog
from shoal.observability.follower import FollowerRunDir
from shoal.observability.journal import damaged_lines
from shoal.observability.run_dir import RunDir, read_status
from shoal.observability.text import count


def newest_checkpoint(run_dir: RunDir, events: EventLog) -> Checkpoint | None:
    """Where to go on from; whatever came after it is cut."""
    checkpoint = run_dir.newest_good_checkpoint()
    for reason in checkpoint.skipped if checkpoint is not None else []:
        events.warn("checkpoint", f"a checkpoint was passed over: {reason}")
    damaged = {file.path.name: damaged_lines(file.path) for file in (run_dir.metrics, run_dir.journal, run_dir.events)}
    run_dir.cut_to(checkpoint.step if checkpoint is not None else -1)
    for name, lines in damaged.items():
        if lines:
            events.warn("damaged", f"{name}: {count(len(lines), 'line')} could not be read and left out: {lines[:9]}")
    return checkpoint


def record_end(run_dir: RunDir | FollowerRunDir, command: str, work: Callable[[], tuple[str, int]]) -> None:
    """status.json says how it ended, whatever happened; `command` is how to go on."""

    def write(state: Any, reason: str, resumable: bool, step: int | None = None) -> None:
        at = run_dir.status.get("step", 0) if step is None else step
        run_dir.write_status(
            state, step=at, reason=reason, resumable=resumable, next_command=command if resumable else None
        )

    try:
        outcome, step = work()
    except Interrupted as error:
        write("interrupted", str(error), True)
        raise Interrupted(f"{error}; to continue: {command}", error.exit_code) from error
    except StoppedByPolicy as error:
        write("stopped", str(error), True)
        raise
    except KeyboardInterrupt as error:
        reason = f"{str(error) or 'interrupted'} while it was loading; nothing is lost"
        write("interrupted", reason, True)
        raise Terminated(f"{reason}; to continue: {command}", getattr(error, "exit_code", EXIT_INTERRUPTED)) from error
    except ConfigError as error:
        if not run_dir.free_if_untouched():
            write("failed", str(error), True)
        raise
    except BaseException as error:
        with contextlib.suppress(ShoalError):  # the disk may be what failed
            write("failed", f"{type(error).__name__}: {error}", True)
        raise
    write("solved" if outcome == "solved" else "finished", f"{outcome} after step {step}", False, step)


def give_up(run_dir: RunDir | FollowerRunDir, command: str | None) -> str | None:
    """A second signal ends the process where it is. The status says so, and what there is to go on from."""
    if run_dir.status.get("state") in ("finished", "solved"):
        return None
    reason = f"ended at once by a second signal; {onward(run_dir.path / 'checkpoints')}"
    at = run_dir.status.get("step", 0)
    run_dir.write_status("interrupted", step=at, reason=reason, resumable=True, next_command=command)
    return f"{reason}; to continue: {command}" if command else reason


def already_done(path: Path, config: RunConfig | SftConfig) -> bool:
    """A finished run says so; one that was given more steps or epochs since goes on."""
    status = read_status(path) if (path / "status.json").exists() else {}
    if status.get("state") not in ("finished", "solved"):
        return False
    load = load_run if isinstance(config, RunConfig) else load_sft
    earlier, now = load(str(path / "config.yaml")).config.train, config.train
    longer = (now.max_steps or 0) > (earlier.max_steps or 0) or (now.epochs or 0) > (earlier.epochs or 0)
    if not longer and is_main():
        done = f"{path}: this run is {status['state']} at step {status['step']}"
        print(f"{done}; nothing is left to do, unless it is given more steps or epochs")
    return not longer


def resume_command(config: RunConfig | SftConfig) -> str:
    verb = "grpo" if isinstance(config, RunConfig) else "sft"
    return f"shoal {verb} {shlex.quote(str(Path(config.train.output_dir) / 'config.yaml'))} --resume"


def last_line(path: Path) -> str:
    """Where a run that came to its end is found."""
    said = [str(read_status(path)["reason"])]
    if (path / "report.html").exists():
        said.append(f"the report is {path / 'report.html'}")
    if (path / "final").exists():
        said.append(f"the trained weights are in {path / 'final'}")
    return "; ".join(said)
