"""The ranks of a run on several devices: started with torch's elastic launcher, watched, and ended together.

The process that starts them does not train. It forwards signals, ends the other ranks when one dies, and reports why.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from shoal.build.load import PythonObjects, Run
from shoal.build.signals import handled_signals
from shoal.config.load import load_run
from shoal.config.resolve import as_yaml
from shoal.config.train import TrainConfig
from shoal.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    ConfigError,
    HardwareError,
    Interrupted,
    ShoalError,
    StorageError,
)
from shoal.runs.checkpoints import resume_hint
from shoal.runs.run_dir import RunDir, read_status

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by every launcher
LAUNCHER_PID = "SHOAL_LAUNCHER_PID"
POLL_S = 0.1
GRACE_S = 10.0  # after one rank has died, for the others to notice it and to record why they end
KILL_S = 5  # after SIGTERM, before SIGKILL


class RankError(ShoalError):
    """A rank ended the run; its exit code is the run's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launched() -> bool:
    return all(name in os.environ for name in LAUNCHED)


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def as_rank(given: PythonObjects | None) -> PythonObjects:
    """The same objects, with the rank that a launcher gave to this process."""
    given = given or PythonObjects()
    if not launched() or given.processes > 1:
        return given
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return replace(given, processes=int(os.environ["WORLD_SIZE"]), local_rank=local_rank)


def ranks_to_start(train: TrainConfig, given: PythonObjects | None) -> int:
    """The number of processes to start for train.gpus; 0 if this process trains, alone or under a launcher."""
    if train.gpus == 1 or launched():
        return 0
    count = max(1, train.gpus) if train.device == "cpu" else _visible_gpus(train)
    if count > 1 and given is not None and given != PythonObjects():
        raise ConfigError(
            f"train.gpus: Python objects cannot be handed to {count} processes; start the script itself with "
            f"torchrun --nproc-per-node {count}, and leave train.gpus out"
        )
    return count if count > 1 else 0


def _visible_gpus(train: TrainConfig) -> int:
    import torch

    found, wanted = torch.cuda.device_count(), train.gpus
    if wanted > found:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = f"CUDA_VISIBLE_DEVICES={listed} shows" if listed is not None else "this machine has"
        way = f"train.gpus={found}" if found else f"train.device=cpu, which starts {wanted} processes on the CPU"
        raise HardwareError(f"train.gpus: {wanted} GPUs were asked for and {where} {found or 'none'}; use {way}")
    return max(1, wanted or found)


def launch(run: Run, count: int) -> None:
    """Start the ranks and wait until all have ended. Raises what ended the run, unless it finished."""
    patience_s = run.config.train.save_deadline_s + run.config.orch.deadline_s
    start = {"resume": run.resume, "notices": run.notices, "next_command": run.command}
    end = _run(count, {"config.yaml": as_yaml(run.config, secrets=True), "start.json": json.dumps(start)}, patience_s)
    if end is not None:
        if end.code < 0:
            end = replace(end, reason=f"{end.reason}; {resume_hint(run.path / 'checkpoints')}")
        _write_status(run, end)
        end.throw(killed=EXIT_STOPPED)


def launch_command(words: Sequence[str], count: int, patience_s: float) -> None:
    """Ranks that each run a command of `shoal`, which reads and checks its own files.

    If a signal kills a rank, this process ends as if the signal had killed it, and a supervisor may start it again.
    """
    end = _run(count, {"start.json": json.dumps({"command": list(words)})}, patience_s)
    if end is not None:
        end.throw(killed=128 - end.code if end.signalled else EXIT_BUG)


@dataclass(frozen=True)
class _End:
    """How ranks failed."""

    reason: str
    code: int  # of the rank that is the reason; below 0: the signal that killed it
    main_pid: int
    signalled: bool  # after a signal to the launcher

    def throw(self, killed: int) -> NoReturn:
        """Raise it as an error of this process. `killed` is the exit code if a signal ended the rank."""
        code = killed if self.code < 0 else self.code if self.code > 1 else EXIT_BUG
        if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            raise Interrupted(self.reason, code)
        raise RankError(self.reason, code)


def _run(count: int, files: Mapping[str, str], patience_s: float) -> _End | None:
    """`files` are written for each rank; start.json is what `read_start` reads."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # The store lives in this process, on a port that the system chooses, so no other program can take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handled = handled_signals()  # before start_processes sets its handlers
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder, _handlers_kept():
        for rank in range(count):
            _write_start(Path(folder), rank, files)
        context = start_processes(
            "shoal",
            sys.executable,
            dict.fromkeys(range(count), ("-m", "shoal.cli.rank", folder)),
            {rank: _environment(rank, count, store.port) for rank in range(count)},
            DefaultLogsSpecs(log_dir=folder),
        )
        try:
            ended = _RankWatcher(context, patience_s, handled).wait()
        finally:
            context.close(signal.SIGKILL, KILL_S)
        return _conclude(ended, Path(folder), context.pids()[0])


def _write_start(folder: Path, rank: int, files: Mapping[str, str]) -> None:
    """Readable by this user alone and removed once read: unlike the run's config.yaml it contains secrets."""
    for name, text in files.items():
        file = folder / f"rank{rank}-{name}"
        file.touch(mode=0o600)
        file.write_text(text, "utf-8")


def read_start(folder: Path, rank: int) -> Run | list[str]:
    """The run of this rank, or the words of the `shoal` command that it executes. Removes the files."""
    file, start = folder / f"rank{rank}-config.yaml", folder / f"rank{rank}-start.json"
    data = json.loads(start.read_text("utf-8"))
    start.unlink()
    if not file.exists():
        return data["command"]
    config = load_run(str(file)).config
    file.unlink()
    return Run(config, data["resume"], notices=tuple(data["notices"]), next_command=data["next_command"])


def write_end(folder: Path, rank: int, message: str, *, lost: bool) -> None:
    """The reason why a rank ends, for the process that started it."""
    with contextlib.suppress(OSError):
        (folder / f"rank{rank}.json").write_text(json.dumps({"message": message, "lost": lost}), "utf-8")


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    elastic = {"TORCHELASTIC_RUN_ID": "shoal", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    limits = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    ids[LAUNCHER_PID] = os.getpid()
    return {name: str(value) for name, value in {**ids, **store, **elastic, **limits}.items()}


class _RankWatcher:
    """Waits until the last rank has ended and forwards signals: ranks save after the first and end at the second."""

    def __init__(self, context: Any, patience_s: float, handled: Sequence[int]) -> None:
        self._context = context
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._patience_s = patience_s
        self._until: float | None = None
        self.ended: dict[int, int] = {}  # rank → exit code, in the order they ended
        self.signalled = False
        self._handled = handled

    def wait(self) -> _RankWatcher:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, self._forward if number in self._handled else signal.SIG_IGN)
        while len(self.ended) < len(self._processes):
            self._poll()
            if self._until is not None and time.monotonic() > self._until:
                self._context.close(signal.SIGTERM, KILL_S)
                self._until = None
            time.sleep(POLL_S)
        return self

    def _poll(self) -> None:
        for rank, process in self._processes.items():
            if rank in self.ended or process.poll() is None:
                continue
            self.ended[rank] = process.returncode
            if process.returncode != 0 and self._until is None and not self.signalled:
                self._until = time.monotonic() + GRACE_S

    def _forward(self, number: int, _: object) -> None:
        patience_s = KILL_S if self.signalled else self._patience_s
        self.signalled, self._until = True, time.monotonic() + patience_s
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)  # to the rank alone, which ends its reward workers itself


def _conclude(watcher: _RankWatcher, folder: Path, main_pid: int) -> _End | None:
    failed = {rank: code for rank, code in watcher.ended.items() if code != 0}
    if not failed:
        return None
    ends = {rank: _read_end(folder, rank) for rank in failed}
    # A killed rank is the reason first. A rank that only lost contact with the others is the reason last.
    rank = min(failed, key=lambda r: (watcher.signalled and r != 0, failed[r] > 0, ends[r].get("lost", False), r))
    code, message = failed[rank], str(ends[rank].get("message", ""))
    if code < 0:
        name = signal.Signals(-code).name
        message = f"was killed by {name}, and the other ranks were ended"
    who = "" if rank == 0 and code > 0 else f"rank {rank} of {len(watcher.ended)} "
    return _End(f"{who}{message or f'ended with exit code {code}'}", code, main_pid, watcher.signalled)


def _read_end(folder: Path, rank: int) -> dict[str, Any]:
    try:
        return json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _write_status(run: Run, end: _End) -> None:
    """The main rank may have died before it wrote its status, or known only that another rank was gone."""
    path = run.path
    try:
        status = read_status(path)
    except StorageError:
        return  # the run has not started, or a resume recovers its identity
    if status.get("pid") != end.main_pid or status.get("state") not in ("running", "failed", "stopped"):
        return
    with contextlib.suppress(ShoalError), RunDir.resume(path) as run_dir:
        state = "failed" if status["state"] == "running" else status["state"]
        command = status.get("next_command") or run.command
        run_dir.write_status(state, step=status["step"], reason=end.reason, resumable=True, next_command=command)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers, which start_processes and the watcher replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    earlier = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
