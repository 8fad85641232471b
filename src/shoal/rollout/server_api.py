"""What an inference server has to be able to do to stand behind the seam; one subclass a kind of server.

Asks and tells, waits for one that went away, and shows a server's log where it fails: versions and proofs are
remote.py's.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.errors import ConfigError, DeadlineError, EngineError
from shoal.rollout.answers import Answer, Reading
from shoal.rollout.facts import RemoteSettings, ServerFacts
from shoal.rollout.launch import ServerProcess, end_of_log
from shoal.rollout.link import Address, Link, Waiting
from shoal.rollout.lookout import Lookout
from shoal.rollout.lost import Absent, Late, Loading, Lost, Refused
from shoal.types import Request

HEALTH_S = 10.0
LOOK_EVERY_S = 5.0
OVERDUE_S = 60.0  # weights are read within it, of most models
ONCE_MORE_S = 1.0  # before one that was not found is taken for gone
MOST_LOSSES = 5  # of one request, by a server that comes up again and again
T = TypeVar("T")


def said_in_full(request: Request, ends: list[int]) -> dict[str, Any]:
    """The sampling parameters that servers have by the same names, all of them, so that no default of a server applies.
    Ends are listed, and a server's own idea of them is off."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": ends,
        "ignore_eos": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


class ServerApi(ABC):
    name: str  # for people
    link: Link
    reading: Reading
    settings: RemoteSettings

    def __init__(self, settings: RemoteSettings, waiting: Waiting, process: ServerProcess | None = None) -> None:
        self.settings = settings
        self._process = process
        self.reading = Reading(settings.vocab_size, settings.eos_token_ids, settings.detokenize)
        start = f"start {self.name} there, or set infer.engine_python and Shoal starts it"
        limits: dict[str, Any] = {"deadline_s": settings.timeout_s, "request_s": settings.timeout_s, "connections": 0}
        named: dict[str, Any] = {
            "name": self.name,
            "kind": self.name,
            "start": start,
            "whereabouts": settings.whereabouts,
        }
        self.link = Link(Address(settings.url, settings.api_key, **named, **limits), waiting)
        self._lookout = Lookout(self._look, lambda: asyncio.sleep(LOOK_EVERY_S))
        self._well_at = time.monotonic()  # when it was last known to be well
        self.waits = False  # somebody was told that it is waited for

    @property
    def opening(self) -> str:
        """What `connect` does, in words."""
        own = self._process
        return (
            f"starting {self.link.name}; its log is {own.launch.log}"
            if own is not None
            else f"connecting to {self.link.name}"
        )

    @asynccontextmanager
    async def in_its_words(self):
        """A server that fails says why in its log; its answer only says that it did."""
        try:
            yield
        except Refused as error:
            if error.status < 500:
                raise
            raise EngineError(await self.last_words(f"failed: {error}")) from error

    async def last_words(self, what: str) -> str:
        if self._process is not None:
            return await self._process.last_words(what)
        log = self.settings.log
        return (
            f"{self.name} {what.rstrip('.')}. {end_of_log(log) if log is not None and log.exists() else 'See its log'}"
        )

    async def get(self, path: str) -> dict[str, Any]:
        return (await self._answer(self.link.get(path, self.settings.timeout_s), path))[0]

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Takes as long as it takes, such as drawing."""
        return (await self._answer(self.link.post(path, body, self.settings.timeout_s)))[0]

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._answer(self.link.tell(path, body), path.partition("?")[0])

    async def _answer(self, asking: Coroutine[Any, Any, T], soon: str = "") -> T:
        answer = await self._lookout.unless_gone(asking, soon)
        if not self.waits or self.trouble() is None:  # another part of it may be stopped still
            self._note(None)
        return answer

    def trouble(self) -> str | None:
        """What it cannot say itself: it may say that it is well while the part that computes is stopped."""
        return self._process.stopped() if self._process is not None else self.settings.trouble()

    def _note(self, why: str | None) -> None:
        """It is waited for, and why; or it is well."""
        if why is not None:
            self.waits = True
            self.link.tell_wait(why, self._well_at)
            return
        self._well_at = time.monotonic()
        if self.waits:
            self.waits = False
            self.link.tell_wait(None)

    async def look(self) -> None:
        await self.link.ask("GET", "/health", None, HEALTH_S, reads=False)

    async def _look(self) -> None:
        """vLLM without its engine owes an answer to what was asked, ends by itself, and waits for its connections."""
        if (stopped := self.trouble()) is not None:  # there is no use in asking it
            return self._note(stopped)
        for look in (1, 2):
            try:
                await self.look()
                late = self._lookout.overdue(OVERDUE_S)
                return self._note(f"no answer to {late} yet" if late else None)
            except Late as error:  # it is there, and busy
                return self._note(str(error))
            except Lost:
                if look == 2:
                    raise
            await asyncio.sleep(ONCE_MORE_S)

    async def until_well(self, limit_s: float, key: str) -> None:
        """`key` is where the limit is set for a server of ours."""
        process = self._process

        async def probe() -> None:
            if process is not None and (failure := process.failure()) is not None:
                raise failure
            try:
                await self.link.meet("/health", HEALTH_S, reads=False)
            except Lost as lost:
                raise self._seen_from_here(lost) from lost
            if process is not None:
                process.heard()

        try:
            await self.link.until_up(probe, limit_s)
        except DeadlineError as error:
            if process is None:
                raise
            stopped = process.stopped()
            what = f"is not ready after {limit_s:g} s ({key})"
            raise DeadlineError(process.why(f"{what}: {stopped}" if stopped else what)) from error

    def _seen_from_here(self, lost: Lost) -> Lost:
        """Why a server of ours does not answer."""
        if self._process is None:
            return lost
        if (stopped := self._process.stopped()) is not None:
            return Lost(stopped)
        loads = isinstance(lost, Absent) and not self._process.listened
        return Loading("it is still loading") if loads else lost

    async def as_often_as_lost(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Asked again of a server that went away and came back; a late one is given up, and one of ours stays down."""
        lost: Lost | None = None
        for _ in range(MOST_LOSSES):
            try:
                async with self.in_its_words():
                    return await ask()
            except Late as error:
                raise self.too_late(error) from error
            except Lost as error:
                lost = error
                await self.back_again(error)
        raise EngineError(f"{self.link.name} was lost {MOST_LOSSES} times while it {what}: {lost}")

    def too_late(self, error: Late) -> DeadlineError:
        stopped = self.trouble()
        remedy = f": {stopped}" if stopped else "; raise orch.client.timeout if that is expected"
        return DeadlineError(f"{self.link.name}: {error}{remedy}")

    async def back_again(self, error: Lost) -> None:
        try:
            await self.until_well(self.settings.return_s, "orch.client.timeout, orch.deadline_s")
        except ConfigError as other:  # at the address by now
            raise EngineError(str(other)) from error

    async def close(self) -> None:
        await self._lookout.close()
        await self.link.close()

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """Ask what it serves, and refuse a server that was started without what a run needs."""

    @abstractmethod
    async def ask(self, request: Request, limit: int, adapter: str | None) -> Answer: ...

    @abstractmethod
    async def probe(self, token_ids: list[int], adapter: str | None) -> list[float]:
        """The largest log-probs of what follows a fixed prompt, under the weights served now."""

    @abstractmethod
    async def read_weights(self, path: str, version: int, *, partial: bool = False) -> None: ...

    @abstractmethod
    async def receive_weights(self, manifest: Mapping[str, Any], version: int) -> None: ...

    @abstractmethod
    async def add_adapter(self, name: str, path: str) -> None: ...

    @abstractmethod
    async def remove_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def hold(self) -> None:
        """Draw nothing more; requests in flight are kept."""

    @abstractmethod
    async def release(self) -> None: ...

    @abstractmethod
    async def served_version(self, adapter: str | None) -> str:
        """The name of the weights served, by which a server that was restarted is recognised."""
