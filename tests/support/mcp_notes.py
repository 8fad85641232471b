"""A small MCP server over stdio: notes, two pages of tools, and requests and notifications of the server in between."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NOTES: dict[str, str] = {}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PAGES: dict[Any, dict[str, Any]] = {
    None: {"tools": [{"name": "write", "description": "Write a note.", "inputSchema": NAME}], "nextCursor": "2"},
    "2": {"tools": [{"name": "read", "inputSchema": NAME}, {"name": "die", "inputSchema": NAME}]},
}


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def receive() -> dict[str, Any]:
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit()


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "die":
        print("the notes burned", file=sys.stderr)
        os._exit(1)
    send(id="x", method="ping")
    assert receive() == {"jsonrpc": "2.0", "id": "x", "result": {}}
    send(id="y", method="roots/list")
    assert receive()["error"]["code"] == -32601
    send(method="notifications/message", params={"data": "working"})
    if name == "write":
        NOTES[arguments["name"]] = arguments["text"]
    found = arguments["name"] in NOTES
    text = {"type": "text", "text": NOTES[arguments["name"]] if found else "no such note"}
    return {"content": [text, {"type": "image", "data": ""}], "isError": not found}


def main() -> None:
    assert receive()["method"] == "initialize"
    send(id=0, result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}})
    assert receive()["method"] == "notifications/initialized"
    while True:
        request = receive()
        params = request["params"]
        if request["method"] == "tools/list":
            send(id=request["id"], result=PAGES[params.get("cursor")])
        else:
            send(id=request["id"], result=call(params["name"], params["arguments"]))


if __name__ == "__main__":
    main()
