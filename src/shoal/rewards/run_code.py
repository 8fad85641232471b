"""Run a program written by the model, for use in rewards: `run_code([sys.executable, "-c", code])`.

With `orch.reward.isolated` and bubblewrap, the program runs in a sandbox that shares no user, process, network, IPC or
mount namespace with the reward, and none of its memory: it cannot see the answers or change the reward. The reward
server starts it, because a confined worker cannot create namespaces. Without bubblewrap it is a child of the reward.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.rewards import cgroups, isolation, sandbox

MAX_REQUEST_BYTES = 2**17
MAX_SANDBOXES = 16  # at a time, per reward call
MAX_OUTPUT_BYTES = 2**20
STATUS_BYTES = 2**12
END_WAIT_S = 0.1

_server: socket.socket | None = None  # the connection of an isolated worker
_isolated = False


@dataclass(frozen=True)
class CodeResult:
    """The end of a program. `exit_code` is None if it ran too long or wrote too much; 128 + n means signal n."""

    exit_code: int | None
    stdout: str
    stderr: str


def connect(server: socket.socket) -> None:
    """In an isolated worker: let the server start programs, if it has bubblewrap."""
    global _server, _isolated
    _isolated = True
    _server = server if isolation.find_bwrap() is not None else None


def run_code(argv: Sequence[str], *, stdin: str | bytes = b"", timeout_s: float = 5.0) -> CodeResult:
    """Run a program in the sandbox and return its output, at most 1 MiB per stream. Only for isolated rewards.

    It sees Python with its packages, the system's programs, and an empty /tmp. It has no network. Everything it
    started ends with it.
    """
    if not _isolated:
        raise RuntimeError("run_code needs an isolated reward; set orch.reward.isolated")
    data = stdin.encode() if isinstance(stdin, str) else bytes(stdin)
    with contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, status
        ours = [pipes[0][1], *(reading for reading, _ in pipes[1:])]
        theirs = [pipes[0][0], *(writing for _, writing in pipes[1:])]
        for descriptor in ours:
            stack.callback(_close, descriptor)
            os.set_blocking(descriptor, False)
        try:
            start = _start_here if _server is None else _start_in_sandbox
            end = start([str(part) for part in argv], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        try:
            outputs, complete = _exchange(ours, data, timeout_s)
        finally:
            code = end()
    out, err, status = (output.decode(errors="replace") for output in outputs)
    return CodeResult((_exit_code(status) if code is None else code) if complete else None, out, err)


def _start_in_sandbox(argv: Sequence[str], descriptors: Sequence[int]) -> Callable[[], int | None]:
    """Returns a function that ends the program; its exit code comes over the last descriptor."""
    assert _server is not None
    server, name = _server, secrets.token_hex(8)
    request = json.dumps({"run": name, "argv": argv}).encode()
    if len(request) > MAX_REQUEST_BYTES:
        raise ValueError(f"the command has {len(request):,} bytes; the limit is {MAX_REQUEST_BYTES:,}; use stdin")
    socket.send_fds(server, [request], descriptors)

    def end() -> None:
        server.send(json.dumps({"end": name}).encode())

    return end


def _start_here(argv: Sequence[str], descriptors: Sequence[int]) -> Callable[[], int | None]:
    """Without bubblewrap: a child of the reward, which ends with its process namespace at the latest."""
    stdin, stdout, stderr, _ = descriptors
    child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, cwd="/tmp", start_new_session=True)

    def end() -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_WAIT_S)  # its streams are closed, or it ran too long
        sandbox.kill_group(child.pid)
        code = child.wait()
        return code if code >= 0 else 128 - code

    return end


def _exchange(descriptors: Sequence[int], data: bytes, timeout_s: float) -> tuple[list[bytearray], bool]:
    """Feed the program and read its streams until all are closed. False if a limit was reached first."""
    deadline = time.monotonic() + timeout_s
    writing, *reading = descriptors
    outputs = {descriptor: bytearray() for descriptor in reading}
    with selectors.DefaultSelector() as selector:
        for descriptor in reading:
            selector.register(descriptor, selectors.EVENT_READ)
        selector.register(writing, selectors.EVENT_WRITE)
        while any(key.fd in outputs for key in selector.get_map().values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or any(len(output) > MAX_OUTPUT_BYTES for output in outputs.values()):
                return [output[:MAX_OUTPUT_BYTES] for output in outputs.values()], False
            for key, _ in selector.select(left_s):
                if key.fd == writing:
                    with contextlib.suppress(BrokenPipeError):
                        data = data[os.write(writing, data[: 1 << 16]) :] if data else data
                        if data:
                            continue
                    _close(writing)
                    selector.unregister(writing)
                elif chunk := os.read(key.fd, 1 << 16):
                    outputs[key.fd] += chunk
                else:
                    selector.unregister(key.fd)
    return list(outputs.values()), True


def _exit_code(status: str) -> int | None:
    """From the lines that bubblewrap writes."""
    codes = [json.loads(line).get("exit-code") for line in status.splitlines() if "exit-code" in line]
    return codes[-1] if codes else None


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


@dataclass
class Sandboxes:
    """In the server: the programs of one worker. The worker is not trusted; its requests only start sandboxes."""

    requests: socket.socket
    groups: Sequence[Path]
    memory_bytes: int
    running: dict[str, int] = field(default_factory=dict)  # name → process id of bubblewrap

    def read(self) -> bool:
        """Handle one request. False once the connection is closed or invalid."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.requests, MAX_REQUEST_BYTES, 4)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            request = json.loads(data)
            if "end" in request:
                sandbox.kill_group(self.running[request["end"]])
            elif len(descriptors) == 4 and len(self.running) < MAX_SANDBOXES:
                self.running[str(request["run"])] = self._start([str(part) for part in request["argv"]], descriptors)
        except (ValueError, TypeError, KeyError, OSError):
            return bool(data)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, argv: Sequence[str], descriptors: Sequence[int]) -> int:
        bwrap = isolation.find_bwrap()
        status = descriptors[3]
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                sandbox.reset_signals()
                sandbox.die_with_parent()
                for number, descriptor in enumerate(descriptors[:3]):
                    os.dup2(descriptor, number)
                os.set_inheritable(status, True)
                cgroups.join(self.groups)
                if bwrap is not None:
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    sources = isolation.stage(isolation.python_folders())
                    sandbox.die_with_parent()  # changing the user clears it
                    command = isolation.bwrap_command(bwrap, argv, sources, self.memory_bytes, status)
                    os.execv(bwrap, command)
            finally:
                os._exit(127)
        return pid

    def reap(self) -> None:
        self.running = {name: pid for name, pid in self.running.items() if not sandbox.reap(pid)}

    def end(self) -> list[int]:
        """Kill all. Returns processes that must be reaped."""
        self.requests.close()
        for pid in self.running.values():
            sandbox.kill_group(pid)
        return [*self.running.values()]
