"""Authentication and limits (API key, control token, Host and Origin checks, body size, concurrency), and the listener.

`Guard` wraps the whole app, so that it also covers unknown and future routes. `Listener` runs an app on a socket in the
current event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shoal.core.errors import ConfigError, EngineError
from shoal.runs.secrets import CONTROL, NO_TOKEN

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_LIMIT_S = 60.0
HEADER_LIMIT_S = 20.0
HEADER_BYTES = 2**16
FIELD_BYTES, OBJECT_BYTES = 2**17, 128
DEFAULT_PORTS = {"http": 80, "https": 443}
OPEN_PATHS = ("/health",)
NO_KEY = "invalid_api_key"


@dataclass(frozen=True)
class Access:
    key: str | None = None  # API key for every route
    token: str | None = None  # control token, used without a key, for the paths in `control_paths`
    control_paths: frozenset[str] = frozenset()  # denied to everyone if there is neither key nor token
    loopback: bool = True  # require a loopback name in the Host header (against DNS rebinding)
    body_bytes: int = 64 * 2**20
    prompt_bytes: int = 64 * 2**20  # limit of bodies outside control_paths; make_app derives it from the context
    total_body_bytes: int = 2**30  # of all requests together
    clients: int = 1024  # concurrent requests
    headers: tuple[tuple[bytes, bytes], ...] = ()  # added to every response


class _Rejection(Exception):
    def __init__(self, status: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class Guard:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._clients = 0
        self._held_bytes = 0  # bodies of all requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._clients += 1
        try:
            await self._handle(scope, receive, self._with_headers(send))
        finally:
            self._clients -= 1

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = bytearray(), 0
        try:
            limit = self._admit(scope)
            if await self._read_within_deadline(receive, body, limit):
                size, replay = len(body), _replay(bytes(body), receive)
                body.clear()  # the app frees its copy when it is parsed
                await self._app(scope, replay, send)
        except _Rejection as rejection:
            await _reject(send, rejection)
        finally:
            self._held_bytes -= size or len(body)

    def _with_headers(self, send: Send) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._access.headers]}
            await send(message)

        return send_with_headers

    def _admit(self, scope: Scope) -> int:
        """Check everything that the headers show; returns the limit of the body in bytes."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._clients > self._access.clients:
            raise _Rejection(
                503, f"{self._access.clients} concurrent requests is the limit; try again later", "overloaded"
            )
        self._check_names(headers)
        self._check_secret(scope, headers.get("authorization", ""))
        access, is_control = self._access, scope["path"] in self._access.control_paths
        limit = access.body_bytes if is_control else min(access.body_bytes, access.prompt_bytes)
        if int(headers.get("content-length", "0") or 0) > limit:
            raise _too_large(limit)
        return limit

    def _check_secret(self, scope: Scope, authorization: str) -> None:
        access, (kind, _, given) = self._access, authorization.partition(" ")
        needed = access.key if access.key is not None else access.token or ""
        if access.key is None:
            is_open = scope["path"] not in access.control_paths
        else:
            is_open = scope["path"] in OPEN_PATHS and scope["method"] == "GET"
        right = bool(needed) and hmac.compare_digest(given.strip().encode(), needed.encode())
        if is_open or (right and kind.lower() == "bearer"):
            return
        if access.key is not None:
            raise _Rejection(401, "this route requires the key: Authorization: Bearer KEY", NO_KEY)
        where = f"handshake/{CONTROL} of the server's output_dir"
        text = f"this route requires the token in {where}: Authorization: Bearer TOKEN"
        raise _Rejection(401, text, NO_TOKEN)

    def _check_names(self, headers: dict[str, str]) -> None:
        """Keep web pages in the user's browser away from the server: no foreign host name, no foreign origin."""
        if self._access.loopback and _host(headers.get("host", "")) not in LOOPBACK:
            raise _Rejection(421, "the Host header must be localhost or 127.0.0.1", "wrong_host")
        origin = headers.get("origin")
        if origin is not None and not self._same_origin(origin, headers.get("host", "")):
            raise _Rejection(403, "requests from web pages of other origins are not allowed", "wrong_origin")

    def _same_origin(self, origin: str, host: str) -> bool:
        """Compare scheme, host and port. A proxy in front of a server with a key may add TLS."""
        scheme, _, address = origin.strip().lower().partition("://")
        if scheme != "http" and (scheme != "https" or self._access.loopback):
            return False
        port = DEFAULT_PORTS[scheme]
        return "/" not in address and "@" not in address and _host_and_port(address, port) == _host_and_port(host, port)

    async def _read_within_deadline(self, receive: Receive, body: bytearray, limit: int) -> bool:
        """Read the whole body; False if the client disconnected."""
        try:
            async with asyncio.timeout(BODY_LIMIT_S):  # wait_for's task and its error would keep the body in a cycle
                return await self._read(receive, body, limit)
        except TimeoutError:
            text = f"the request body did not arrive within {BODY_LIMIT_S:.0f} s"
            raise _Rejection(408, text, "timeout") from None

    async def _read(self, receive: Receive, body: bytearray, limit: int) -> bool:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return False
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            if self._held_bytes + len(piece) > self._access.total_body_bytes:
                raise _Rejection(503, "the bodies of concurrent requests are too large; try again later", "overloaded")
            body += piece
            self._held_bytes += len(piece)
            if not message.get("more_body"):
                return True


def _too_large(limit: int) -> _Rejection:
    return _Rejection(413, f"the body is larger than {limit} bytes", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive function that returns the body that was read, then further messages of the client."""
    unread = [body]

    async def next_message() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return next_message


def _host(value: str) -> str:
    return _host_and_port(value, 0)[0]


def _host_and_port(value: str, default_port: int) -> tuple[str, int | None]:
    """[::1]:80 → ("::1", 80). The port is None if it is not a number."""
    value = value.strip().lower()
    if value.startswith("["):
        host, _, port = value[1:].partition("]")
        port = port.removeprefix(":")
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
    else:
        host, port = value, ""
    return host, default_port if not port else int(port) if port.isdecimal() else None


def error_body(text: str, code: str, param: str | None = None, kind: str = "invalid_request_error") -> bytes:
    """An error in the OpenAI format."""
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


async def _reject(send: Send, rejection: _Rejection) -> None:
    body = error_body(rejection.text, rejection.code)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if rejection.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": rejection.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


START_LIMIT_S = 30.0
OPEN_FILES = 8192
CLOSE_LIMIT_S = 5.0
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the client closes them


_HttpProtocol: Any = AutoHTTPProtocol  # uvicorn's, by the parser that is installed


class _Protocol(_HttpProtocol):
    """Closes connections whose request headers are not complete within HEADER_LIMIT_S, or too large.

    `_header_bytes` counts one header without an end, `_field_bytes` many headers, also those after a chunked body.
    """

    _deadline: asyncio.TimerHandle | None = None
    _in_headers = False
    _header_bytes = 0  # received since the headers of a request began, without the first piece
    _field_bytes = 0  # of complete headers of a request, with what Python needs for each

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_LIMIT_S, transport.abort)

    def on_message_begin(self) -> None:  # of httptools; the other parser, h11, limits the size itself
        super().on_message_begin()
        self._in_headers, self._field_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value) + OBJECT_BYTES
        if self._field_bytes > FIELD_BYTES:
            self.transport.abort()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        continues = self._in_headers
        super().data_received(data)
        self._header_bytes = self._header_bytes + len(data) if continues and self._in_headers else 0
        if self._header_bytes > HEADER_BYTES:
            self.transport.abort()
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.timeout_keep_alive_task is None:  # part of a request's headers
            self._deadline = self._deadline or self.loop.call_later(HEADER_LIMIT_S, self.transport.abort)
        else:
            self._end_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Leaves signal handling to the process, which may be a training run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Reserve the port. Connections are accepted once a Listener runs on the socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken((host, port)) from error
        raise ConfigError(f"infer.host: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def _allow_connections() -> None:
    """Raise the limit of open files: each connection is one, and the usual soft limit is 1024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < OPEN_FILES:
        wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def _taken(address: tuple[str, int]) -> ConfigError:
    port = f"{address[1]} on {address[0]}"
    return ConfigError(f"infer.port: {port} is already in use; stop the process that uses it, or set another port")


class Listener:
    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app, http=_Protocol, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            date_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1,
            backlog=4096,
        )  # fmt: skip
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    async def start(self) -> None:
        _allow_connections()
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="listener")
        async with asyncio.timeout(START_LIMIT_S):
            while not self._server.started:
                if self._task.done():
                    error = self._task.exception()
                    raise (
                        _taken(self._sock.getsockname()[:2])
                        if isinstance(error, OSError)
                        else EngineError(f"no HTTP: {error}")
                    )
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Close all connections; requests in flight get one second to finish."""
        if self._task is None:
            self._sock.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_LIMIT_S)
        if not done:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._sock.close()
