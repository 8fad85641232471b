"""An engine with scripted answers, in ids of a real tokenizer, for tests of the code around sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.types import Completion, FinishReason, Request, Span
from support.models import EOS, TOKENIZER

# Request → its answer: the text and the finish reason, or an exception to raise.
Script = Callable[[Request], tuple[str, FinishReason] | Exception]


class ScriptedEngine:
    """Implements RolloutEngine. Records every request."""

    path = "scripted"
    activity = opening = ""

    def __init__(self, script: Script, version: int = 0) -> None:
        self._script = script
        self.version = version
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        said = self._script(request)
        if isinstance(said, Exception):
            raise said
        text, reason = said
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), *([EOS] if reason == "stop" else [])]
        spans = [Span(0, len(ids), self.version)]
        return Completion(request.request_id, ids, [-0.5] * len(ids), spans, reason, text)

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        self.version = version
        return f"script-{version}"

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    async def rest(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        return {"ok": True, "version": self.version}

    async def close(self) -> None: ...
