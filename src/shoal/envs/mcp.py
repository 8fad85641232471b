"""`McpServer`: the tools of an MCP server over stdio, as a stateful environment. Each rollout starts its own server.

The protocol is JSON-RPC 2.0, one message per line. The caller bounds the time of every call, so nothing here waits with
a deadline of its own. https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.envs.stateful import BrokenEnvironment

PROTOCOL = "2025-06-18"
CLOSE_LIMIT_S = 2.0  # for the server to end after its input was closed
METHOD_NOT_FOUND = -32601


def text_of(result: Mapping[str, Any]) -> str:
    """The text of the result of an MCP tool. Of other content, only the type is shown."""
    return "\n".join(part.get("text", f"[{part.get('type')}]") for part in result.get("content") or ())


def openai_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """An MCP tool in OpenAI's format."""
    parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


class McpServer:
    """Runs `command` and offers its tools to the model. Subclasses add `tasks` and `get_reward`.

    `get_reward` may call tools with `self.call_tool(name, arguments)`.
    """

    command: Sequence[str] = ()
    env: Mapping[str, str] = {}  # added to the environment variables

    def __init__(self, command: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.command = [str(word) for word in command or self.command]
        self.env = {**self.env, **(env or {})}
        if not self.command:
            raise ConfigError(f"{type(self).__name__}: command: is missing; set the command that starts the MCP server")
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()

    def reset(self, **columns: Any) -> str | None:
        """Start the server."""
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-mcp-")
        with (Path(self._folder.name) / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.env},
            )
        client = {"name": "shoal", "version": "1"}
        self._request("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client})
        self._send({"method": "notifications/initialized"})
        return None

    def list_tools(self) -> list[dict[str, Any]]:
        """The tools of the server in OpenAI's format."""
        tools, page = [], {}
        while True:
            found = self._request("tools/list", page)
            tools += map(openai_tool, found["tools"])
            if not found.get("nextCursor"):
                return tools
            page = {"cursor": found["nextCursor"]}

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its text. An error of the tool is text as well."""
        found = self._request("tools/call", {"name": name, "arguments": dict(arguments)})
        text = text_of(found)
        return f"error: {text}" if found.get("isError") else text

    def close(self) -> None:
        """Close the input of the server, which then ends, and kill it if it does not."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message:
                self._answer(message)
            elif message.get("id") == number and "error" in message:
                raise RuntimeError(f"{method}: {message['error'].get('message')}")
            elif message.get("id") == number:
                return message["result"]

    def _answer(self, message: Mapping[str, Any]) -> None:
        """Answer a request of the server; notifications need no answer."""
        if "id" not in message:
            return
        if message["method"] == "ping":
            self._send({"id": message["id"], "result": {}})
        else:
            error = {"code": METHOD_NOT_FOUND, "message": f"{message['method']} is not supported"}
            self._send({"id": message["id"], "error": error})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None, "reset starts the server"
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BrokenEnvironment(self._end()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BrokenEnvironment(self._end())
        return json.loads(line)

    def _end(self) -> str:
        lines = (Path(self._folder.name) / "stderr").read_text(errors="replace").strip().splitlines()
        return f"the MCP server {self.command[0]} has ended" + (f": {lines[-1][:300]}" if lines else "")
