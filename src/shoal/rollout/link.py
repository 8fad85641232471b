"""The way to a server: JSON over HTTP, with every failure named by address. Used by the engines that are servers.

A lost connection is told apart from an answer that is wrong: the first may be asked again, the second ends the run.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from shoal.errors import ConfigError, DeadlineError, EngineError, StorageError
from shoal.observability.token import read_token
from shoal.rollout.lost import Absent, Busy, Foreign, Late, Loading, Lost, Refused, Unreachable
from shoal.server.guard import NO_TOKEN, STORAGE

T = TypeVar("T")
# Told in words for whom one waits and since when, again and again; None when the wait is over.
Waiting = Callable[[str | None], None]
CONNECT_S = 10.0
PROBE_S = 5.0
SILENT_PROBE_S = 2.0  # of one that shows no sign of life elsewhere either
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
AWAY = (502, 503, 504)  # a proxy without a server behind it, or one that is not ready
BUSY = 429
SHOWN = 200


@dataclass(frozen=True)
class Address:
    base_url: str  # as OpenAI's clients take it, ending in /v1
    key: str | None = None
    deadline_s: float = 600.0  # without anybody answering
    request_s: float = 600.0  # that one request may take
    connections: int = 1024
    name: str = "the inference server"
    kind: str = "grpo-infer"  # what has to answer there
    start: str = "start it with shoal grpo-infer"  # what to do where nobody answers
    # What is known of a server that is absent, and what to do then, where somebody knows more than that.
    whereabouts: Callable[[], tuple[str, str] | None] = lambda: None
    # Seconds since the last sign of life of one that shows none any more, where somebody sees them; 0 = it lives.
    silent_s: Callable[[], float] = lambda: 0.0
    token_file: Path | None = None  # where a server without a key leaves the token that steers it
    answer_bytes: int = 1 << 28  # the longest answer that is read; 128k tokens with all they were drawn from are less

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")


class Link:
    """Requests for completions have a pool of their own, so that steering a server never waits behind them."""

    def __init__(self, address: Address, waiting: Waiting = lambda _: None) -> None:
        self.address = address
        self.name = f"{address.name} at {address.root}"
        self._waiting = waiting
        self._pools: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    async def get(self, path: str, limit_s: float = PROBE_S) -> tuple[dict[str, Any], Mapping[str, str]]:
        return await self.ask("GET", path, None, limit_s)

    async def meet(self, path: str, limit_s: float, *, reads: bool = True) -> dict[str, Any]:
        """The first thing that is asked of whoever answers: one of another kind is refused by name."""
        try:
            return (await self.ask("GET", path, None, limit_s, reads=reads))[0]
        except Refused as error:
            if error.status != 404:
                raise
            raise ConfigError(str(self._foreign(f"it has no {path}, status 404"))) from error
        except Foreign as error:
            raise ConfigError(str(error)) from error

    async def post(
        self, path: str, body: Mapping[str, Any], limit_s: float
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Asked again of a server that is busy, for as long as one may go without an answer at all."""
        began, pause_s = time.monotonic(), SHORTEST_PAUSE_S
        while True:
            try:
                return await self.ask("POST", path, body, limit_s)
            except Busy as busy:
                if time.monotonic() - began > self.address.deadline_s:
                    raise Late(f"{busy} for {self.address.deadline_s:.0f} s (status {BUSY})") from busy
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def tell(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> None:
        """Post what is answered with a status alone, whatever text comes with it."""
        await self.ask("POST", path, body or {}, limit_s or self.address.deadline_s, reads=False)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float, *, reads: bool = True
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The answer and its headers. Raises Lost, or EngineError for an answer that is no answer."""
        data = msgspec.json.encode(body) if body is not None else None
        steers = not path.endswith(("completions", "generate"))
        token = self._token() if steers else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # From the moment it is sent: a request that waits for a free connection is not late.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=limit_s)
        pool = self._pool(completions=not steers)
        try:
            async with pool.request(
                method, self.address.root + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                async with asyncio.timeout(limit_s):  # one that answers byte by byte is late as well
                    content = await self._content(path, reply)
                if reply.status == 200 and not reads:
                    return {}, reply.headers
                return self._read(path, reply.status, content, token), reply.headers
        except aiohttp.ConnectionTimeoutError as error:
            raise Unreachable(f"no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise Late(f"no answer to {path} within {limit_s:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"orch.client.base_url: {self.address.base_url!r} is not an address") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _loss(error) from error

    async def _content(self, path: str, reply: aiohttp.ClientResponse) -> bytes:
        """All of it, unless it is more than anybody asked for."""
        content, limit = bytearray(), self.address.answer_bytes
        async for piece in reply.content.iter_any():
            content += piece
            if len(content) > limit:
                raise EngineError(f"{self.name} answered {path} with more than {limit} bytes, which is the limit")
        return bytes(content)

    def _token(self) -> str | None:
        """Read anew each time: a server that was restarted has another."""
        file = self.address.token_file
        return read_token(file) if file is not None and self.address.key is None else None

    def _read(self, path: str, status: int, raw: bytes, token: str | None = None) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if status in (*AWAY, BUSY):
                raise (Busy if status == BUSY else Lost)(f"status {status}") from error
            if status == 404:
                raise self._foreign(f"it has no {path}, status 404") from error
            start = raw[:SHOWN].decode("utf-8", "replace")
            if start.lstrip().startswith("<"):
                raise self._foreign(f"it answered {path} with a page, status {status}") from error
            raise EngineError(
                f"{self.name} answered {path} with what is not JSON (status {status}): {start!r}"
            ) from error
        if status == 200 and isinstance(answer, dict):
            return answer
        reason = _message(answer)
        if status == 200:
            raise EngineError(
                f"{self.name} answered {path} with {type(answer).__name__}, not an object: {reason[:SHOWN]}"
            )
        if status in (*AWAY, BUSY):
            raise (Busy if status == BUSY else Lost)(reason)
        if status == 401 and _code(answer) == NO_TOKEN:
            raise self._denied(token)
        if status == 401:
            raise ConfigError(f"{self.name} wants a key: {reason}; set orch.client.api_key_var")
        if _code(answer) == STORAGE:
            raise StorageError(f"{self.name}: {reason}")
        raise Refused(f"{self.name} refused {path} (status {status}): {reason}", status)

    def _foreign(self, why: str) -> Foreign:
        kind = self.address.kind
        return Foreign(f"what answers as {self.name} is not {kind} ({why}); check orch.client.base_url")

    def _denied(self, shown: str | None) -> Exception:
        """A token that is not there yet, or is another by now, is waited for; one that stays wrong is another run's."""
        file = self.address.token_file
        if file is not None and (shown is None or read_token(file) != shown):
            return Lost(f"its token cannot be read in {file}")
        return ConfigError(
            f"{self.name} is not steered by the token of this run ({file}); is it the grpo-infer of this output_dir? "
            "Check orch.client.base_url, or give the server a key: infer.api_key_var and orch.client.api_key_var"
        )

    async def until_up(self, probe: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """What `probe` gives as soon as it is not lost; says for whom it waits, and gives up at the deadline."""
        limit_s = limit_s or self.address.deadline_s
        began, pause_s = time.monotonic(), SHORTEST_PAUSE_S
        since, told = began - self.address.silent_s(), False
        while True:
            try:
                found = await probe()
                self.tell_wait(None)
                return found
            except Lost as error:
                lost, (why, remedy) = error, self._excuse(error)
            if time.monotonic() - began > limit_s:
                raise DeadlineError(f"waited {limit_s:.0f} s for {self.name}, since {_clock(since)}: {why}; {remedy}")
            told = told or not isinstance(lost, Loading)
            if told:
                self.tell_wait(why, since)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def tell_wait(self, why: str | None, since: float = 0.0) -> None:
        """Why it is waited for; None when that is over."""
        self._waiting(f"waiting for {self.name} since {_clock(since)}: {why}" if why is not None else None)

    def _excuse(self, error: Lost) -> tuple[str, str]:
        """Why it does not answer, in words, and what to do about it."""
        known = self.address.whereabouts() if isinstance(error, Absent) else None
        if known is not None and not isinstance(error, Unreachable):
            return known
        return str(error), f"{self.address.start}, or check orch.client.base_url"

    def _pool(self, completions: bool) -> aiohttp.ClientSession:
        if self._closed:  # a session that is opened now would be closed by nobody
            raise EngineError(f"the way to {self.name} is closed")
        if completions not in self._pools:
            headers = {"Authorization": f"Bearer {self.address.key}"} if self.address.key is not None else {}
            limit = self.address.connections if completions else 8
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=30)
            self._pools[completions] = aiohttp.ClientSession(headers=headers, connector=connector, trust_env=False)
        return self._pools[completions]

    async def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            await pool.close()
        self._pools.clear()


def _clock(moment: float) -> str:
    """A moment of time.monotonic, for people."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - moment)))


def said_once(waiting: Waiting) -> Waiting:
    """The end of a wait is told where there was one: a look that finds the server as it was is no news."""
    told = False

    def say(text: str | None) -> None:
        nonlocal told
        if text is not None or told:
            waiting(text)
        told = text is not None

    return say


def _loss(error: Exception) -> Lost:
    """In words that do not need the library's names."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Unreachable("the name of its host is not known")
    if isinstance(error, aiohttp.ClientSSLError):
        return Absent("no TLS connection to it can be made")
    if isinstance(error, aiohttp.ClientConnectorError):
        why = os.strerror(error.errno).lower() if error.errno else "no connection"
        return Absent("nothing listens there" if error.errno == errno.ECONNREFUSED else why)
    if isinstance(error, aiohttp.ClientResponseError):
        return Lost("what listens there does not speak HTTP")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Lost("its answer broke off")
    return Lost("the connection broke off")


def _code(answer: Any) -> Any:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:1000]
