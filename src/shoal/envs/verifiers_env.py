"""`verifiers:<id>`: an environment of the verifiers package, run by another Python interpreter (`args.python`).

The environment runs its own conversations against the run's endpoint and scores them, one by one or all rollouts of a
group together. The other interpreter runs verifiers_host.py. Requests and replies are lines of JSON. Only the secrets
named in `keep_env` are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.types import EpisodeResult, Message, Task
from shoal.runs.secrets import SECRET_NAME

HOST = Path(__file__).with_name("verifiers_host.py")
LOAD_LIMIT_S = 120.0
CLOSE_LIMIT_S = 5.0


class Verifiers:
    """An environment of the package verifiers, in its own Python."""

    def __init__(
        self,
        id: str,
        python: Annotated[str, Field(description="the interpreter that has verifiers and the environment")],
        args: Annotated[
            Mapping[str, Any] | None, Field(description="arguments of the environment, or fields of its taskset")
        ] = None,
        *,
        path: Annotated[
            Sequence[str],
            Field(description="folders to search for modules, for an environment that is not installed"),
        ] = (),
        harness: Annotated[
            str,
            Field(
                description="0.4: the program that runs the conversations, unless the taskset has its own; `uv` runs "
                "it and must be installed in that Python"
            ),
        ] = "null",
        max_turns: Annotated[int | None, Field(description="0.4: maximum number of model turns per rollout")] = None,
        num_tasks: Annotated[int, Field(description="maximum number of tasks")] = 1000,
        timeout_s: Annotated[
            float, Field(description="time limit of a rollout, or of a group that is scored together")
        ] = 300.0,
        keep_env: Annotated[
            Sequence[str], Field(description="environment variables with secrets to pass on; others are removed")
        ] = (),
    ) -> None:
        self.name = f"verifiers:{id}"
        self._timeout_s = timeout_s
        self._host = Host(_interpreter(python), path, keep_env)
        settings = {"harness": harness, "max_turns": max_turns, "num_tasks": num_tasks}
        loaded = self._host.load({"do": "load", "env": id, "args": dict(args or {}), "settings": settings}, self.name)
        self.version = str(loaded["version"])
        self.play_group = self._play if loaded["scores_groups"] else None
        self._tasks = _splits(loaded["tasks"], self.name)

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def start(self, task: Task) -> Any:
        raise RuntimeError(f"{self.name} runs its own rollouts")

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        raise RuntimeError(f"{self.name} computes its own rewards")

    async def play(self, task: Task, base_url: str, model: str) -> EpisodeResult:
        (result,) = await self._play(task, [(base_url, model)])
        return result

    async def _play(self, task: Task, sessions: Sequence[tuple[str, str]]) -> list[EpisodeResult]:
        """Make one rollout per (base_url, model). The host scores them together if the environment compares them."""
        where = {"split": task.data["split"], "index": task.data["index"], "sessions": sessions}
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._host.request({"do": "play", **where})
        except TimeoutError:
            what = "a rollout" if self.play_group is None else f"a group of {len(sessions)} rollouts"
            raise TimeoutError(f"{what} of {self.name} took longer than {self._timeout_s:g} s") from None
        return [self._result(fields) for fields in found["rollouts"]]

    def _result(self, fields: Mapping[str, Any]) -> EpisodeResult:
        reward = fields.get("reward")
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise ValueError(f"{self.name} returned the reward {reward!r}, not a finite number")
        parts, messages = fields.get("parts") or {}, fields.get("messages") or []
        return EpisodeResult(None if reward is None else float(reward), parts, messages, fields.get("error"))

    def close(self) -> None:
        self._host.close()


def _interpreter(python: str) -> str:
    path = Path(str(python)).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"verifiers: args.python: {str(python)!r} is not a Python interpreter; set it to one that has verifiers"
        )
    return str(path.absolute())  # not resolved: the path of a venv's python link determines the venv


def _splits(found: Mapping[str, list[list[Message]] | None], name: str) -> dict[str, list[Task]]:
    """Build the task lists. Without an eval split, the last tenth of the tasks is held out, as for datasets."""
    train = [Task(m, {"split": "train", "index": i}) for i, m in enumerate(found["train"] or [])]
    if not train:
        raise ConfigError(f"{name} has no tasks")
    if found.get("eval") is not None:
        return {
            "train": train,
            "eval": [Task(m, {"split": "eval", "index": i}) for i, m in enumerate(found["eval"] or [])],
        }
    held_out = min(256, max(1, len(train) // 10)) if len(train) > 1 else 0
    return {"train": train[: len(train) - held_out], "eval": train[len(train) - held_out :]}


class Host:
    """The other interpreter's process and the protocol with it. `load` blocks; `request` awaits the reply."""

    def __init__(self, python: str, path: Sequence[str], keep_env: Sequence[str]) -> None:
        kept = {k: v for k, v in os.environ.items() if not SECRET_NAME.search(k) or k in keep_env}
        for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"):
            kept.pop(name, None)
        folder = str(Path(python).parent)
        kept["PATH"] = os.pathsep.join([folder, *filter(None, [kept.get("PATH")])])
        # An environment variable, so that tool servers started by the interpreter inherit it.
        if path:
            kept["PYTHONPATH"] = os.pathsep.join(str(Path(entry).expanduser().resolve()) for entry in path)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-u", str(HOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=kept
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()

    def load(self, request: dict[str, Any], name: str) -> dict[str, Any]:
        """Send the first request and block until its reply. No event loop runs yet."""
        self._send({"id": -1, **request})
        line: list[bytes] = []
        assert self._process.stdout is not None
        waiting = threading.Thread(target=lambda: line.append(self._process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        waiting.start()
        waiting.join(LOAD_LIMIT_S)
        if not line or not line[0]:
            self.close()
            why = self.last_stderr_line() or f"no reply within {LOAD_LIMIT_S:.0f} s"
            raise ConfigError(f"{name}: the interpreter could not load the environment: {why}")
        answer = json.loads(line[0])
        if "error" in answer:
            self.close()
            raise ConfigError(f"{name}: {answer['error']}")
        return answer["ok"]

    async def request(self, request: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = (loop, answer)
            if self._reader is None:  # not in __init__: the reward server must fork before any thread starts
                self._reader = threading.Thread(target=self._read, daemon=True, name="verifiers")
                self._reader.start()
        try:
            self._send({"id": number, **request})
            found = await answer
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["ok"]

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"the environment's interpreter ended: {self.last_stderr_line() or error}") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._settle(answer["id"], answer)
        for number in list(self._waiting):
            self._settle(number, {"error": f"the environment's interpreter ended: {self.last_stderr_line()}"})

    def _settle(self, number: int, answer: dict[str, Any]) -> None:
        loop, future = self._waiting.get(number, (None, None))
        if loop is not None and future is not None:
            with contextlib.suppress(RuntimeError):  # the loop may have been closed
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

    def last_stderr_line(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            lines = self._log.read()[-20_000:].decode("utf-8", "replace").strip().splitlines()
            return lines[-1].strip()[:300] if lines else ""
        return ""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()  # the host exits at end of input
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._process.kill()
