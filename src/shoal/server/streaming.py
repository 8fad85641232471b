"""Responses as server-sent events: text while it is sampled, then the finish reason, then the usage if requested.

Text that may still become a stop string or an incomplete character is held back. A completion is sent in one piece if
the engine does not report tokens, if tools are offered (calls are parsed from the whole text), with echo or the most
likely tokens, and in sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.core.errors import EngineError, RequestError
from shoal.core.types import Completion, Message
from shoal.server.completions import CompletionRequest, Completions, usage
from shoal.server.sessions import ChatTokens

_UNFINISHED = "�"


class TextSoFar:
    """Incremental detokenisation: returns only text that later tokens cannot change."""

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenize = detokenize
        self._stops = stops
        self._ids: list[int] = []
        self._start = self._read = 0  # decode a few earlier ids too: some tokenizers need them for spaces
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
        """The part of the whole text that was not sent yet."""
        rest = text[len(self.sent) :] if text.startswith(self.sent) else ""
        self.sent += rest
        return rest

    def _uncertain(self) -> int:
        """The number of characters at the end that may be the start of a stop string."""
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


class AnswerSoFar:
    """The parts of an answer that are being sampled. Returns text that is new and certain, by the key of a delta."""

    def __init__(self, tokens: ChatTokens, request: CompletionRequest, number: int) -> None:
        self._tokens = tokens
        self._chat = request.chat
        self._splits = request.chat and tokens.splits_answers
        self._thinking = self._splits and tokens.opens_reasoning(request.prompt(number))
        self._text = TextSoFar(tokens.full_text if self._splits else tokens.text, request.sampling.stop)
        self._sent = {"reasoning_content": "", "content": ""}

    def add(self, token_ids: Sequence[int]) -> dict[str, str]:
        piece = self._text.add(token_ids)
        if not self._splits:
            return {"content" if self._chat else "text": piece}
        reasoning, content = self._tokens.split_so_far(self._text.sent, self._thinking)
        return self._new({"reasoning_content": reasoning, "content": content})

    def finish(self, text: str, message: Message) -> dict[str, str]:
        """The parts of the whole answer that were not sent yet."""
        if not self._splits:
            return {"content" if self._chat else "text": self._text.finish(text)}
        return self._new({key: str(message.get(key) or "") for key in self._sent})

    def _new(self, parts: dict[str, str]) -> dict[str, str]:
        found = {}
        for key, part in parts.items():
            if part.startswith(self._sent[key]) and part != self._sent[key]:
                found[key] = part[len(self._sent[key]) :]
                self._sent[key] = part
        return found or {"content": ""}


async def stream(
    completions: Completions, request: CompletionRequest, failed: Callable[[EngineError], None]
) -> AsyncIterator[bytes]:
    """The events of all choices in the order they occur. Closing the iterator cancels the sampling."""
    about = completions.envelope(request)
    if request.chat:
        about["object"] = "chat.completion.chunk"
    events: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
    work = asyncio.create_task(_generate_all(completions, request, events))
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


async def _generate_all(completions: Completions, request: CompletionRequest, events: asyncio.Queue[Any]) -> None:
    try:
        choices = (_choice(completions, request, number, events) for number in range(len(request.seeds)))
        results = await asyncio.gather(*choices)
    except Exception as error:  # reported to the client by stream()
        events.put_nowait(error)
        return
    if request.with_usage:
        events.put_nowait({"choices": [], "usage": usage(request, results)})
    events.put_nowait(None)


async def _choice(
    completions: Completions, request: CompletionRequest, number: int, events: asyncio.Queue[Any]
) -> Completion:
    if request.needs_whole_completion or not completions.streams:
        completion = await completions.generate(request, number)
        for piece in _whole(await completions.choice(request, number, completion)):
            events.put_nowait({"choices": [piece]})
        return completion
    answer = AnswerSoFar(completions.served.tokens, request, number)
    sent = 0

    def on_tokens(token_ids: list[int], values: list[float]) -> None:
        nonlocal sent
        first, sent = sent == 0, sent + len(token_ids)
        piece = answer.add(token_ids)
        events.put_nowait({"choices": [_piece(completions, request, number, (piece, token_ids, values), first)]})

    completion = await completions.generate(request, number, on_tokens)
    rest = completion.token_ids[sent:], completion.logprobs[sent:]
    message = completions.message(request, number, completion) if request.chat else {}
    last = _piece(completions, request, number, (answer.finish(completion.text, message), *rest), sent == 0)
    last["finish_reason"] = "stop" if completion.finish_reason == "stop" else "length"
    events.put_nowait({"choices": [last]})
    return completion


def _piece(
    completions: Completions,
    request: CompletionRequest,
    number: int,
    tokens: tuple[dict[str, str], list[int], list[float]],
    first: bool,
) -> dict[str, Any]:
    parts, token_ids, values = tokens
    content: dict[str, Any] = (
        {"delta": {**({"role": "assistant"} if first else {}), **parts}} if request.chat else parts
    )
    return {"index": number, **content, **completions.details(request, token_ids, values), "finish_reason": None}


def _whole(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """A finished choice as two events: its content, then its finish reason."""
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
    """Sends events as they occur and stops when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(until_disconnect(receive))
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


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
