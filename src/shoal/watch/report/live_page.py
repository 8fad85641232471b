"""`shoal watch`: the report as a live page on loopback. It only reads the run directories.

The page contains all curves. Rollouts are requested by step and group, read by byte offset and searched within a time
limit, so large runs need little memory. Requests with another host name or origin are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.core.errors import ConfigError
from shoal.runs.journal import read_lines
from shoal.watch.health import diagnose
from shoal.watch.report.data import MetricsTail, collect_overview, collect_series, describe_run, name_apart
from shoal.watch.report.page import as_json, assemble, content_policy, data_block
from shoal.watch.report.rollouts import PromptSteps, Query, find, follow, index_step, number, read_group, rollout_steps

MAX_TEXT = 200
DIAGNOSE_EVERY_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """The runs of the page, and state that is kept between requests."""

    def __init__(self, runs: list[Path]) -> None:
        self.runs = runs
        self._prompts = [PromptSteps(run) for run in runs]
        self._tails = [MetricsTail(run) for run in runs]
        self._diagnosed = [0.0] * len(runs)

    def page(self) -> bytes:
        overviews = [collect_overview(run) for run in self.runs]
        name_apart(overviews)
        return assemble([overview["run"]["name"] for overview in overviews], [data_block(overviews, True)], live=True)

    def news(self, index: int, after: int, events: int) -> dict[str, Any]:
        """Changes since the last request of the page. `again` asks it to reload, because the run was cut back."""
        run = self.runs[index]
        fresh, all_events = self._tails[index].after(after), list(read_lines(run / "events.jsonl"))
        if fresh is None or len(all_events) < events:
            return {"again": True}
        data = {"run": describe_run(run), **collect_series(fresh), "events": all_events[events:]}
        if fresh and time.monotonic() - self._diagnosed[index] > DIAGNOSE_EVERY_S:
            data["findings"] = [finding.as_dict() for finding in diagnose(run)]
            self._diagnosed[index] = time.monotonic()
        return {**data, "rollout_steps": rollout_steps(run)}

    def heads(self, index: int, step: int) -> list[dict[str, Any]]:
        return [head.as_dict() for head in index_step(self.runs[index], step)]

    def group(self, index: int, step: int, name: str) -> dict[str, Any] | None:
        head = next((head for head in index_step(self.runs[index], step) if head.group == name), None)
        return read_group(self.runs[index], head) if head is not None else None

    def find(self, index: int, query: Query, before: int | None) -> dict[str, Any]:
        return find(self.runs[index], query, before).as_dict()

    def follow(self, index: int, prompt_id: str, before: int | None) -> dict[str, Any]:
        steps = self._prompts[index].of(prompt_id) or rollout_steps(self.runs[index])
        return follow(self.runs[index], prompt_id, steps, before).as_dict()


def make_app(dashboard: Dashboard) -> web.Application:
    app = web.Application(middlewares=[_guarded], client_max_size=4096)
    busy = asyncio.Semaphore(2)  # concurrent reads of large files

    async def answer(work: Callable[..., Any], *arguments: Any) -> web.Response:
        async with busy:
            value = await asyncio.to_thread(work, *arguments)
        if value is None:
            raise web.HTTPNotFound(text="not found")
        body = value if isinstance(value, bytes) else await asyncio.to_thread(lambda: as_json(value).encode())
        kind = "text/html" if isinstance(value, bytes) else "application/json"
        response = web.Response(body=body, content_type=kind, charset="utf-8")
        response.enable_compression()
        return response

    async def page(_: web.Request) -> web.Response:
        response = await answer(dashboard.page)
        response.headers["Content-Security-Policy"] = content_policy(live=True) + "; frame-ancestors 'none'"
        return response

    async def news(request: web.Request) -> web.Response:
        after, events = _whole(request, "after"), _whole(request, "events")
        return await answer(dashboard.news, _run(dashboard, request), after or 0, events or 0)

    async def heads(request: web.Request) -> web.Response:
        return await answer(dashboard.heads, _run(dashboard, request), int(request.match_info["step"]))

    async def group(request: web.Request) -> web.Response:
        name = request.query.get("id", "")
        return await answer(dashboard.group, _run(dashboard, request), int(request.match_info["step"]), name)

    async def search(request: web.Request) -> web.Response:
        return await answer(dashboard.find, _run(dashboard, request), _query(request), _whole(request, "before"))

    async def one_prompt(request: web.Request) -> web.Response:
        prompt = request.query.get("prompt", "")
        return await answer(dashboard.follow, _run(dashboard, request), prompt, _whole(request, "before"))

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    one = r"/api/runs/{run:\d{1,4}}"
    app.add_routes(
        [
            web.get("/", page),
            web.get("/alive", alive),
            web.get(one + "/news", news),
            web.get(one + r"/steps/{step:\d{1,9}}", heads),
            web.get(one + r"/steps/{step:\d{1,9}}/group", group),
            web.get(one + "/find", search),
            web.get(one + "/follow", one_prompt),
        ]
    )
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Accept only loopback host names and the own origin: other web pages must not read runs through the browser."""
    host = request.host.rsplit(":", 1)[0]
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        raise web.HTTPForbidden(text="this page is served on loopback only")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        raise web.HTTPForbidden(text="requests from other pages are refused")
    response = await handler(request)
    response.headers.update(
        {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    )
    return response


def _run(dashboard: Dashboard, request: web.Request) -> int:
    index = int(request.match_info["run"])
    if index >= len(dashboard.runs):
        raise web.HTTPNotFound(text="no such run")
    return index


def _whole(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    return int(text) if text.isdigit() and len(text) < 12 else None


def _query(request: web.Request) -> Query:
    words = request.query
    least, most = number(words.get("min") or None), number(words.get("max") or None)
    return Query(words.get("env", ""), words.get("status", ""), least, most, words.get("text", "")[:MAX_TEXT])


async def serve(runs: list[Path], port: int, on_ready: Callable[[str], None], until: asyncio.Event) -> None:
    """Serve until the event is set. `on_ready` receives the address once the server accepts requests."""
    runner = web.AppRunner(make_app(Dashboard(runs)), access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"command line: --port: {port} cannot be used ({error.strerror}); name another port"
            ) from error
        on_ready(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await until.wait()
    finally:
        await runner.cleanup()
