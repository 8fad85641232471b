"""The keeper: forked from the main process before a model is loaded. It forks the reward server, and can do so again.

The main process cannot fork a second server, because fork is unsafe once a model is loaded. The keeper holds the
environments and their tasks and runs no reward. When the main process ends, it kills the server and everything below.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from dataclasses import replace

from shoal.rewards import cgroups, isolation, sandbox
from shoal.rewards.server import END_CLOSE_LIMIT_S, Limits, become_server
from shoal.rewards.worker import Fingerprint, Judging

READY = b"ready"
RESTART = b"restart"
CHECK_S = 0.5  # how often the keeper looks for the end of its parent and of the server
END_LIMIT_S = 3.0
SERVER_END_LIMIT_S = END_CLOSE_LIMIT_S + 0.5


class Keeper:
    def __init__(self, link: socket.socket, control: socket.socket, judging: Judging, limits: Limits) -> None:
        self._link = link
        self._control: socket.socket | None = control
        self._judging = judging
        self._limits = limits
        self._parent = os.getppid()
        self._server = 0

    def run(self) -> None:
        """Keep a server until the main process closes the link or ends."""
        while os.getppid() == self._parent:
            if self._server == 0 and self._control is not None:
                self._fork(self._control)
            if select.select([self._link], [], [], CHECK_S)[0]:
                try:
                    request = self._link.recv(64)
                except OSError:
                    return
                if request != RESTART:
                    return
                self._end_server()
                self._control = self._offer()
            elif self._server and sandbox.end_of(self._server) is not None:
                self._end_server()  # what it left; the main process notices the end and asks for another one

    def end(self) -> None:
        """The server ends by itself, after its stateful environments have closed."""
        deadline = time.monotonic() + SERVER_END_LIMIT_S
        while self._server and sandbox.end_of(self._server) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        self._end_server()

    def _offer(self) -> socket.socket | None:
        """Send one end of a new connection to the main process. Returns the other end, for the server."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._link, [READY], [theirs.fileno()])
            except OSError:
                return None
        return ours

    def _fork(self, control: socket.socket) -> None:
        keeper = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            self._link.close()
            become_server(control, self._judging, self._limits, keeper)
        control.close()
        self._control = None

    def _end_server(self) -> None:
        if self._server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGKILL)
            self._server = 0
        sandbox.end_descendants(END_LIMIT_S)
        if self._limits.isolated:
            cgroups.remove_all(f"shoal-{os.getpid()}")


def become_keeper(
    link: socket.socket, control: socket.socket, judging: Judging, limits: Limits, keep_env: set[str], parent: int
) -> None:
    """Run the keeper in the forked process. Never returns."""
    code = 1
    try:
        os.setsid()
        sandbox.reset_signals()
        sandbox.ignore_stop_requests()
        sandbox.die_with_parent()
        if os.getppid() != parent:  # it ended before the line above took effect
            os._exit(1)
        sandbox.adopt_orphans()
        sandbox.silence(link.fileno(), control.fileno())
        sandbox.drop_secrets(keep_env)
        link.sendall(READY)
        if limits.isolated:  # found out once for all servers
            isolation.find_bwrap()
            cgroups.parents()
        _prepare(judging)
        judging = replace(judging, fingerprint=Fingerprint(judging.environments.values()))
        gc.freeze()  # workers share this memory; garbage collection would copy it
        keeper = Keeper(link, control, judging, limits)
        sandbox.wake_at_parent_death(signal.SIGCONT)  # SIGKILL would leave the processes that rewards started
        try:
            if os.getppid() == parent:
                keeper.run()
        finally:
            keeper.end()
        code = 0
    finally:
        os._exit(code)


def _prepare(judging: Judging) -> None:
    """Call `prepare()` of the environments once for all workers. An error appears again in every job."""
    for environment in judging.environments.values():
        prepare = getattr(environment, "prepare", None)
        if callable(prepare):
            with contextlib.suppress(Exception):
                prepare()
