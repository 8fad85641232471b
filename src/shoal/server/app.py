"""The routes, over any RolloutEngine: OpenAI's, and what a training run needs to steer a server.

One app for grpo-infer and for the endpoint inside the training process, which has no control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp

from shoal.errors import ConfigError, DataError, EngineError, RequestError, ShoalError, StorageError
from shoal.server.asked import BadRequest
from shoal.server.completions import Asked, Completions
from shoal.server.control import INCARNATION, Control
from shoal.server.guard import STORAGE, Access, Guard, error_body
from shoal.server.names import Names
from shoal.server.streaming import EventStream, stream
from shoal.server.telemetry import MEDIA_TYPE, Telemetry

T = TypeVar("T")
Body = Mapping[str, Any]
Route = Callable[[Request], Awaitable[Response]]
Failed = Callable[[EngineError], None]


class _Gone(Exception):
    """The client went away before its answer was there."""


class Routes:
    """`failed` is told when the engine breaks, which its clients only see as a 500."""

    def __init__(self, completions: Completions, names: Names, control: Control | None, failed: Failed) -> None:
        self._completions = completions
        self._names = names
        self._failed = failed
        self.gets: dict[str, Route] = {
            "/health": self.health,
            "/metrics": self.metrics,
            "/v1/models": self._telling(names.as_openai),
            "/v1/models/{name:path}": self.model,
        }
        self.posts: dict[str, Route] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.complete,
            "/tokenize": self._doing(completions.tokenize),
            "/detokenize": self._doing(completions.detokenize),
        }
        self.steering: frozenset[str] = frozenset()
        if control is not None:
            gets = {"/shoal/about": self._telling(control.about), "/shoal/version": self._telling(control.version)}
            posts = {path: self._doing(command) for path, command in control.commands().items()}
            self.gets, self.posts = self.gets | gets, self.posts | posts
            self.steering = frozenset([*gets, *posts])
        self.telemetry = Telemetry(frozenset([*self.gets, *self.posts]))

    async def health(self, request: Request) -> Response:
        health = await self._completions.served.engine.health()
        return _json(health, 200 if health.get("ok") else 503)

    async def metrics(self, request: Request) -> Response:
        health = await self._completions.served.engine.health()
        return Response(self.telemetry.text(health, self._completions.tokens), media_type=MEDIA_TYPE)

    async def model(self, request: Request) -> Response:
        async def look_up() -> Response:
            return _json(self._names.one(request.path_params["name"]))

        return await self._refusing(look_up())

    async def chat(self, request: Request) -> Response:
        def read(body: Body) -> Asked:
            return self._completions.read_chat(body, self._names.find(body.get("model")))

        return await self._answer(request, read)

    async def complete(self, request: Request) -> Response:
        def read(body: Body) -> Asked:
            if self._names.find(body.get("model")) is not None:
                raise BadRequest("a rollout is played over /v1/chat/completions", "model")
            return self._completions.read_text(body)

        return await self._answer(request, read)

    async def _answer(self, request: Request, read: Callable[[Body], Asked]) -> Response:
        async def work() -> Response:
            asked = read(await _body(request))
            if asked.body.get("stream"):
                return EventStream(stream(self._completions, asked, self._failed))
            return _json(await unless_gone(request, self._completions.answer(asked)))

        return await self._refusing(work())

    def _telling(self, answer: Callable[[], dict[str, Any]]) -> Route:
        async def route(request: Request) -> Response:
            return _json(answer())

        return route

    def _doing(self, work: Callable[[Body], Awaitable[dict[str, Any]]]) -> Route:
        """A command runs to its end even if whoever gave it goes away: weights are never half of one version."""

        async def route(request: Request) -> Response:
            async def run() -> Response:
                return _json(await asyncio.shield(asyncio.ensure_future(work(await _body(request)))))

            return await self._refusing(run())

        return route

    async def _refusing(self, work: Awaitable[Response]) -> Response:
        try:
            return await work
        except _Gone:
            return Response(status_code=499)
        except BadRequest as error:
            return _refusal(str(error), error.status, error.code, error.param)
        except (DataError, RequestError) as error:
            return _refusal(str(error), 400, "invalid_value")
        except EngineError as error:
            self._failed(error)
            return _refusal(str(error), 500, "engine_failed", kind="server_error")
        except StorageError as error:
            return _refusal(str(error), 409, STORAGE)
        except ConfigError as error:
            return _refusal(str(error), 409, "refused")
        except ShoalError as error:
            return _refusal(str(error), 500, "failed", kind="server_error")


def make_app(
    completions: Completions,
    names: Names,
    control: Control | None = None,
    access: Access | None = None,
    failed: Failed = lambda _: None,
) -> ASGIApp:
    app = FastAPI(title="Shoal", docs_url=None, redoc_url=None, openapi_url=None)
    routes = Routes(completions, names, control, failed)
    for method, handlers in (("GET", routes.gets), ("POST", routes.posts)):
        for path, handler in handlers.items():
            app.add_api_route(path, handler, methods=[method])

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Exception) -> Response:
        status = int(getattr(error, "status_code", 404))
        return _refusal(f"there is no {request.method} {request.url.path} here", status, "unknown_url")

    access = replace(access or Access(), steering=routes.steering)
    if control is not None:  # a client must notice that it talks to another process than before
        access = replace(access, headers=((INCARNATION.encode(), control.incarnation.encode()),))
    return routes.telemetry.around(Guard(app, access))


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """A client that goes away takes its request with it: the engine's slot, and a turn that nobody would see."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Gone
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Body:
    raw = await request.body()
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _json(data: Any, status: int = 200) -> Response:
    """Numbers with every digit; a log-prob that is not finite becomes null, and is refused by whoever reads it."""
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _refusal(
    text: str, status: int, code: str, param: str | None = None, kind: str = "invalid_request_error"
) -> Response:
    return Response(error_body(text, code, param, kind), status, media_type="application/json")
