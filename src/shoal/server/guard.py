"""Who may ask at all, and how much: a key, a token to steer, the names of this machine, sizes, numbers of clients.

Stands before every route, known or not, so a new route is guarded without knowing it.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.observability.token import CONTROL

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_LIMIT_S = 60.0
OPEN_PATHS = ("/health",)
NO_KEY, NO_TOKEN = "invalid_api_key", "invalid_token"
STORAGE = "storage"  # the code of what could not be read, or is not what its manifest says


@dataclass(frozen=True)
class Access:
    key: str | None = None  # for everything
    token: str | None = None  # where there is no key: for the paths of `steering`
    steering: frozenset[str] = frozenset()  # without a key and a token nobody has them
    loopback: bool = True  # then only requests to a loopback name are answered, whatever resolves to it elsewhere
    body_bytes: int = 64 * 2**20
    clients: int = 1024  # requests at once
    headers: tuple[tuple[bytes, bytes], ...] = ()  # that every answer carries


class _Refusal(Exception):
    def __init__(self, status: int, text: str, code: str) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code


class Guard:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._clients = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self._clients += 1
        try:
            await self._answer(scope, receive, self._marked(send))
        finally:
            self._clients -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._admit(scope)
            body = await self._body(receive)
        except _Refusal as refusal:
            return await _refuse(send, refusal)
        if body is not None:
            await self._app(scope, _again(body, receive), send)

    def _marked(self, send: Send) -> Send:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._access.headers]}
            await send(message)

        return marked

    def _admit(self, scope: Scope) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if self._clients > self._access.clients:
            raise _Refusal(503, f"{self._access.clients} requests are being answered; try again", "overloaded")
        self._check_names(headers)
        self._check_secret(scope, headers.get("authorization", ""))
        if int(headers.get("content-length", "0") or 0) > self._access.body_bytes:
            raise self._too_large()

    def _check_secret(self, scope: Scope, authorization: str) -> None:
        access, (kind, _, given) = self._access, authorization.partition(" ")
        needed = access.key if access.key is not None else access.token or ""
        if access.key is None:
            is_open = scope["path"] not in access.steering
        else:
            is_open = scope["path"] in OPEN_PATHS and scope["method"] == "GET"
        right = bool(needed) and hmac.compare_digest(given.strip().encode(), needed.encode())
        if is_open or (right and kind.lower() == "bearer"):
            return
        if access.key is not None:
            raise _Refusal(401, "a key is needed: Authorization: Bearer KEY", NO_KEY)
        what = f"the token in handshake/{CONTROL} of the server's output_dir is needed: Authorization: Bearer TOKEN"
        raise _Refusal(401, what, NO_TOKEN)

    def _check_names(self, headers: dict[str, str]) -> None:
        """A web page that the user looks at must not reach the server: neither by name nor from its own origin."""
        if self._access.loopback and _host(headers.get("host", "")) not in LOOPBACK:
            raise _Refusal(421, "this server answers to localhost and 127.0.0.1 only", "wrong_host")
        origin = headers.get("origin")
        if origin is not None and _host(_name_in(origin)) != _host(headers.get("host", "")):
            raise _Refusal(403, "requests from web pages of other origins are refused", "wrong_origin")

    async def _body(self, receive: Receive) -> bytes | None:
        """All of it, bounded in size and time; None if the client went away."""
        try:
            return await asyncio.wait_for(self._read(receive), BODY_LIMIT_S)
        except TimeoutError:
            text = f"the request did not arrive within {BODY_LIMIT_S:.0f} s"
            raise _Refusal(408, text, "timeout") from None

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self._access.body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)

    def _too_large(self) -> _Refusal:
        return _Refusal(413, f"the body is larger than {self._access.body_bytes} bytes", "body_too_large")


def _again(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever the client does next."""
    unread = [body]

    async def replay() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replay


def _name_in(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # such as http://[, which is nobody's
        return ""


def _host(value: str) -> str:
    """Without the port; [::1]:80 → ::1."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.rpartition(":")[0] if value.count(":") == 1 else value


def error_body(text: str, code: str, param: str | None = None, kind: str = "invalid_request_error") -> bytes:
    """As OpenAI's clients read it."""
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


async def _refuse(send: Send, refusal: _Refusal) -> None:
    body = error_body(refusal.text, refusal.code)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
