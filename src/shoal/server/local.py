"""The endpoint inside the training process: environments that talk HTTP play their rollouts here.

Bound to 127.0.0.1 on a free port. A rollout has a model name of its own, <model>@<secret>: its requests are known by it
and clients share one address. The plain model name answers as any OpenAI-compatible server does.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from shoal.errors import DataError, EngineError
from shoal.server.completions import BadRequest, Completions, Served
from shoal.server.sessions import Session

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 * 2**20


class LocalEndpoint:
    """Starts with the first session, on the loop that asks for it. `served.model` should hold no `@`."""

    def __init__(self, served: Served) -> None:
        self.model = served.model
        self._completions = Completions(served)
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.failure: EngineError | None = None  # the engine's; clients only see a 500

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """(base_url, model name) of a rollout while the block runs; its turns are then in the session."""
        base_url = await self.start()
        name = f"{self.model}@{secrets.token_urlsafe(16)}"
        self._sessions[name] = session
        try:
            yield base_url, name
        finally:
            session.closed = True
            del self._sessions[name]

    async def start(self) -> str:
        """Listen, if not yet; returns the base_url without a session."""
        async with self._starting:  # whole groups ask at once
            if self._runner is None:
                self._runner = await self._listen()
        return f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        # A client that gives up takes its request with it: the answer would be a turn the environment never saw.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return runner

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self._completions.models())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def answer(body: dict[str, Any]) -> dict[str, Any]:
            name = str(body.get("model") or self.model)
            if name != self.model and name not in self._sessions:
                raise BadRequest(f"there is no model {name[:80]!r} here; there is {self.model!r}")
            return await self._completions.chat(body, self._sessions.get(name))

        return await self._answer(request, answer)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._completions.complete)

    async def _answer(
        self, request: web.Request, answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> web.StreamResponse:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
            reply = await answer(body)
        except (BadRequest, DataError, json.JSONDecodeError) as error:
            return _refusal(str(error), 400)
        except EngineError as error:
            self.failure = error
            return _refusal(str(error), 500)
        return await _stream(request, reply, body) if body.get("stream") else web.json_response(reply)


def _refusal(text: str, status: int) -> web.Response:
    return web.json_response(
        {"error": {"message": text, "type": "invalid_request_error", "code": status}}, status=status
    )


async def _stream(request: web.Request, reply: dict[str, Any], body: dict[str, Any]) -> web.StreamResponse:
    """The finished answer as server-sent events: one piece a choice, its end, then the usage if asked for."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    about = {**{key: reply[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for choice in reply["choices"]:
        delta = dict(choice.get("message") or {"content": choice.get("text")})
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        first = {**choice, "delta": delta, "finish_reason": None}
        first.pop("message", None)
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        for piece in (first, last):
            await response.write(_event({**about, "choices": [piece]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        await response.write(_event({**about, "choices": [], "usage": reply["usage"]}))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
