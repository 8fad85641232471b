"""Three processes on one machine, started together, watched, and never left behind.

A process that crashes is started again, a bounded number of times; one that ends for a reason ends the run. Children
have a process group of their own, so Ctrl-C reaches the supervisor alone, and die with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED
from shoal.orchestrator.signals import heeded_signals

SUPERVISOR = "SHOAL_SUPERVISOR"
MAX_RESTARTS = 3
GRACE_S = 30.0  # for the others to notice that the run is over
HEARD_S = 5.0  # for the leader to have heard of another's end
KILL_S = 5.0
SERVER_KILL_S = 40.0  # for a process that ends a server of its own first
TICK_S = 0.05
LAST_LINES = 15


@dataclass
class Child:
    """One process: `arguments` make the command; those of a restart come on top."""

    name: str
    arguments: Sequence[str]
    output: Path | None = None  # None: the supervisor's own
    restart_arguments: Callable[[], Sequence[str]] = tuple
    environment: Mapping[str, str] = field(default_factory=dict)
    kill_s: float = KILL_S
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None

    def start(self, *, again: bool = False) -> None:
        words = [*self.arguments, *(self.restart_arguments() if again else ())]
        environment = {**os.environ, **self.environment, SUPERVISOR: str(os.getpid())}
        stream = self.output.open("ab") if self.output is not None else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )
        if stream is not None:
            stream.close()

    def poll(self) -> int | None:
        assert self.process is not None
        self.code = self.process.poll()
        return self.code

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def last_lines(self) -> list[str]:
        if self.output is None or not self.output.is_file():
            return []
        return self.output.read_text(errors="replace").splitlines()[-LAST_LINES:]


class Supervisor:
    """Runs until the leader ends or somebody gives up; returns the exit code of the run."""

    def __init__(self, children: Sequence[Child], leader: str, tell: Callable[[str], None]) -> None:
        self._children = {child.name: child for child in children}
        self._leader = self._children[leader]
        self._tell = tell
        self._signals: list[int] = []

    def run(self) -> int:
        earlier = {number: signal.signal(number, self._heard) for number in heeded_signals()}
        try:
            for child in self._children.values():
                child.start()
            return self._watch()
        finally:
            self._end_all()
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _heard(self, number: int, _: object) -> None:
        """The first one asks the leader to stop with its state saved; the second ends everything where it is."""
        self._signals.append(number)
        if len(self._signals) == 1:
            self._leader.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _watch(self) -> int:
        while True:
            if len(self._signals) > 1:
                return self._signalled()
            for child in self._children.values():
                code = child.poll()
                if code is not None:
                    ended = self._ended(child, code)
                    if ended is not None:
                        return ended
            time.sleep(TICK_S)

    def _signalled(self) -> int:
        return EXIT_INTERRUPTED if self._signals[0] == signal.SIGINT else EXIT_TERMINATED

    def _ended(self, child: Child, code: int) -> int | None:
        """What follows from the end of a child: another start, or the end of the run with this exit code."""
        # A leader that met a bug has told the others that the run is over; they are not there for another one.
        crashed = code < 0 or (code == EXIT_BUG and child is not self._leader)
        if crashed and not self._signals and child.restarts < MAX_RESTARTS:
            child.restarts += 1
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._tell(f"{child.name} ended by {how}; it is started again ({child.restarts} of {MAX_RESTARTS})")
            child.start(again=True)
            return None
        if crashed and self._signals:
            self._wait_for(self._leader, GRACE_S)  # it notices, and says what is saved
            return self._signalled()
        if crashed:
            self._tell(f"{child.name} ended again ({code}) and is given up")
            self._show(child)
            return EXIT_STOPPED
        if child is self._leader:
            return code
        # It ended for a reason, and has told it to the leader, who is to say how the run ended; but a leader that
        # had not come yet did not hear of it.
        self._wait_for(self._leader, GRACE_S if self._signals or code == EXIT_DONE else HEARD_S)
        asked = self._leader.code is None and not self._signals
        if asked:
            self._leader.send(signal.SIGTERM)
            self._wait_for(self._leader, GRACE_S)
        if code != EXIT_DONE:
            self._show(child)
        leaders = self._leader.code
        if leaders is not None and leaders >= 0 and not (asked and leaders == EXIT_TERMINATED):
            return leaders
        if self._signals:
            return self._signalled()
        return EXIT_STOPPED if code == EXIT_DONE else code  # that the run is done is the leader's to say

    def _show(self, child: Child) -> None:
        for line in child.last_lines():
            self._tell(f"  {child.name}: {line}")

    def _wait_for(self, child: Child, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while child.poll() is None and time.monotonic() < limit and len(self._signals) < 2:
            time.sleep(TICK_S)

    def _end_all(self) -> None:
        """The others end by themselves when the run does; whoever does not is ended."""
        patient = len(self._signals) < 2 and self._leader.code is not None and self._leader.code >= 0
        for child in self._children.values():
            if patient:
                self._wait_for(child, GRACE_S)
            child.send(signal.SIGTERM)
        for child in self._children.values():
            if child.process is not None:
                try:
                    child.process.wait(child.kill_s)
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait(KILL_S)
