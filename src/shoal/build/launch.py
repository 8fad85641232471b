"""The processes of a run on several devices: started here through torch's elastic launcher, watched, ended together.

The process that starts them trains nothing. It hands signals on, ends the others when one dies, and says why.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from shoal.build.given import Given
from shoal.config.load import load_run
from shoal.config.resolve import as_yaml
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_TERMINATED,
    ConfigError,
    HardwareError,
    Interrupted,
    ShoalError,
)
from shoal.observability.checkpoints import onward
from shoal.observability.run_dir import RunDir, is_used, read_status
from shoal.orchestrator.signals import heeded_signals

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what every launcher tells a rank
POLL_S = 0.1
GRACE_S = 10.0  # for the others to notice by themselves that one is gone, and to write down what they know
KILL_S = 5  # and to end when they are told to


@dataclass(frozen=True)
class Start:
    """What a rank is told beside its configuration."""

    resume: bool
    notices: tuple[str, ...]
    next_command: str
    launcher_pid: int = 0
    command: tuple[str, ...] = ()  # of `shoal`: what the ranks run if it is not a co-located run


class RankError(ShoalError):
    """A rank ended the run; its exit code is the run's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launched() -> bool:
    return all(name in os.environ for name in LAUNCHED)


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def as_rank(given: Given | None) -> Given:
    """What was given, and the place in the world that a launcher gave this process."""
    given = given or Given()
    if not launched() or given.processes > 1:
        return given
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return replace(given, processes=int(os.environ["WORLD_SIZE"]), local_rank=local_rank)


def ranks_to_start(train: TrainConfig, given: Given | None) -> int:
    """How many processes train.gpus asks for; 0 if this process trains by itself, or a launcher started it."""
    if train.gpus == 1 or launched():
        return 0
    count = max(1, train.gpus) if train.device == "cpu" else _visible_gpus(train)
    if count > 1 and given is not None and given != Given():
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


def launch(config: RunConfig, count: int, start: Start) -> None:
    """Start the ranks and wait for the end of all of them. Raises what ended the run, unless it finished."""
    patience_s = config.train.save_deadline_s + config.orch.deadline_s
    end = _run(count, {"config.yaml": as_yaml(config, secrets=True)}, start, patience_s)
    if end is not None:
        if end.code < 0:
            end = replace(end, reason=f"{end.reason}; {onward(Path(config.train.output_dir) / 'checkpoints')}")
        _tell_status(config, end.reason, end.main_pid)
        end.throw(killed=EXIT_STOPPED)


def launch_command(words: Sequence[str], count: int, patience_s: float) -> None:
    """Ranks that each run a command of `shoal`, which reads and checks its own files.

    Killed ranks are a crash of the whole: whoever watches this process may start it again.
    """
    end = _run(count, {}, Start(False, (), "", command=tuple(words)), patience_s)
    if end is not None:
        end.throw(killed=128 - end.code if end.signalled else EXIT_BUG)


@dataclass(frozen=True)
class _End:
    """How the ranks ended that did not end well."""

    reason: str
    code: int  # of the rank that is the reason; below 0: the signal that killed it
    main_pid: int
    signalled: bool  # it was asked for

    def throw(self, killed: int) -> NoReturn:
        """As this process's own end; `killed` is the exit code where a signal ended the rank."""
        code = killed if self.code < 0 else self.code if self.code > 1 else EXIT_BUG
        if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            raise Interrupted(self.reason, code)
        raise RankError(self.reason, code)


def _run(count: int, files: Mapping[str, str], start: Start, patience_s: float) -> _End | None:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # The meeting point lives here, on a port of the system's choice: nobody can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heeded = heeded_signals()  # before the launcher below sets handlers of its own
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder, _handlers_kept():
        for rank in range(count):
            told = json.dumps(asdict(replace(start, launcher_pid=os.getpid())))
            _write_start(Path(folder), rank, {**files, "start.json": told})
        context = start_processes(
            "shoal",
            sys.executable,
            dict.fromkeys(range(count), ("-m", "shoal.cli.rank", folder)),
            {rank: _environment(rank, count, store.port) for rank in range(count)},
            DefaultLogsSpecs(log_dir=folder),
        )
        try:
            ended = _Watched(context, patience_s, heeded).wait()
        finally:
            context.close(signal.SIGKILL, KILL_S)
        return _conclude(ended, Path(folder), context.pids()[0])


def _write_start(folder: Path, rank: int, files: Mapping[str, str]) -> None:
    """Readable by nobody else, and gone once it is read: it holds secrets, which config.yaml of the run does not."""
    for name, text in files.items():
        file = folder / f"rank{rank}-{name}"
        file.touch(mode=0o600)
        file.write_text(text, "utf-8")


def read_start(folder: Path, rank: int) -> tuple[RunConfig | None, Start]:
    """What the rank was told, once; no configuration where it runs a command that reads its own."""
    file, told = folder / f"rank{rank}-config.yaml", folder / f"rank{rank}-start.json"
    config = load_run(str(file)).config if file.exists() else None
    data = json.loads(told.read_text("utf-8"))
    told.unlink()
    file.unlink(missing_ok=True)
    return config, Start(**{**data, "notices": tuple(data["notices"]), "command": tuple(data["command"])})


def write_end(folder: Path, rank: int, message: str, *, lost: bool) -> None:
    """Why a rank ends, for the process that started it."""
    with contextlib.suppress(OSError):
        (folder / f"rank{rank}.json").write_text(json.dumps({"message": message, "lost": lost}), "utf-8")


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    elastic = {"TORCHELASTIC_RUN_ID": "shoal", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    limits = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    return {name: str(value) for name, value in {**own, **meeting, **elastic, **limits}.items()}


class _Watched:
    """The ranks until the last has ended. The first signal is handed on to save, the second to end at once."""

    def __init__(self, context: Any, patience_s: float, heeded: Sequence[int]) -> None:
        self._context = context
        self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
        self._patience_s = patience_s
        self._until: float | None = None
        self.ended: dict[int, int] = {}  # rank → exit code, in the order they ended
        self.signalled = False
        self._heeded = heeded

    def wait(self) -> _Watched:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, self._hand_on if number in self._heeded else signal.SIG_IGN)
        while len(self.ended) < len(self._processes):
            self._look()
            if self._until is not None and time.monotonic() > self._until:
                self._context.close(signal.SIGTERM, KILL_S)
                self._until = None
            time.sleep(POLL_S)
        return self

    def _look(self) -> None:
        for rank, process in self._processes.items():
            if rank in self.ended or process.poll() is None:
                continue
            self.ended[rank] = process.returncode
            if process.returncode != 0 and self._until is None and not self.signalled:
                self._until = time.monotonic() + GRACE_S

    def _hand_on(self, number: int, _: object) -> None:
        patience_s = KILL_S if self.signalled else self._patience_s
        self.signalled, self._until = True, time.monotonic() + patience_s
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)  # to the rank alone: its reward workers are its own business


def _conclude(watched: _Watched, folder: Path, main_pid: int) -> _End | None:
    failed = {rank: code for rank, code in watched.ended.items() if code != 0}
    if not failed:
        return None
    told = {rank: _read_end(folder, rank) for rank in failed}
    # Whoever only lost the others is not the reason; being killed comes before words.
    rank = min(failed, key=lambda r: (watched.signalled and r != 0, failed[r] > 0, told[r].get("lost", False), r))
    code, message = failed[rank], str(told[rank].get("message", ""))
    if code < 0:
        name = signal.Signals(-code).name
        message = f"was killed by {name}, and the other ranks were ended"
    who = "" if rank == 0 and code > 0 else f"rank {rank} of {len(watched.ended)} "
    return _End(f"{who}{message or f'ended with exit code {code}'}", code, main_pid, watched.signalled)


def _read_end(folder: Path, rank: int) -> dict[str, Any]:
    try:
        return json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _tell_status(config: RunConfig, reason: str, main_pid: int) -> None:
    """The main rank may have died without a word, or known only that another was gone."""
    path = Path(config.train.output_dir)
    status = read_status(path) if is_used(path) else {}
    if status.get("pid") != main_pid or status.get("state") not in ("running", "failed", "stopped"):
        return
    with contextlib.suppress(ShoalError), RunDir.resume(path) as run_dir:
        state = "failed" if status["state"] == "running" else status["state"]
        command = status.get("next_command") or f"shoal grpo {path / 'config.yaml'} --resume"
        run_dir.write_status(state, step=status["step"], reason=reason, resumable=True, next_command=command)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """The launcher below sets handlers of its own, and so do we; what was there comes back."""
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
