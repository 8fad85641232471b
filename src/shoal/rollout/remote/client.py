"""HTTP client for inference servers: requests, errors, the retry policy, health polling, and reports of long waits.

Used by the engines in this package; split/ uses the retry policy and the wait reports. A lost connection
(ConnectionLost) can be retried; a wrong or rejected response (EngineError) ends the run.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import stamina
from stamina.instrumentation import set_on_retry_hooks

from shoal.core.errors import ConfigError, DeadlineError, EngineError, StorageError
from shoal.runs.secrets import NO_TOKEN, STORAGE, read_token


class ConnectionLost(Exception):
    """No response, or an incomplete one. The message gives the reason."""


class ServerUnreachable(ConnectionLost):
    """Nothing listens at the address, or it cannot be reached."""


class Loading(ServerUnreachable):
    """Nothing listens yet, as at every start. Not reported unless another reason was reported before."""


class Unreachable(ServerUnreachable):
    """The address cannot be reached."""


class ResponseTimeout(ConnectionLost):
    """The server accepted the request and did not respond in time."""


class WrongServer(EngineError):
    """Another kind of server responds at the address."""


class ServerBusy(ConnectionLost):
    """The server is temporarily busy (status 429)."""


class RequestRefused(EngineError):
    """The server rejected the request with HTTP status `status`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


T = TypeVar("T")
BACKOFF: Any = {"attempts": None, "wait_initial": 0.05, "wait_max": 2.0, "wait_jitter": 0.05}  # seconds
set_on_retry_hooks(())  # retries are reported by WaitReporter; by default stamina logs each one


Retried = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]  # a predicate decides per error


def retry(on: Retried, limit_s: float | None = None) -> stamina.BoundAsyncRetryingCaller:
    """The retry policy of connections to servers and between processes: `await retry(ConnectionLost)(send, request)`.
    Exponential backoff with jitter. After `limit_s` the last error is raised; None = no limit."""
    return stamina.AsyncRetryingCaller(timeout=limit_s, **BACKOFF).on(on)


def retry_blocking(on: Retried, limit_s: float | None = None) -> stamina.BoundRetryingCaller:
    """The same for a thread."""
    return stamina.RetryingCaller(timeout=limit_s, **BACKOFF).on(on)


class HealthPoller:
    """Polls server health while requests are outstanding, so a dead server fails them at once, not at the timeout.

    `sleep` is awaited before each `check`. An error of `check` is raised in all outstanding requests.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], sleep: Callable[[], Awaitable[None]]) -> None:
        self._check = check
        self._sleep = sleep
        self._outstanding: dict[asyncio.Future[Any], tuple[str, float]] = {}  # name and start of each request
        self._task: asyncio.Task[None] | None = None

    async def wait_for(self, request: Coroutine[Any, Any, T], name: str = "") -> T:
        """The response, or the error passed to `fail` before it arrives. Name requests that `overdue` should report."""
        task = asyncio.ensure_future(request)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outstanding[gone] = (name, time.monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="health poller")
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                gone.result()
            return task.result()
        finally:
            self._outstanding.pop(gone, None)
            if gone.done():
                gone.exception()  # mark it as retrieved, or asyncio logs it
            task.cancel()  # no effect if it is done
            await asyncio.gather(task, return_exceptions=True)

    def fail(self, error: Exception) -> None:
        """Raise the error in all outstanding requests."""
        outstanding, self._outstanding = self._outstanding, {}
        for gone in outstanding:
            gone.set_exception(error)

    def overdue(self, limit_s: float) -> str | None:
        """The name of a request that has been outstanding for longer than this."""
        latest = time.monotonic() - limit_s
        return next((name for name, started in self._outstanding.values() if name and started < latest), None)

    async def _poll(self) -> None:
        while self._outstanding:
            await self._sleep()
            if not self._outstanding:
                return
            try:
                await self._check()
            except Exception as error:  # any error goes to the callers
                self.fail(error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


FIRST_REPORT_S = 3.0  # shorter waits are not reported
Tell = Callable[[str], None]


@dataclass
class WaitReporter:
    """Reports a wait after FIRST_REPORT_S, then at doubling intervals, and when it is over."""

    tell: Tell
    lasted_s: Callable[[], float] = lambda: 0.0  # duration of a wait before its first `report`
    whom: str = "grpo-infer"  # the process or server that `report` is about
    _next: dict[str, float] = field(default_factory=dict)  # duration at which each wait is reported next
    _since: float | None = None  # start of the wait that `report` is about

    def note(self, component: str, silent_s: float, where: str = "") -> None:
        """A wait for a component that has lasted `silent_s`."""
        if silent_s >= self._next.get(component, FIRST_REPORT_S):
            self._next[component] = 2 * silent_s
            self.tell(f"waiting for grpo-{component}{where} ({silent_s:.0f} s so far)")

    def over(self, component: str) -> None:
        if self._next.pop(component, None) is not None:
            self.tell(f"grpo-{component} responds")

    def report(self, what: str | None) -> None:
        """A wait described by the caller, who repeats the call until it is over and then passes None."""
        if what is None:
            if self._next.pop("", None) is not None:
                self.tell(f"{self.whom} responds")
            self._since = None
            return
        now = time.monotonic()
        self._since = now - self.lasted_s() if self._since is None else self._since
        if now - self._since >= self._next.get("", FIRST_REPORT_S):
            self._next[""] = 2 * (now - self._since)
            self.tell(what)


# Called repeatedly with a description of a wait, and with None when it is over.
Waiting = Callable[[str | None], None]
CONNECT_S = 10.0
PROBE_S = 5.0
SILENT_PROBE_S = 2.0  # if the heartbeat of the server is missing too
MAX_LOSSES = 5  # of one request in a row by a server that is up
UNAVAILABLE = (502, 503, 504)  # a proxy without a server behind it, or a server that is not ready
BUSY = 429
QUOTED_CHARACTERS = 200


@dataclass(frozen=True)
class Address:
    base_url: str  # as for OpenAI clients, ending in /v1
    key: str | None = None
    deadline_s: float = 600.0  # for a server that does not respond
    request_s: float = 600.0  # for one request
    connections: int = 1024
    name: str = "the inference server"
    kind: str = "grpo-infer"  # the kind of server expected there
    start: str = "start it with shoal grpo-infer"  # the remedy if nothing responds
    url_key: str = "orch.client.base_url"  # configuration keys, for messages
    api_key: str = "orch.client.api_key_var"
    # More precise reason and remedy for a server that does not respond, if known.
    whereabouts: Callable[[], tuple[str, str] | None] = lambda: None
    # Seconds since the last heartbeat of a server whose heartbeat stopped; 0 = it is alive or has no heartbeat.
    silent_s: Callable[[], float] = lambda: 0.0
    token_file: Path | None = None  # control token of a server without a key
    answer_bytes: int = 1 << 28  # largest response that is read; 128k tokens with their kept ids are smaller

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")


class HttpClient:
    """Completion requests have their own connection pool, so control requests never wait behind them."""

    def __init__(self, address: Address, waiting: Waiting = lambda _: None) -> None:
        self.address = address
        self.name = f"{address.name} at {address.root}"
        self._waiting = waiting
        self._pools: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    async def get(self, path: str, limit_s: float = PROBE_S) -> tuple[dict[str, Any], Mapping[str, str]]:
        return await self.request("GET", path, None, limit_s)

    async def identify(self, path: str, limit_s: float, *, reads: bool = True) -> dict[str, Any]:
        """The first request to a server. Raises ConfigError if it is another kind of server."""
        try:
            return (await self.request("GET", path, None, limit_s, reads=reads))[0]
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise ConfigError(str(self._foreign(f"it has no {path}, status 404"))) from error
        except WrongServer as error:
            raise ConfigError(str(error)) from error

    async def post(
        self, path: str, body: Mapping[str, Any], limit_s: float
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Retries while the server is busy (status 429), for at most `deadline_s`."""
        try:
            return await retry(ServerBusy, self.address.deadline_s)(self.request, "POST", path, body, limit_s)
        except ServerBusy as busy:
            raise ResponseTimeout(f"{busy} for {self.address.deadline_s:.0f} s (status {BUSY})") from busy

    async def tell(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> None:
        """Post a request whose response body is ignored."""
        await self.request("POST", path, body or {}, limit_s or self.address.deadline_s, reads=False)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float, *, reads: bool = True
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The response and its headers. Raises ConnectionLost, or EngineError for an invalid response."""
        data = msgspec.json.encode(body) if body is not None else None
        controls = not path.endswith(("completions", "generate"))
        token = self._token() if controls else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # Counted from sending: time spent waiting for a free connection does not count.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=limit_s)
        pool = self._pool(completions=not controls)
        try:
            async with pool.request(
                method, self.address.root + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                async with asyncio.timeout(limit_s):  # limits slow responses too
                    content = await self._content(path, reply)
                if reply.status == 200 and not reads:
                    return {}, reply.headers
                return self._read(path, reply.status, content, token), reply.headers
        except aiohttp.ConnectionTimeoutError as error:
            raise Unreachable(f"no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            raise ResponseTimeout(f"no answer to {path} within {limit_s:.0f} s") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.address.url_key}: {self.address.base_url!r} is not an address") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_lost(error) from error

    async def _content(self, path: str, reply: aiohttp.ClientResponse) -> bytes:
        """The body, up to `answer_bytes`."""
        content, limit = bytearray(), self.address.answer_bytes
        async for piece in reply.content.iter_any():
            content += piece
            if len(content) > limit:
                raise EngineError(f"{self.name} answered {path} with more than {limit} bytes, which is the limit")
        return bytes(content)

    def _token(self) -> str | None:
        """Read for every request, since a restarted server has a new one."""
        file = self.address.token_file
        return read_token(file) if file is not None and self.address.key is None else None

    def _read(self, path: str, status: int, raw: bytes, token: str | None = None) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if status in (*UNAVAILABLE, BUSY):
                raise (ServerBusy if status == BUSY else ConnectionLost)(f"status {status}") from error
            if status == 404:
                raise self._foreign(f"it has no {path}, status 404") from error
            start = raw[:QUOTED_CHARACTERS].decode("utf-8", "replace")
            if start.lstrip().startswith("<"):
                raise self._foreign(f"it answered {path} with a page, status {status}") from error
            raise EngineError(
                f"{self.name} answered {path} with something that is not JSON (status {status}): {start!r}"
            ) from error
        if status == 200 and isinstance(answer, dict):
            return answer
        reason = _message(answer)
        if status == 200:
            raise EngineError(
                f"{self.name} answered {path} with {type(answer).__name__}, not an object: {reason[:QUOTED_CHARACTERS]}"
            )
        if status in (*UNAVAILABLE, BUSY):
            raise (ServerBusy if status == BUSY else ConnectionLost)(reason)
        if status == 401 and _code(answer) == NO_TOKEN:
            raise self._denied(token)
        if status == 401:
            raise ConfigError(f"{self.name} requires a key: {reason}; set {self.address.api_key}")
        if _code(answer) == STORAGE:
            raise StorageError(f"{self.name}: {reason}")
        raise RequestRefused(f"{self.name} refused {path} (status {status}): {reason}", status)

    def _foreign(self, why: str) -> WrongServer:
        kind, key = self.address.kind, self.address.url_key
        return WrongServer(f"the server that responds as {self.name} is not {kind} ({why}); check {key}")

    def _denied(self, shown: str | None) -> Exception:
        """Retry if the token is missing or was replaced meanwhile; otherwise the server belongs to another run."""
        file = self.address.token_file
        if file is not None and (shown is None or read_token(file) != shown):
            return ConnectionLost(f"its token cannot be read from {file}")
        return ConfigError(
            f"{self.name} rejected the control token of this run ({file}); is it the grpo-infer of this output_dir? "
            "Check orch.client.base_url, or give the server a key: infer.api_key_var and orch.client.api_key_var"
        )

    async def until_up(self, probe: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Retries `probe` while the connection is lost, and reports the wait. Raises DeadlineError after `limit_s`."""
        limit_s = limit_s or self.address.deadline_s
        since, reported = time.monotonic() - self.address.silent_s(), False

        def report(error: Exception) -> bool:
            nonlocal reported
            if not isinstance(error, ConnectionLost):
                return False
            reported = reported or not isinstance(error, Loading)
            if reported:
                self.report_wait("; ".join(self._reason(error)), since)
            return True

        try:
            found = await retry(report, limit_s)(probe)
        except ConnectionLost as lost:
            why, remedy = self._reason(lost)
            raise DeadlineError(
                f"waited {limit_s:.0f} s for {self.name}, since {_clock(since)}: {why}; {remedy}"
            ) from lost
        self.report_wait(None)
        return found

    async def resend(
        self,
        what: str,
        send: Callable[[], Awaitable[T]],
        recover: Callable[[ConnectionLost], Awaitable[bool]],
    ) -> T:
        """Send until there is a response. After a lost connection, `recover` waits until the server is back and has its
        weights; it returns True if the server was restarted, and raises to give up. A server that stays up and loses
        the same request MAX_LOSSES times in a row is an error."""
        losses = 0

        async def attempt() -> T:
            nonlocal losses
            try:
                return await send()
            except ConnectionLost as error:
                losses = 0 if await recover(error) else losses + 1
                if losses < MAX_LOSSES:
                    raise
                raise EngineError(f"{self.name} is up but lost {what} {losses} times in a row: {error}") from error

        return await retry(ConnectionLost)(attempt)

    def report_wait(self, why: str | None, since: float = 0.0) -> None:
        """Why the server does not respond; None when it does."""
        self._waiting(f"waiting for {self.name} since {_clock(since)}: {why}" if why is not None else None)

    def _reason(self, error: ConnectionLost) -> tuple[str, str]:
        """Why it does not respond, and the remedy."""
        known = self.address.whereabouts() if isinstance(error, ServerUnreachable) else None
        if known is not None and not isinstance(error, Unreachable):
            return known
        return str(error), f"{self.address.start}, or check {self.address.url_key}"

    def _pool(self, completions: bool) -> aiohttp.ClientSession:
        if self._closed:  # nothing would close a session that is opened now
            raise EngineError(f"the client of {self.name} is closed")
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
    """A time.monotonic value as local time."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - moment)))


def report_changes(waiting: Waiting) -> Waiting:
    """Forward the end of a wait (None) only if a wait was reported."""
    reported = False

    def report(text: str | None) -> None:
        nonlocal reported
        if text is not None or reported:
            waiting(text)
        reported = text is not None

    return report


def _connection_lost(error: Exception) -> ConnectionLost:
    """The error of aiohttp in plain words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Unreachable("its host name cannot be resolved")
    if isinstance(error, aiohttp.ClientSSLError):
        return ServerUnreachable("the TLS connection failed")
    if isinstance(error, aiohttp.ClientConnectorError):
        why = os.strerror(error.errno).lower() if error.errno else "no connection"
        return ServerUnreachable("nothing listens there" if error.errno == errno.ECONNREFUSED else why)
    if isinstance(error, aiohttp.ClientResponseError):
        return ConnectionLost("the server there does not speak HTTP")
    if isinstance(error, aiohttp.ClientPayloadError):
        return ConnectionLost("its answer broke off")
    return ConnectionLost("the connection broke off")


def _code(answer: Any) -> Any:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:1000]
