"""A real MCP server over stdio, run by the Python with mcp."""

# pyright: reportMissingImports=false
from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("notes")
notes: dict[str, str] = {}


@server.tool()
def write(name: str, text: str) -> str:
    """Write a note."""
    notes[name] = text
    return "written"


@server.tool()
def read(name: str) -> str:
    """Read a note."""
    return notes[name]


if __name__ == "__main__":
    server.run()
