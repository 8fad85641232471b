"""A test server with OpenEnv's protocol: one counter per session, by actions or by MCP tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

from support.ports import free_port

SCHEMA = {
    "action": {
        "description": "Add to the counter.",
        "properties": {"amount": {"type": "integer"}, "metadata": {"type": "object"}},
        "required": ["amount"],
    }
}


class OpenEnvDouble:
    def __init__(self, mcp: bool, most: int = 8) -> None:
        self.mcp = mcp
        self.most = most  # sessions
        self.open = 0
        self.closed: list[str] = []  # the end of each session

    async def serve_session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.most:
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            return socket
        self.open += 1
        count, end = 0, "dropped"
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            asked = message.json()
            if asked["type"] == "close":
                end = "closed"
                break
            if asked["type"] == "reset":
                count, target = 0, asked["data"].get("target", 3)
                answer = self.observed({"text": f"Reach {target}."})
            elif asked["type"] == "mcp":
                answer = {"type": "mcp", "data": self.tools()}
            elif (amount := asked["data"].get("arguments", asked["data"]).get("amount")) == -1:
                await socket.close()
                break
            elif not isinstance(amount, int):
                problem = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": ["amount"]}
                answer = {"type": "error", "data": problem}
            else:
                count += amount
                answer = self.observed(self.result(count), float(count == target), count >= target)
            await socket.send_json(answer)
        self.open -= 1
        self.closed.append(end)
        return socket

    def observed(self, observation: Any, reward: float | None = None, done: bool = False) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}

    def result(self, count: int) -> dict[str, Any]:
        if not self.mcp:
            return {"text": f"now {count}"}
        content = [{"type": "text", "text": f"now {count}"}]
        return {"tool_name": "add", "result": {"content": content, "is_error": False}, "error": None}

    def tools(self) -> dict[str, Any]:
        if not self.mcp:
            return {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "no tools"}}
        tool = {"name": "add", "description": "Add.", "inputSchema": {"type": "object", "properties": {}}}
        return {"jsonrpc": "2.0", "id": 1, "result": {"tools": [tool]}}


@contextmanager
def openenv_double(mcp: bool = False, most: int = 8) -> Iterator[tuple[str, OpenEnvDouble]]:
    """The address of a server on loopback, and the server."""
    double, port, loop = OpenEnvDouble(mcp, most), free_port(), asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/ws", double.serve_session)
    app.router.add_get("/schema", _schema)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", double
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _schema(request: web.Request) -> web.Response:
    return web.json_response(SCHEMA)
