"""`OpenEnv`: an environment behind an OpenEnv server, as a stateful environment. Each rollout has its own session.

A session is a WebSocket connection to `/ws`. If the server has MCP tools, the model gets these. Otherwise it gets the
tool `step`, whose arguments are the fields of the server's action. The package openenv is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from shoal.core.errors import ConfigError
from shoal.envs.mcp import openai_tool, text_of
from shoal.envs.stateful import BrokenEnvironment, EndEpisode

MAX_MESSAGE_BYTES = 2**26
STEP = "step"
INVALID_ACTION = "VALIDATION_ERROR"  # the model's fault; it may try again


class OpenEnv:
    """Connects to the server at `url`. The reward is the sum of the rewards of all steps.

    Subclasses may add `tasks`, `get_reward`, and `show`, which turns an observation into text for the model.
    """

    url: str = ""

    def __init__(self, url: str = "") -> None:
        self.url = (url or self.url).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{type(self).__name__}: url: must start with http:// or https://, not {self.url!r}")
        self.rewards: list[float] = []
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tools: list[dict[str, Any]] = []

    async def reset(self, **columns: Any) -> str | None:
        """Open a session. The columns of the task are the arguments of the server's `reset`."""
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
        found = await self._request("reset", {k: v for k, v in columns.items() if k != "prompt"})
        text = self.show(found.get("observation") or {})
        self._tools = await self._mcp_tools() or [await self._step_tool()]
        return text

    async def list_tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name not in [tool["function"]["name"] for tool in self._tools]:
            return f"error: there is no tool {name!r}"
        action = dict(arguments) if self._steps else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        found = await self._request("step", action)
        if found.get("reward") is not None:
            self.rewards.append(float(found["reward"]))
        text = self.show(found.get("observation") or {})
        if found.get("done"):
            raise EndEpisode(text)
        return text

    def get_reward(self) -> float | None:
        """The sum of the rewards; None, which excludes the rollout, if the server gave none."""
        return sum(self.rewards) if self.rewards else None

    def show(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation: of an MCP result, its only text, or all of it as JSON."""
        if error := observation.get("error"):
            return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
        result = observation.get("result")
        if "tool_name" in observation and isinstance(result, Mapping) and "content" in result:
            return text_of(result)
        shown = {k: v for k, v in observation.items() if k not in ("metadata", "tool_name") and v is not None}
        if not shown:
            return ""
        only = next(iter(shown.values()))
        return only if len(shown) == 1 and isinstance(only, str) else json.dumps(shown, ensure_ascii=False)

    async def close(self) -> None:
        """End the session; the server then discards its state."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    @property
    def _steps(self) -> bool:
        return [tool["function"]["name"] for tool in self._tools] == [STEP]

    async def _mcp_tools(self) -> list[dict[str, Any]]:
        """The MCP tools of the server, empty if it has none."""
        try:
            found = await self._request("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        except BrokenEnvironment:
            return []
        return [openai_tool(tool) for tool in (found.get("result") or {}).get("tools") or ()]

    async def _step_tool(self) -> dict[str, Any]:
        assert self._http is not None
        async with self._http.get(f"{self.url}/schema") as answer:
            answer.raise_for_status()
            schema = (await answer.json())["action"]
        properties = {k: v for k, v in (schema.get("properties") or {}).items() if k != "metadata"}
        parameters = {"type": "object", "properties": properties, "required": schema.get("required") or []}
        description = schema.get("description") or "Take one action in the environment."
        return {"type": "function", "function": {"name": STEP, "description": description, "parameters": parameters}}

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None, "reset opens the session"
        try:
            await self._socket.send_json({"type": kind, "data": dict(data)})
            message = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BrokenEnvironment(f"the OpenEnv server {self.url}: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise BrokenEnvironment(f"the OpenEnv server {self.url} closed the session")
        found = json.loads(message.data)
        if found.get("type") != "error":
            return found["data"]
        problem = found.get("data") or {}
        if problem.get("code") == INVALID_ACTION:
            raise ValueError(f"{problem.get('message')}: {problem.get('errors')}")
        raise BrokenEnvironment(f"the OpenEnv server {self.url}: {problem.get('code')}: {problem.get('message')}")
