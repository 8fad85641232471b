"""Base class of the engines on vLLM and SGLang: requests, retries, health and the server's log.

The abstract methods at the end are what a subclass implements for one kind of server. engine.py adds weight versions.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.core.errors import ConfigError, DeadlineError, EngineError
from shoal.core.types import Request
from shoal.rollout.remote.client import (
    Address,
    ConnectionLost,
    HealthPoller,
    HttpClient,
    Loading,
    RequestRefused,
    ResponseTimeout,
    ServerUnreachable,
    Waiting,
)
from shoal.rollout.remote.process import ServerProcess, end_of_log
from shoal.rollout.remote.server_info import CompletionReader, ParsedAnswer, RemoteSettings, ServerFacts

HEALTH_S = 10.0
POLL_EVERY_S = 5.0
OVERDUE_S = 60.0  # most models load their weights in less
RECHECK_S = 1.0  # before the second health check of an unreachable server
T = TypeVar("T")


def common_sampling(request: Request, ends: list[int]) -> dict[str, Any]:
    """All sampling parameters with the same name in both servers, so that no server default applies. `ends` replaces
    the server's own stop tokens."""
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
    link: HttpClient
    reading: CompletionReader
    settings: RemoteSettings

    def __init__(self, settings: RemoteSettings, waiting: Waiting, process: ServerProcess | None = None) -> None:
        self.settings = settings
        self._process = process
        self.reading = CompletionReader(settings.vocab_size, settings.eos_token_ids, settings.detokenize)
        start = f"start {self.name} there, or set infer.engine_python and Shoal starts it"
        limits: dict[str, Any] = {"deadline_s": settings.timeout_s, "request_s": settings.timeout_s, "connections": 0}
        named: dict[str, Any] = {
            "name": self.name,
            "kind": self.name,
            "start": start,
            "whereabouts": settings.whereabouts,
        }
        self.link = HttpClient(Address(settings.url, settings.api_key, **named, **limits), waiting)
        self._poller = HealthPoller(self._poll_health, lambda: asyncio.sleep(POLL_EVERY_S))
        self._healthy_at = time.monotonic()  # last time it was known to be healthy
        self.waits = False  # a wait was reported

    @property
    def opening(self) -> str:
        """What `connect` does, for the console."""
        own = self._process
        return (
            f"starting {self.link.name}; its log is {own.launch.log}"
            if own is not None
            else f"connecting to {self.link.name}"
        )

    @asynccontextmanager
    async def with_server_log(self):
        """Add the errors of the server's log to a response with status 5xx."""
        try:
            yield
        except RequestRefused as error:
            if error.status < 500:
                raise
            raise EngineError(await self.failure_message(f"failed: {error}")) from error

    async def failure_message(self, what: str) -> str:
        if self._process is not None:
            return await self._process.failure_message(what)
        log = self.settings.log
        return (
            f"{self.name} {what.rstrip('.')}. {end_of_log(log) if log is not None and log.exists() else 'See its log'}"
        )

    async def get(self, path: str) -> dict[str, Any]:
        return (await self._answer(self.link.get(path, self.settings.timeout_s), path))[0]

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request that may take long, such as sampling. It is never reported as overdue."""
        return (await self._answer(self.link.post(path, body, self.settings.timeout_s)))[0]

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._answer(self.link.tell(path, body), path.partition("?")[0])

    async def _answer(self, request: Coroutine[Any, Any, T], name: str = "") -> T:
        answer = await self._poller.wait_for(request, name)
        if not self.waits or self.trouble() is None:  # another of its processes may still be suspended
            self._note(None)
        return answer

    def trouble(self) -> str | None:
        """A problem that the server cannot report itself: it stays healthy while its engine is suspended."""
        return self._process.stopped() if self._process is not None else self.settings.trouble()

    def _note(self, why: str | None) -> None:
        """Report why the run waits for the server, or that it is healthy (None)."""
        if why is not None:
            self.waits = True
            self.link.report_wait(why, self._healthy_at)
            return
        self._healthy_at = time.monotonic()
        if self.waits:
            self.waits = False
            self.link.report_wait(None)

    async def check_health(self) -> None:
        await self.link.request("GET", "/health", None, HEALTH_S, reads=False)

    async def _poll_health(self) -> None:
        """After its engine died, vLLM keeps connections open without a response, and exits later."""
        if (stopped := self.trouble()) is not None:  # it would not respond
            return self._note(stopped)
        for check in (1, 2):
            try:
                await self.check_health()
                late = self._poller.overdue(OVERDUE_S)
                return self._note(f"no answer to {late} yet" if late else None)
            except ResponseTimeout as error:  # busy
                return self._note(str(error))
            except ConnectionLost:
                if check == 2:
                    raise
            await asyncio.sleep(RECHECK_S)

    async def wait_until_healthy(self, limit_s: float, key: str) -> None:
        """`key` is the configuration key of the limit for a server that Shoal started."""
        process = self._process

        async def probe() -> None:
            if process is not None and (failure := process.failure()) is not None:
                raise failure
            try:
                await self.link.identify("/health", HEALTH_S, reads=False)
            except ConnectionLost as lost:
                raise self._refine(lost) from lost
            if process is not None:
                process.note_listening()

        try:
            await self.link.until_up(probe, limit_s)
        except DeadlineError as error:
            if process is None:
                raise
            stopped = process.stopped()
            what = f"is not ready after {limit_s:g} s ({key})"
            raise DeadlineError(process.why(f"{what}: {stopped}" if stopped else what)) from error

    def _refine(self, lost: ConnectionLost) -> ConnectionLost:
        """The reason why a server that Shoal started does not respond."""
        if self._process is None:
            return lost
        if (stopped := self._process.stopped()) is not None:
            return ConnectionLost(stopped)
        loads = isinstance(lost, ServerUnreachable) and not self._process.listened
        return Loading("it is still loading") if loads else lost

    async def resend(
        self,
        what: str,
        send: Callable[[], Awaitable[T]],
        recover: Callable[[ConnectionLost], Awaitable[None]] | None = None,
    ) -> T:
        """Send again whenever the server was lost and is back. A late response raises DeadlineError; a server that
        Shoal started is not restarted."""

        async def recovered(error: ConnectionLost) -> bool:
            if isinstance(error, ResponseTimeout):
                raise self.timeout_error(error) from error
            await (recover or self.wait_until_back)(error)
            return False

        async with self.with_server_log():
            return await self.link.resend(what, send, recovered)

    def timeout_error(self, error: ResponseTimeout) -> DeadlineError:
        stopped = self.trouble()
        remedy = f": {stopped}" if stopped else "; raise orch.client.timeout if that is expected"
        return DeadlineError(f"{self.link.name}: {error}{remedy}")

    async def wait_until_back(self, error: ConnectionLost) -> None:
        try:
            await self.wait_until_healthy(self.settings.return_s, "orch.client.timeout, orch.deadline_s")
        except ConfigError as other:
            raise EngineError(str(other)) from error  # another server has the address now

    async def close(self) -> None:
        await self._poller.close()
        await self.link.close()

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """What the server serves. Raises ConfigError if it was started without an option that a run needs."""

    @abstractmethod
    async def complete(self, request: Request, limit: int, adapter: str | None) -> ParsedAnswer: ...

    @abstractmethod
    async def probe(self, token_ids: list[int], adapter: str | None) -> list[float]:
        """The largest log-probs of the next token after a fixed prompt, with the current weights."""

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
        """Stop sampling; requests in flight are kept."""

    @abstractmethod
    async def release(self) -> None: ...

    @abstractmethod
    async def served_version(self, adapter: str | None) -> str:
        """The name of the served weights. A restarted server has another one."""
