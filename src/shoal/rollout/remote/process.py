"""A vLLM or SGLang server as a child process: start, exit detection, log errors, and cleanup of its shared memory.

Used by the engines and by grpo-infer. The shared memory of its processes is found through /proc (Linux only).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import ConfigError, EngineError, ShoalError
from shoal.rewards.sandbox import wake_at_parent_death

TAIL_LINES, LINE_CHARACTERS = 12, 300
STOP_S, BRIEF_STOP_S = 15.0, 3.0
NOTE_SHARED_S = 2.0
EXIT_WAIT_S = 8.0  # for a failing server to exit and log why
NOT_LISTENING_S = 5.0  # then it has failed: vLLM whose engine died may hang while it exits
LOG_LINES = 4000  # a server that dies logs a stack per request in flight
# Logged errors and raised exceptions, without stack frames.
_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b[^\]]*\] (?!Traceback|\s)|^(\([^)]*\) )?[\w.]*(Error|Exception)\b")
_ANSWERED = re.compile(r'" 200( OK)?$')
_NUMBER = re.compile(r"\b[\w-]*\d[\w-]*\b")
_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")
_TAKEN = re.compile(r"address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """The command of a server and where it listens."""

    name: str  # vLLM or SGLang
    command: Sequence[str]
    host: str
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class ServerProcess:
    """One server, from its start to its end."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._group: ServerGroup | None = None
        self._noted_at: float | None = None  # when its shared memory was last recorded
        self._listened = False
        self._silent_since: float | None = None  # when it stopped listening

    def start(self) -> None:
        """Returns immediately while the server loads. The server ends with the calling thread."""
        launch = self.launch
        if port_is_taken(launch.host, launch.port):
            raise ConfigError(
                f"infer.port: {launch.port} on {launch.host} is taken by another process; choose another port, or, if "
                "that is the server, omit infer.engine_python and name it in orch.client.base_url"
            )
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("wb") as log:
            try:
                # Its own process group: Ctrl-C must not reach the server, which is needed until the state is saved.
                self._process = subprocess.Popen(
                    list(launch.command),
                    env={**_own_environment(), **launch.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=wake_at_parent_death,
                )
            except OSError as error:
                what = f"{launch.command[0]} cannot be started ({error.strerror or error})"
                raise ConfigError(f"infer.engine_python: {what}; name the Python that has {launch.name}") from error
        self._group = ServerGroup(self._process.pid)
        atexit.register(self._end_now, os.getpid())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def listened(self) -> bool:
        """Whether it has ever listened."""
        return self._listened

    def stopped(self) -> str | None:
        """A message if one of its processes is suspended. The others may still report that they are healthy."""
        pid = self._group.stopped() if self._group is not None else None
        return f"its process {pid} is stopped; continue it with SIGCONT" if pid is not None else None

    def ended(self) -> str | None:
        """None while it loads or listens; else how it ended, with the errors of its log."""
        code = self._process.poll() if self._process is not None else 0
        if code is not None:
            return self.why(_describe_exit(code))
        self._note_shared()
        if listens(self.launch.host, self.launch.port):
            self.note_listening()
        elif self._listened:
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > NOT_LISTENING_S:
                return self.why("runs, but no longer listens")
        return None

    def note_listening(self) -> None:
        """Called after every response."""
        self._listened, self._silent_since = True, None

    def _note_shared(self) -> None:
        """Record its shared memory repeatedly while it loads, and once when it listens."""
        now = time.monotonic()
        if self._group is not None and (self._noted_at is None or now - self._noted_at > NOTE_SHARED_S):
            self._noted_at = now if not self._listened else float("inf")
            self._group.note_shared()

    def failure(self) -> ShoalError | None:
        """`ended` as an error: ConfigError if it exited before it ever listened, EngineError if it served before or was
        killed by a signal."""
        ended = self.ended()
        if ended is None:
            return None
        failed = self._listened or (self._process is not None and (self._process.poll() or 0) < 0)
        return EngineError(ended) if failed and not ended.startswith("infer.") else ConfigError(ended)

    def why(self, what: str) -> str:
        """A specific message for known user errors, else `what` with the errors of the log."""
        unknown = _UNKNOWN.search(self.tail(400))
        if unknown is not None:
            return f"infer.engine_args: {self.launch.name} does not know {unknown[1].strip()}; see its --help"
        if self._found_port_taken():
            return f"infer.port: {self.launch.port} was taken while {self.launch.name} started; choose another port"
        return f"{self.launch.name} {what.rstrip('.')}. {end_of_log(self.launch.log)}"

    def _found_port_taken(self) -> bool:
        """Whether it exited because its port was taken: that is its last error, and the port is taken now. A server may
        also find another of its ports taken and continue."""
        ended = self._process is not None and self._process.poll() is not None
        errors = [line for line in _last_lines(self.launch.log, LOG_LINES) if _ERROR.search(line)]
        last_error = bool(errors) and _TAKEN.search(errors[-1]) is not None
        return ended and last_error and port_is_taken(self.launch.host, self.launch.port)

    async def failure_message(self, what: str) -> str:
        """The reason after `what` was noticed. Waits briefly, since a server whose engine died exits and logs more."""
        end = time.monotonic() + EXIT_WAIT_S
        while time.monotonic() < end:
            if (ended := self.ended()) is not None:
                return ended
            await asyncio.sleep(0.1)
        return self.why(what)

    def tail(self, lines: int) -> str:
        return "\n".join(_last_lines(self.launch.log, lines))

    async def close(self) -> None:
        """End its process group, with SIGTERM and then SIGKILL, and remove its shared memory."""
        group = self._group
        if group is None:
            return
        group.note_shared()
        for number in (signal.SIGTERM, signal.SIGKILL):
            group.send(number)
            if await self._gone():
                group.remove_shared()
                atexit.unregister(self._end_now)
                return

    def _end_now(self, starter: int) -> None:
        """At exit of the process that started it, if `close` was not called."""
        process, group = self._process, self._group
        if os.getpid() != starter or process is None or group is None:
            return  # a fork inherits the exit handlers
        group.note_shared()
        group.send(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(BRIEF_STOP_S)
        group.remove_shared()

    async def _gone(self) -> bool:
        """Whether it ended in time. A server that does not listen gets less time: it is still loading or hangs."""
        process, group, end = self._process, self._group, time.monotonic() + STOP_S
        assert process is not None and group is not None
        while (now := time.monotonic()) < end:
            if process.poll() is not None and not group.lives():
                return True
            if end - now > BRIEF_STOP_S and not listens(self.launch.host, self.launch.port):
                end = now + BRIEF_STOP_S
            await asyncio.sleep(0.1)
        return False


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def end_of_log(log: Path) -> str:
    """Its last distinct error lines, or its last lines if there is no error."""
    lines = _last_lines(log, LOG_LINES)
    errors: dict[str, str] = {}
    for line in filter(_ERROR.search, lines):
        errors.setdefault(_NUMBER.sub("", line), line)  # ignores request ids, positions and times
    others = [line for line in lines if not _ANSWERED.search(line)]  # without successful requests
    shown = "\n  ".join(_cut(line) for line in (list(errors.values()) or others)[-TAIL_LINES:])
    return f"The last {'errors' if errors else 'lines'} in {log}:\n  {shown}"


def _cut(line: str) -> str:
    """vLLM whose worker died logs its whole batch in one line."""
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}…"


def _last_lines(log: Path, lines: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [line for line in log.read_text("utf-8", "replace").splitlines()[-lines:] if line.strip()]
    return []


def _own_environment() -> dict[str, str]:
    """This process's environment without variables that point Python to its packages."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def port_is_taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def listens(host: str, port: int) -> bool:
    """False only if the connection is refused; a timeout or another error tells nothing."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def check_interpreter(python: str, module: str, name: str) -> None:
    """Raise ConfigError if the interpreter does not exist or lacks the server's package."""
    path = Path(python).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"infer.engine_python: {python} is not an executable file; name the Python that has {name}")
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        command = [str(path), "-c", script]
        done = subprocess.run(command, env=_own_environment(), capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"infer.engine_python: {python} does not run: {error}") from error
    if done.returncode:
        raise ConfigError(f"infer.engine_python: {python} has no package {module}; name the Python that has {name}")


PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
# Names used by Python's multiprocessing; a killed process leaves these files behind.
SHARED_NAMES = ("psm_", "sem.mp-")
_MAPPED = re.compile(
    rf"\s(\d+)\s+{SHARED_MEMORY}/", re.MULTILINE
)  # the inode: semaphores are mapped under another name
_STOPPED = "Tt"


class ServerGroup:
    """The processes of a server. `group` is the id of the process group and of its first process."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._shared: dict[Path, int] = {}  # file → inode

    def stopped(self) -> int | None:
        """The id of a suspended process (SIGSTOP, a debugger)."""
        return next((pid for pid, state in self._members() if state in _STOPPED), None)

    def note_shared(self) -> None:
        """Record which shared memory it has mapped, since this is unknown after it ended."""
        mapped: set[int] = set()
        for pid, _ in self._members():
            with contextlib.suppress(OSError):
                mapped |= set(map(int, _MAPPED.findall((PROC / str(pid) / "maps").read_text())))
        if mapped:
            self._shared |= {file: number for file, number in _shared_files() if number in mapped}

    def remove_shared(self) -> None:
        """After the group ended. vLLM removes its files on SIGTERM, but not if it is killed."""
        left = dict(_shared_files())
        for file, number in self._shared.items():
            if left.get(file) == number:
                with contextlib.suppress(OSError):
                    file.unlink()
        self._shared.clear()

    def send(self, number: int) -> None:
        """Also sends SIGCONT, because a suspended process reacts only to SIGKILL."""
        for sent in (number, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, sent)

    def lives(self) -> bool:
        try:
            os.killpg(self._group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _members(self) -> Iterator[tuple[int, str]]:
        """(id, state) of each process."""
        for entry in PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command name may contain spaces and brackets, so fields are counted from the last bracket.
                state, _, group = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) == self._group:
                    yield int(entry.parent.name), state


def _shared_files() -> Iterator[tuple[Path, int]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            if entry.name.startswith(SHARED_NAMES):
                yield Path(entry.path), entry.inode()
