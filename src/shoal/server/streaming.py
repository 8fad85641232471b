"""An answer in pieces, as server-sent events: text while it is drawn, then how it ended, then the usage if asked for.

Text is held back while it may still become a stop string or an unfinished character. Where the engine does not tell of
tokens as they come, where tools are offered (their calls are read from the whole answer) and in a rollout's session,
an answer is one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.errors import EngineError, RequestError
from shoal.server.completions import Asked, Completions, usage
from shoal.types import Completion

_UNFINISHED = "�"


class TextSoFar:
    """Token ids in, text that will not change any more out."""

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenize = detokenize
        self._stops = stops
        self._ids: list[int] = []
        self._start = self._read = 0  # decoding a few ids before the new ones gives the space between words
        self._held = ""
        self.sent = ""

    def add(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        before = self._detokenize(self._ids[self._start : self._read])
        text = self._detokenize(self._ids[self._start :])
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._held += text[len(before) :]
        return self._release(len(self._held) - self._uncertain())

    def finish(self, text: str) -> str:
        """What is left of the whole text."""
        rest = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += rest
        return rest

    def _uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop), len(self._held)), longest, -1):
                if stop.startswith(self._held[-size:]):
                    longest = size
                    break
        return longest

    def _release(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        self.sent += piece
        return piece


async def stream(completions: Completions, asked: Asked, failed: Callable[[EngineError], None]) -> AsyncIterator[bytes]:
    """The events of all choices as they come. Leaving the iterator ends what is being drawn."""
    about = completions.envelope(asked)
    if asked.chat:
        about["object"] = "chat.completion.chunk"
    events: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
    work = asyncio.create_task(_draw_all(completions, asked, events))
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, Exception):
                if isinstance(event, EngineError) and not isinstance(event, RequestError):
                    failed(event)
                yield _event({"error": {"message": str(event), "type": "server_error", "code": "failed"}})
                break
            yield _event({**about, **event})
        else:
            yield b"data: [DONE]\n\n"
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _draw_all(completions: Completions, asked: Asked, events: asyncio.Queue[Any]) -> None:
    try:
        choices = (_choice(completions, asked, number, events) for number in range(len(asked.seeds)))
        drawn = await asyncio.gather(*choices)
    except Exception as error:  # whoever reads the queue says it to the client
        events.put_nowait(error)
        return
    if asked.with_usage:
        events.put_nowait({"choices": [], "usage": usage(asked, drawn)})
    events.put_nowait(None)


async def _choice(completions: Completions, asked: Asked, number: int, events: asyncio.Queue[Any]) -> Completion:
    if asked.tools or asked.session is not None or not completions.streams:
        completion = await completions.draw(asked, number)
        for piece in _whole(completions.choice(asked, number, completion)):
            events.put_nowait({"choices": [piece]})
        return completion
    text = TextSoFar(completions.served.tokens.text, asked.sampling.stop)
    told = 0

    def heard(token_ids: list[int], values: list[float]) -> None:
        nonlocal told
        first, told = told == 0, told + len(token_ids)
        piece = text.add(token_ids)
        events.put_nowait({"choices": [_piece(completions, asked, number, (piece, token_ids, values), first)]})

    completion = await completions.draw(asked, number, heard)
    rest = completion.token_ids[told:], completion.logprobs[told:]
    last = _piece(completions, asked, number, (text.finish(completion.text), *rest), told == 0)
    last["finish_reason"] = "stop" if completion.finish_reason == "stop" else "length"
    events.put_nowait({"choices": [last]})
    return completion


def _piece(
    completions: Completions, asked: Asked, number: int, drawn: tuple[str, list[int], list[float]], first: bool
) -> dict[str, Any]:
    text, token_ids, values = drawn
    said: dict[str, Any] = {"text": text}
    if asked.chat:
        said = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
    return {"index": number, **said, **completions.details(asked, token_ids, values), "finish_reason": None}


def _whole(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A finished choice as two pieces: all it says, and how it ended."""
    if "message" not in choice:
        return [choice]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    first = {**{k: v for k, v in choice.items() if k != "message"}, "delta": delta, "finish_reason": None}
    return [first, {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends events as they come and stops when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
