"""Starts the three processes of `shoal grpo --layout split`, restarts those that crash, and ends them all.

A process that exits for a reason ends the run. Children have their own process groups, so Ctrl-C reaches only the
supervisor, and they die with it. Also finds a free port for the server.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.build.signals import handled_signals
from shoal.core.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED

LOWEST, HIGHEST = 10_000, 65_535
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL = range(32_768, 65_536)
TRIES = 200


def free_port() -> int:
    """A free port outside the ephemeral range. Outgoing connections use ephemeral ports, so one of these may be
    taken by the time the server has loaded."""
    ephemeral = _ephemeral_ports()
    others = [port for port in range(LOWEST, HIGHEST + 1) if port not in ephemeral]
    for port in random.SystemRandom().sample(others, min(TRIES, len(others))):
        if _is_free(port):
            return port
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _ephemeral_ports() -> range:
    try:
        low, high = EPHEMERAL.read_text(encoding="ascii").split()
        return range(int(low), int(high) + 1)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


SUPERVISOR = "SHOAL_SUPERVISOR"
MAX_RESTARTS = 3
GRACE_S = 30.0  # for the others to notice the end of the run
NOTICE_S = 5.0  # for the leader to notice the end of another process
KILL_S = 5.0
SERVER_KILL_S = 40.0  # for a process that must first stop its own server
TICK_S = 0.05
LAST_LINES = 15


@dataclass
class Child:
    """One process. `restart_arguments` are appended to `arguments` when it is restarted."""

    name: str
    arguments: Sequence[str]
    output: Path | None = None  # None = the supervisor's output
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
    """Runs until the run ends; `run` returns its exit code."""

    def __init__(self, children: Sequence[Child], leader: str, tell: Callable[[str], None]) -> None:
        self._children = {child.name: child for child in children}
        self._leader = self._children[leader]
        self._tell = tell
        self._signals: list[int] = []

    def run(self) -> int:
        earlier = {number: signal.signal(number, self._on_signal) for number in handled_signals()}
        try:
            for child in self._children.values():
                child.start()
            return self._watch()
        finally:
            self._end_all()
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        """The first signal makes the leader save its state and stop; the second ends all processes immediately."""
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
        """Restart a child that ended (None), or return the exit code of the run."""
        # A leader that failed with a bug has already ended the run for the others.
        crashed = code < 0 or (code == EXIT_BUG and child is not self._leader)
        if crashed and not self._signals and child.restarts < MAX_RESTARTS:
            child.restarts += 1
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._tell(f"{child.name} ended by {how}; it is restarted ({child.restarts} of {MAX_RESTARTS})")
            child.start(again=True)
            return None
        if crashed and self._signals:
            self._wait_for(self._leader, GRACE_S)  # it notices, and reports what is saved
            return self._signalled()
        if crashed:
            self._tell(f"{child.name} ended again ({code}) and is not restarted any more")
            self._show(child)
            return EXIT_STOPPED
        if child is self._leader:
            return code
        # It ended for a reason and has informed the leader, whose exit code counts. A leader that had not joined yet
        # was not informed.
        self._wait_for(self._leader, GRACE_S if self._signals or code == EXIT_DONE else NOTICE_S)
        terminated = self._leader.code is None and not self._signals
        if terminated:
            self._leader.send(signal.SIGTERM)
            self._wait_for(self._leader, GRACE_S)
        if code != EXIT_DONE:
            self._show(child)
        leaders = self._leader.code
        if leaders is not None and leaders >= 0 and not (terminated and leaders == EXIT_TERMINATED):
            return leaders
        if self._signals:
            return self._signalled()
        return EXIT_STOPPED if code == EXIT_DONE else code  # only the leader can report that the run is done

    def _show(self, child: Child) -> None:
        for line in child.last_lines():
            self._tell(f"  {child.name}: {line}")

    def _wait_for(self, child: Child, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while child.poll() is None and time.monotonic() < limit and len(self._signals) < 2:
            time.sleep(TICK_S)

    def _end_all(self) -> None:
        """Wait for the others to exit after the run, then terminate those that remain."""
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
