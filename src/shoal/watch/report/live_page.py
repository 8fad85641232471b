"""`shoal watch`: the report as a live page on loopback, or a list of all runs below a folder. It only reads.

A page contains all curves. Rollouts are requested by step and group, read by byte offset and searched within a time
limit, so large runs need little memory. Requests with another host name or origin are refused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.core.errors import ConfigError
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import is_used
from shoal.watch.health import diagnose
from shoal.watch.report.data import (
    MetricsTail,
    RunSummary,
    collect_overview,
    collect_series,
    describe_run,
    find_runs,
    make_names_unique,
)
from shoal.watch.report.page import LIST, REPORT, Template, as_json, assemble, content_policy, data_block, page_data
from shoal.watch.report.rollouts import PromptSteps, Query, find, follow, index_step, number, read_group, rollout_steps

MAX_TEXT = 200
MAX_COMPARED = 6  # runs in one page, as many as there are colours
DIAGNOSE_EVERY_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WatchedRun:
    """A run, its name below the folder that it was found in, and what is kept of it between requests."""

    def __init__(self, path: Path, folder: Path | None) -> None:
        self.path = path
        self.name = path.relative_to(folder).as_posix() if folder else str(path)
        self.prompts = PromptSteps(path)
        self.tail = MetricsTail(path)
        self.summary = RunSummary(path)
        self.diagnosed = 0.0


class Dashboard:
    """The runs that were named, and those below the folders that were named. New runs in the folders are added."""

    def __init__(self, paths: list[Path]) -> None:
        self._folders = [path for path in paths if not is_used(path)]
        self.runs: list[WatchedRun] = []
        self._indices: dict[Path, int] = {}
        self._guard = threading.Lock()
        for path in paths:
            if is_used(path):
                self._add(path)
        self._find_new()

    def _add(self, path: Path, folder: Path | None = None) -> None:
        if path not in self._indices:
            self._indices[path] = len(self.runs)
            self.runs.append(WatchedRun(path, folder))

    def _find_new(self) -> None:
        with self._guard:
            for folder in self._folders:
                for run in find_runs(folder):
                    self._add(run, folder)

    @property
    def template(self) -> Template:
        return LIST if self._folders else REPORT

    def front_page(self) -> bytes:
        if self.template is REPORT:
            return self.run_page(list(range(len(self.runs))))
        title = ", ".join(map(str, self._folders))
        return assemble(title, [data_block({"title": title, **self.summaries()})], True, LIST)

    def summaries(self) -> dict[str, Any]:
        """All runs, those that were active last first. `id` is the path, which stays valid when the server restarts."""
        self._find_new()
        runs = [{"id": str(run.path), **run.summary.read(), "name": run.name} for run in self.runs if is_used(run.path)]
        return {"runs": sorted(runs, key=lambda run: str(run.get("updated_at", "")), reverse=True)}

    def find_ids(self, ids: Sequence[str]) -> list[int] | None:
        """The indices of runs by their ids; None if one of them is not in the list."""
        if any(Path(name) not in self._indices for name in ids):
            self._find_new()
        found = [index for name in ids if (index := self._indices.get(Path(name))) is not None]
        return found if len(found) == len(ids) and found else None

    def run_page(self, indices: Sequence[int]) -> bytes:
        overviews = [{**collect_overview(self.runs[index].path), "index": index} for index in indices]
        make_names_unique(overviews)
        data = {**page_data(overviews, live=True), "listed": bool(self._folders)}
        return assemble(" and ".join(overview["run"]["name"] for overview in overviews), [data_block(data)], live=True)

    def news(self, index: int, after: int, events: int) -> dict[str, Any]:
        """Changes since the last request of the page. `again` asks it to reload, because the run was cut back."""
        watched = self.runs[index]
        run = watched.path
        fresh, all_events = watched.tail.after(after), list(read_lines(run / "events.jsonl"))
        if fresh is None or len(all_events) < events:
            return {"again": True}
        data = {"run": describe_run(run), **collect_series(fresh), "events": all_events[events:]}
        if fresh and time.monotonic() - watched.diagnosed > DIAGNOSE_EVERY_S:
            data["findings"] = [finding.as_dict() for finding in diagnose(run)]
            watched.diagnosed = time.monotonic()
        return {**data, "rollout_steps": rollout_steps(run)}

    def heads(self, index: int, step: int) -> list[dict[str, Any]]:
        return [head.as_dict() for head in index_step(self.runs[index].path, step)]

    def group(self, index: int, step: int, name: str) -> dict[str, Any] | None:
        head = next((head for head in index_step(self.runs[index].path, step) if head.group == name), None)
        return read_group(self.runs[index].path, head) if head is not None else None

    def find(self, index: int, query: Query, before: int | None) -> dict[str, Any]:
        return find(self.runs[index].path, query, before).as_dict()

    def follow(self, index: int, prompt_id: str, before: int | None) -> dict[str, Any]:
        run = self.runs[index]
        return follow(run.path, prompt_id, run.prompts.of(prompt_id) or rollout_steps(run.path), before).as_dict()


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

    async def page(template: Template, work: Callable[..., bytes], *arguments: Any) -> web.Response:
        response = await answer(work, *arguments)
        response.headers["Content-Security-Policy"] = content_policy(True, template) + "; frame-ancestors 'none'"
        return response

    async def front_page(_: web.Request) -> web.Response:
        return await page(dashboard.template, dashboard.front_page)

    async def run_page(request: web.Request) -> web.Response:
        ids = request.query.getall("run", [])[:MAX_COMPARED]
        indices = await asyncio.to_thread(dashboard.find_ids, ids)
        if indices is None:
            raise web.HTTPNotFound(text="no such run")
        return await page(REPORT, dashboard.run_page, indices)

    async def runs(_: web.Request) -> web.Response:
        return await answer(dashboard.summaries)

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
            web.get("/", front_page),
            web.get("/view", run_page),
            web.get("/api/runs", runs),
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


async def serve(paths: list[Path], port: int, on_ready: Callable[[str], None], until: asyncio.Event) -> None:
    """Serve until the event is set. `on_ready` receives the address once the server accepts requests."""
    runner = web.AppRunner(make_app(Dashboard(paths)), access_log=None, shutdown_timeout=2.0)
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
