"""The HTTP routes over any RolloutEngine: OpenAI's, and the control routes of a training run.

`make_app` builds the app of grpo-infer. `LocalEndpoint` serves the same inference routes inside the training process,
on 127.0.0.1 and a free port, for environments that use HTTP. Each rollout has its own model name, <model>@<secret>, so
all clients share one address. The plain model name works as on any OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import shoal
from shoal.core.errors import ConfigError, DataError, EngineError, RequestError, ShoalError, StorageError
from shoal.core.types import SamplingParams
from shoal.runs.secrets import INCARNATION, STORAGE
from shoal.server.access import Access, Guard, Listener, bind, error_body
from shoal.server.completions import CompletionRequest, Completions, ServedModel
from shoal.server.control import Control, Names
from shoal.server.request_schema import (
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ModelName,
    SessionBody,
    TokenizeBody,
    decode,
    openapi,
)
from shoal.server.sessions import Session
from shoal.server.streaming import EventStream, stream, until_disconnect

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TIMED = ("/v1/completions", "/v1/chat/completions")
INLINE_BYTES = 2**20  # larger bodies are parsed in the pool
# Of the body of an inference request, which holds prompts: JSON needs at most 12 bytes per character, and the rest of a
# prompt's body is small. A batch of prompts of the usual 4 characters per token fits, too.
BASE_BODY_BYTES = 2**18
BODY_BYTES_PER_TOKEN = 3072


class Telemetry:
    """The metrics of a server. Counts all requests, rejected ones too; times completions until their last token."""

    def __init__(self, paths: frozenset[str], completions: Completions) -> None:
        self._paths = paths  # other paths share one label, so that clients cannot create labels
        self._registry = registry = CollectorRegistry()
        labels = ("path", "status")
        self._requests = Counter("shoal_requests", "Requests by path and status.", labels, registry=registry)
        registry.register(completions.prompt_tokens)
        registry.register(completions.completion_tokens)
        self._gauges = {
            "running": Gauge("shoal_requests_running", "Sequences being decoded.", registry=registry),
            "waiting": Gauge("shoal_requests_waiting", "Requests that wait for a slot.", registry=registry),
            "version": Gauge("shoal_weight_version", "The weight version that samples new tokens.", registry=registry),
        }
        what = "Time from a completion request to its last token."
        self._seconds = Histogram("shoal_request_seconds", what, buckets=BUCKETS_S, registry=registry)

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            began, status = time.monotonic(), 499  # no response: the client disconnected

            async def send_and_note_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, send_and_note_status)
            finally:
                path = scope["path"]
                self._requests.labels(path if path in self._paths else "other", status).inc()
                if path in TIMED and status == 200:
                    self._seconds.observe(time.monotonic() - began)

        return counted

    def text(self, health: Mapping[str, Any]) -> bytes:
        for name, gauge in self._gauges.items():
            gauge.set(health.get(name, 0))
        return generate_latest(self._registry)


T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Failed = Callable[[EngineError], None]


class _Disconnected(Exception):
    """The client disconnected before its response was ready."""


class Routes:
    """`failed` is called when the engine fails; clients see a 500."""

    def __init__(self, completions: Completions, names: Names, control: Control | None, failed: Failed) -> None:
        self._completions = completions
        self._names = names
        self._failed = failed
        self.gets: dict[str, Handler] = {
            "/health": self.health,
            "/metrics": self.metrics,
            "/openapi.json": self._get(lambda: self._openapi),
            "/v1/models": self._get(names.as_openai),
            "/v1/models/{name:path}": self.model,
        }
        self.posts: dict[str, Handler] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/tokenize": self.tokenize,
            "/detokenize": self._command(DetokenizeBody, completions.detokenize),
        }
        kinds = ChatBody, CompletionBody, TokenizeBody, DetokenizeBody
        bodies: dict[str, Any] = dict(zip(self.posts, kinds, strict=True))
        self.control_paths: frozenset[str] = frozenset()
        if control is not None:
            gets = {"/shoal/about": self._get(control.about), "/shoal/version": self._get(control.version)}
            commands = control.commands()
            self.gets |= gets
            self.posts |= {path: self._command(command.body, command.run) for path, command in commands.items()}
            bodies |= {path: command.schema for path, command in commands.items()}
            self.control_paths = frozenset([*gets, *commands])
        self._openapi = openapi(bodies, self.gets, shoal.__version__)
        self.telemetry = Telemetry(frozenset([*self.gets, *self.posts]), completions)

    async def health(self, request: Request) -> Response:
        health = await self._completions.served.engine.health()
        return _json(health, 200 if health.get("ok") else 503)

    async def metrics(self, request: Request) -> Response:
        health = await self._completions.served.engine.health()
        return Response(self.telemetry.text(health), media_type=METRICS_TYPE)

    async def model(self, request: Request) -> Response:
        async def look_up() -> Response:
            return _json(self._names.one(request.path_params["name"]))

        return await self._with_errors(look_up())

    async def chat(self, request: Request) -> Response:
        async def read(raw: bytes) -> CompletionRequest:
            name = (await self._decode(raw, ModelName)).model if self._names.sessions else None
            session = self._names.sessions.get(name) if isinstance(name, str) else None
            if session is not None:
                return await self._completions.read_session(await self._decode(raw, SessionBody), session)
            return await self._completions.off_loop(lambda: self._completions.read_chat(raw, self._names.check))

        return await self._complete(request, read)

    async def tokenize(self, request: Request) -> Response:
        async def work() -> Response:
            raw = await _body(request)
            return _json(await self._completions.off_loop(lambda: self._completions.tokenize(raw)))

        return await self._with_errors(work())

    async def complete(self, request: Request) -> Response:
        async def read(raw: bytes) -> CompletionRequest:
            body = await self._decode(raw, CompletionBody)
            if body.model in self._names.sessions:
                raise BadRequest("a session accepts requests to /v1/chat/completions only", "model")
            self._names.check(body.model)
            return await self._completions.read_text(body)

        return await self._complete(request, read)

    async def _decode(self, raw: bytes, kind: type[T]) -> T:
        if len(raw) <= INLINE_BYTES:
            return decode(raw, kind)
        return await self._completions.off_loop(lambda: decode(raw, kind))

    async def _complete(
        self, request: Request, read: Callable[[bytes], Coroutine[Any, Any, CompletionRequest]]
    ) -> Response:
        async def work() -> Response:
            completion = await unless_gone(request, read(await _body(request)))
            if completion.stream:
                return EventStream(stream(self._completions, completion, self._failed))
            return _json(await unless_gone(request, self._completions.answer(completion)))

        return await self._with_errors(work())

    def _get(self, answer: Callable[[], dict[str, Any]]) -> Handler:
        async def handler(request: Request) -> Response:
            return _json(answer())

        return handler

    def _command(self, kind: Any, run: Callable[[Any], Awaitable[dict[str, Any]]]) -> Handler:
        """A command runs to its end even if the client disconnects: weights never mix two versions."""

        async def handler(request: Request) -> Response:
            async def work() -> Response:
                body = await self._decode(await _body(request), kind)
                return _json(await asyncio.shield(asyncio.ensure_future(run(body))))

            return await self._with_errors(work())

        return handler

    async def _with_errors(self, work: Awaitable[Response]) -> Response:
        try:
            return await work
        except _Disconnected:
            return Response(status_code=499)
        except BadRequest as error:
            return _error(str(error), error.status, error.code, error.param)
        except (DataError, RequestError) as error:
            return _error(str(error), 400, "invalid_value")
        except RecursionError:
            return _error("the body is nested too deeply", 400, "invalid_value")
        except EngineError as error:
            self._failed(error)
            return _error(str(error), 500, "engine_failed", kind="server_error")
        except StorageError as error:
            return _error(str(error), 409, STORAGE)
        except ConfigError as error:
            return _error(str(error), 409, "refused")
        except ShoalError as error:
            return _error(str(error), 500, "failed", kind="server_error")


def make_app(
    completions: Completions,
    names: Names,
    control: Control | None = None,
    access: Access | None = None,
    failed: Failed = lambda _: None,
) -> ASGIApp:
    routes = Routes(completions, names, control, failed)

    async def unknown(request: Request, error: Exception) -> Response:
        status = int(getattr(error, "status_code", 404))
        return _error(f"there is no route {request.method} {request.url.path}", status, "unknown_url")

    app = Starlette(
        routes=[
            *(Route(path, handler, methods=["GET"]) for path, handler in routes.gets.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in routes.posts.items()),
        ],
        exception_handlers={404: unknown, 405: unknown},
    )
    prompt_bytes = BASE_BODY_BYTES + BODY_BYTES_PER_TOKEN * completions.served.context_tokens
    access = replace(access or Access(), control_paths=routes.control_paths, prompt_bytes=prompt_bytes)
    if control is not None:  # clients compare it to detect a restarted server
        access = replace(access, headers=((INCARNATION.encode(), control.incarnation.encode()),))
    return routes.telemetry.around(Guard(app, access))


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Cancel the work if the client disconnects, which frees the engine's slot. Then raises _Disconnected."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Disconnected
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
        # The task holds its error, and the error's traceback holds this frame. Without this name there is no cycle: the
        # error, and the body in its frames, are freed at once and not by a garbage collection minutes later.
        del task


async def _body(request: Request) -> bytes:
    """The body, which Guard has read. Not kept by the request, so that memory is freed once it is parsed."""
    message = await request.receive()
    if message["type"] != "http.request":
        raise _Disconnected
    return message["body"]


def _json(data: Any, status: int = 200) -> Response:
    """Floats keep every digit; one that is not finite becomes null, which our client rejects."""
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _error(
    text: str, status: int, code: str, param: str | None = None, kind: str = "invalid_request_error"
) -> Response:
    return Response(error_body(text, code, param, kind), status, media_type="application/json")


HOST = "127.0.0.1"


class LocalEndpoint:
    """Starts with the first session, on the current event loop. `served.model` must not contain `@`."""

    def __init__(self, served: ServedModel) -> None:
        self.model = served.model
        self._names = Names(served.model, lambda: served.engine.version)
        self._app = make_app(Completions(served), self._names, failed=self._remember)
        self._listener: Listener | None = None
        self._starting = asyncio.Lock()
        self.failure: EngineError | None = None  # of the engine; clients see a 500

    def _remember(self, failure: EngineError) -> None:
        self.failure = failure

    @asynccontextmanager
    async def session(
        self, name: str, sampling: SamplingParams, context_tokens: int, seed_of: Callable[[int], int]
    ) -> AsyncIterator[Session]:
        """A session for one rollout, open while the block runs. Its turns remain readable afterwards."""
        base_url, model = await self.start(), f"{self.model}@{secrets.token_urlsafe(16)}"
        session = Session(name, sampling, context_tokens, seed_of, base_url=base_url, model=model)
        self._names.sessions[model] = session
        try:
            yield session
        finally:
            session.closed = True
            del self._names.sessions[model]

    async def start(self) -> str:
        """Start listening, if not yet done; returns the base URL."""
        async with self._starting:  # all rollouts of a group start together
            if self._listener is None:
                listener = Listener(self._app, bind(HOST, 0))
                await listener.start()
                self._listener = listener
        return f"http://{HOST}:{self._listener.port}/v1"

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
