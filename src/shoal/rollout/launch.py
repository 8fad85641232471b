"""An inference server of our own: started in its environment, watched while it loads, ended with the run.

Used by the engines that talk to vLLM and SGLang. Its output goes to a log file, whose end is shown when it fails.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError, EngineError, ShoalError
from shoal.rewards.confine import wake_at_parent_death
from shoal.rollout.server_group import ServerGroup

TAIL_LINES, LINE_CHARACTERS = 12, 300
STOP_S, BRIEF_STOP_S = 15.0, 3.0
NOTE_SHARED_S = 2.0
LAST_WORDS_S = 8.0
DEAF_S = 5.0  # without listening, after it did: vLLM whose engine died may wait for ever to end
LOG_LINES = 4000  # a server that dies logs a stack for every request that was under way
# What was logged as an error, or raised; not the frames of its stack.
_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b[^\]]*\] (?!Traceback|\s)|^(\([^)]*\) )?[\w.]*(Error|Exception)\b")
_ANSWERED = re.compile(r'" 200( OK)?$')
_NUMBER = re.compile(r"\b[\w-]*\d[\w-]*\b")
_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")
_TAKEN = re.compile(r"address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """What to start and where it listens."""

    name: str  # vLLM or SGLang, for people
    command: Sequence[str]
    host: str
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class ServerProcess:
    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._group: ServerGroup | None = None
        self._noted_at: float | None = None  # when what it shares was last noted
        self._listened = False
        self._deaf_since: float | None = None  # when it was first found to listen no more

    def start(self) -> None:
        """Returns at once; the server loads meanwhile. It ends with the thread that calls this: take a lasting one."""
        launch = self.launch
        if port_is_taken(launch.host, launch.port):
            raise ConfigError(
                f"infer.port: {launch.port} on {launch.host} is taken by another process; choose another port, or, if "
                "that is the server, leave infer.engine_python out and name it in orch.client.base_url"
            )
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("wb") as log:
            try:
                # A group of its own: Ctrl-C is for us, and the server has to answer until the state is saved.
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
        """It has loaded, whatever became of it since."""
        return self._listened

    def stopped(self) -> str | None:
        """In words, where somebody stopped a process of it: the others may answer for their health all the same."""
        pid = self._group.stopped() if self._group is not None else None
        return f"its process {pid} is stopped, and goes on with SIGCONT" if pid is not None else None

    def ended(self) -> str | None:
        """None while it runs and listens, or does not listen yet; else how it ended, with the end of its log."""
        code = self._process.poll() if self._process is not None else 0
        if code is not None:
            return self.why(_how_it_ended(code))
        self._note_shared()
        if listens(self.launch.host, self.launch.port):
            self.heard()
        elif self._listened:
            self._deaf_since = self._deaf_since or time.monotonic()
            if time.monotonic() - self._deaf_since > DEAF_S:
                return self.why("runs, but listens no more")
        return None

    def heard(self) -> None:
        """It listens now: whoever was answered by it says so."""
        self._listened, self._deaf_since = True, None

    def _note_shared(self) -> None:
        """Now and then while it loads, and once when it listens: it makes what it shares as it starts."""
        now = time.monotonic()
        if self._group is not None and (self._noted_at is None or now - self._noted_at > NOTE_SHARED_S):
            self._noted_at = now if not self._listened else float("inf")
            self._group.note_shared()

    def failure(self) -> ShoalError | None:
        """The same as an error. One that ends by itself before it ever listened was started with what cannot work here;
        one that served, or that a signal ended, has failed."""
        ended = self.ended()
        if ended is None:
            return None
        failed = self._listened or (self._process is not None and (self._process.poll() or 0) < 0)
        return EngineError(ended) if failed and not ended.startswith("infer.") else ConfigError(ended)

    def why(self, what: str) -> str:
        """One line for what people got wrong and we know; else the last lines of the log."""
        unknown = _UNKNOWN.search(self.tail(400))
        if unknown is not None:
            return f"infer.engine_args: {self.launch.name} does not know {unknown[1].strip()}; see its --help"
        if self._found_port_taken():
            return f"infer.port: {self.launch.port} was taken while {self.launch.name} started; choose another port"
        return f"{self.launch.name} {what.rstrip('.')}. {end_of_log(self.launch.log)}"

    def _found_port_taken(self) -> bool:
        """That is the last it had to say, it has ended, and somebody else has the port. Servers have other ports too,
        and may have met a taken one and gone on."""
        ended = self._process is not None and self._process.poll() is not None
        errors = [line for line in _last_lines(self.launch.log, LOG_LINES) if _ERROR.search(line)]
        last_word = bool(errors) and _TAKEN.search(errors[-1]) is not None
        return ended and last_word and port_is_taken(self.launch.host, self.launch.port)

    async def last_words(self, what: str) -> str:
        """Why, after `what` was noticed: a server whose engine died ends by itself, and its log says more by then."""
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end:
            if (ended := self.ended()) is not None:
                return ended
            await asyncio.sleep(0.1)
        return self.why(what)

    def tail(self, lines: int) -> str:
        return "\n".join(_last_lines(self.launch.log, lines))

    async def close(self) -> None:
        """End it and everything it started: asked first, then made to. What it shared goes with it."""
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
        """At the exit of the process that started it, if nobody closed it: a signal came before there was anybody."""
        process, group = self._process, self._group
        if os.getpid() != starter or process is None or group is None:
            return  # a fork of it has the same exit handlers
        group.note_shared()
        group.send(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(BRIEF_STOP_S)
        group.remove_shared()

    async def _gone(self) -> bool:
        """Within its time, which is short for one that does not listen: it is still loading, has all but ended, or
        waits for ever with its end."""
        process, group, end = self._process, self._group, time.monotonic() + STOP_S
        assert process is not None and group is not None
        while (now := time.monotonic()) < end:
            if process.poll() is not None and not group.lives():
                return True
            if end - now > BRIEF_STOP_S and not listens(self.launch.host, self.launch.port):
                end = now + BRIEF_STOP_S
            await asyncio.sleep(0.1)
        return False


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def end_of_log(log: Path) -> str:
    """Its last lines that speak of an error, each once, or its last lines where none does."""
    lines = _last_lines(log, LOG_LINES)
    errors: dict[str, str] = {}
    for line in filter(_ERROR.search, lines):
        errors.setdefault(_NUMBER.sub("", line), line)  # the same of every request: its id, place and time aside
    others = [line for line in lines if not _ANSWERED.search(line)]  # every request that went well has one
    shown = "\n  ".join(_cut(line) for line in (list(errors.values()) or others)[-TAIL_LINES:])
    return f"The last {'errors' if errors else 'lines'} in {log}:\n  {shown}"


def _cut(line: str) -> str:
    """vLLM whose worker died dumps what it was computing, in one line."""
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}…"


def _last_lines(log: Path, lines: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [line for line in log.read_text("utf-8", "replace").splitlines()[-lines:] if line.strip()]
    return []


def _own_environment() -> dict[str, str]:
    """Ours without what leads its Python to our packages."""
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
    """Somebody does, or there is no telling: only a refusal says that nobody does."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def check_interpreter(python: str, module: str, name: str) -> None:
    """Refuse, before anything loads, an interpreter that is not there or lacks the server's package."""
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
