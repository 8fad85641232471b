"""A judge over HTTP for tests: a real server on loopback whose replies the test sets."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]


class Judge:
    """Returns the answers that a test sets, and records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.reply: Callable[[int], Reply] = lambda _: (200, {"score": 1})
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.requests.append((dict(self.headers), body))
                status, content = judge.reply(len(judge.requests))
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # the client closed the connection
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/judge"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def chat(text: str) -> dict[str, Any]:
    """A chat completion with this text."""
    return {"choices": [{"message": {"content": text}}]}
