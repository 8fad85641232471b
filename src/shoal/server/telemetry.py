"""What the server did, as Prometheus reads it: requests, tokens, what runs and waits, the weight version, latencies."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TIMED = ("/v1/completions", "/v1/chat/completions")


class Telemetry:
    """Counts every request that reaches the server, refused ones too; times those for completions to their end."""

    def __init__(self, paths: frozenset[str]) -> None:
        self._paths = paths  # others are counted together: a client must not make up names
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._seconds = 0.0

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            began, status = time.monotonic(), 499  # nothing was sent: the client went away

            async def noted(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noted)
            finally:
                self._count(scope["path"], status, time.monotonic() - began)

        return counted

    def _count(self, path: str, status: int, seconds: float) -> None:
        self._requests[path if path in self._paths else "other", status] += 1
        if path in TIMED and status == 200:
            self._buckets[bisect_left(BUCKETS_S, seconds)] += 1
            self._seconds += seconds

    def text(self, health: Mapping[str, Any], tokens: Mapping[str, int]) -> str:
        return "\n".join([*self._lines(health, tokens), ""])

    def _lines(self, health: Mapping[str, Any], tokens: Mapping[str, int]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'shoal_requests_total{{path="{path}",status="{status}"}} {count}'
        for name, count in tokens.items():
            yield from _head(f"{name}_tokens_total", "counter", f"Tokens of {name}s that were answered.")
            yield f"shoal_{name}_tokens_total {count}"
        for name, what in (("running", "Sequences being decoded."), ("waiting", "Requests that wait for a slot.")):
            yield from _head(f"requests_{name}", "gauge", what)
            yield f"shoal_requests_{name} {health.get(name, 0)}"
        yield from _head("weight_version", "gauge", "The weight version new tokens are drawn with.")
        yield f"shoal_weight_version {health.get('version', 0)}"
        yield from _head("request_seconds", "histogram", "Time from a request for completions to its last token.")
        total = 0
        for limit, count in zip((*map(str, BUCKETS_S), "+Inf"), self._buckets, strict=True):
            total += count
            yield f'shoal_request_seconds_bucket{{le="{limit}"}} {total}'
        yield f"shoal_request_seconds_sum {self._seconds}"
        yield f"shoal_request_seconds_count {total}"


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP shoal_{name} {what}"
    yield f"# TYPE shoal_{name} {kind}"
