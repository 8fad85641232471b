"""The processes of stateful environments as the main process sees them: places, calls and closing.

`RewardPool.environment` opens one. The calls run in `rewards.worker.keep_environment`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shoal.core.errors import EpisodeError
from shoal.core.types import Message, Score
from shoal.rewards.outcome import INVALID_REPLY, parse_reply
from shoal.rewards.worker import CALL, OPEN

log = logging.getLogger(__name__)
Phase = Callable[[str], AbstractContextManager[Any]]


class Places:
    """A limited number of environments at a time, in one event loop at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(number)

    async def take(self, phase: Phase) -> Callable[[], None]:
        """Wait for a free place. Returns the function that frees it."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._free = asyncio.get_running_loop(), asyncio.Semaphore(self._number)
        if self._free.locked():
            with phase("environment_wait"):
                await self._free.acquire()
        else:
            await self._free.acquire()
        return self._free.release


class EnvironmentProcess:
    """The process of one stateful environment. Each call has a deadline; a failed call raises EpisodeError."""

    def __init__(self, request: Callable[[int, Mapping[str, Any]], Awaitable[bytes]], phase: Phase) -> None:
        self._request = request
        self._phase = phase
        self.opened: dict[str, Any] = {}  # what `open` of the environment returned

    async def open(self, task: Mapping[str, Any]) -> None:
        self.opened = (await self._call(OPEN, task))[1]

    async def call_tools(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return (await self._call(CALL, {"tools": list(calls)}))[1]

    async def score(self, messages: Sequence[Message]) -> Score:
        return (await self._call(CALL, {"messages": list(messages)}))[0]

    async def _call(self, kind: int, fields: Mapping[str, Any]) -> tuple[Score, dict[str, Any]]:
        with self._phase("environment"):
            body = await self._request(kind, fields)
        if (score := _read(body)).status != "ok":
            raise EpisodeError(score)
        return score, json.loads(body).get("value") or {}


class CloseReport:
    """Warns once per environment if an object could not be closed. Its rollout has its reward, and is trained."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def __call__(self, env: str, outcome: bytes) -> None:
        if (score := _read(outcome)).status != "ok" and env not in self._reported:
            self._reported.add(env)
            log.warning("%s: an environment was not closed properly: %s", env, score.error)


def _read(body: bytes) -> Score:
    try:
        return parse_reply(body)[0]
    except ValueError:
        return Score("error", error=INVALID_REPLY)
