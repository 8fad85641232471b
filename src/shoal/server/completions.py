"""Requests in OpenAI's shape to completions of an engine, and back, with token ids and log-probs if asked for.

Knows no HTTP: local.py serves it in the training process. Nothing here samples; the engine does.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.envs.tools import parse_tool_calls
from shoal.protocols import RolloutEngine
from shoal.server.sessions import Session, Tokens, call_id
from shoal.types import Completion, Message, Request, SamplingParams

MAX_CHOICES = 16
_ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRequest(ValueError):
    """The client's fault; the text is sent back with status 400."""


@dataclass(frozen=True)
class Served:
    """What is served, under which name, and how many tokens prompt and completion may have together."""

    engine: RolloutEngine
    tokens: Tokens
    model: str
    context_tokens: int


class Completions:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._numbers = itertools.count()

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self._served.model, "object": "model", "owned_by": "shoal"}]}

    async def chat(self, body: Mapping[str, Any], session: Session | None = None) -> dict[str, Any]:
        messages, tools = _messages(body.get("messages")), body.get("tools") or None
        if session is None:
            prompt_ids = self._served.tokens.prompt_ids(messages, tools)
            drawn = await self._draw(body, prompt_ids, _sampling(body), _count(body))
        else:
            prompt_ids = session.prompt_ids(self._served.tokens, messages, tools)
            seed = session.seed_of(session.begin_turn())
            drawn = [await self._generate(prompt_ids, session.sampling, seed, session.context_tokens)]
        choices = []
        for number, completion in enumerate(drawn):
            answer = self._message(completion, tools, session, number)
            if session is not None:
                session.record((messages, tools), prompt_ids, completion, answer)
            choices.append({"index": number, "message": answer, **self._about(completion, body, answer)})
        return self._envelope("chat.completion", body, prompt_ids, drawn, choices)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Token ids in; the plain completions endpoint."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            raise BadRequest("prompt must be a list of token ids; for text use /v1/chat/completions")
        drawn = await self._draw(body, list(prompt), _sampling(body), _count(body))
        choices = [
            {"index": number, "text": completion.text, **self._about(completion, body, None)}
            for number, completion in enumerate(drawn)
        ]
        return self._envelope("text_completion", body, list(prompt), drawn, choices)

    async def _draw(
        self, body: Mapping[str, Any], prompt_ids: list[int], sampling: SamplingParams, count: int
    ) -> list[Completion]:
        seed = body.get("seed")
        first = (seed if isinstance(seed, int) else time.monotonic_ns()) % 2**62
        limit = self._served.context_tokens
        return list(
            await asyncio.gather(*(self._generate(prompt_ids, sampling, first + n, limit) for n in range(count)))
        )

    async def _generate(self, prompt_ids: list[int], sampling: SamplingParams, seed: int, limit: int) -> Completion:
        room = limit - len(prompt_ids)
        if room < 1:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens, but the prompt has {len(prompt_ids)}"
            )
        params = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed)
        return await self._served.engine.generate(Request(f"http/{next(self._numbers)}", prompt_ids, params))

    def _message(self, completion: Completion, tools: Any, session: Session | None, number: int) -> Message:
        text, calls = parse_tool_calls(completion.text) if tools else (completion.text, [])
        message: Message = {"role": "assistant", "content": text}
        if calls:
            name, turn = (session.name, len(session.turns)) if session else (completion.request_id, 0)
            ids = [call_id(name, turn, 100 * number + i) for i in range(len(calls))]
            message["tool_calls"] = [call.as_openai(id_) for call, id_ in zip(calls, ids, strict=True)]
        return message

    def _about(self, completion: Completion, body: Mapping[str, Any], answer: Message | None) -> dict[str, Any]:
        reason = "stop" if completion.finish_reason == "stop" else "length"
        fields: dict[str, Any] = {
            "finish_reason": "tool_calls" if answer and answer.get("tool_calls") else reason,
            "logprobs": None,
        }
        if body.get("logprobs") not in (None, False):
            texts = [self._served.tokens.token_text(i) for i in completion.token_ids]
            if answer is None:
                fields["logprobs"] = {"tokens": texts, "token_logprobs": completion.logprobs}
            else:
                pairs = zip(texts, completion.logprobs, strict=True)
                content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
                fields["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            fields["token_ids"] = completion.token_ids
        return fields

    def _envelope(
        self, kind: str, body: Mapping[str, Any], prompt_ids: list[int], drawn: list[Completion], choices: list[Any]
    ) -> dict[str, Any]:
        completed = sum(len(completion.token_ids) for completion in drawn)
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": completed}
        envelope = {
            "id": f"shoal-{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": str(body.get("model") or self._served.model),
            "choices": choices,
            "usage": {**usage, "total_tokens": len(prompt_ids) + completed},
        }
        return {**envelope, "prompt_token_ids": prompt_ids} if body.get("return_token_ids") else envelope


def _messages(value: Any) -> list[Message]:
    """Checked, with lists of text parts joined: templates and comparisons want text."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message")
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(f"a message needs a role, one of {', '.join(_ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
                raise BadRequest("only text parts are understood in a message's content")
            content = "".join(str(part.get("text", "")) for part in content)
        if content is not None and not isinstance(content, str):
            raise BadRequest("a message's content must be text")
        kept = {key: item for key, item in message.items() if item is not None}
        messages.append({**kept, "content": content or ""})
    return messages


def _count(body: Mapping[str, Any]) -> int:
    count = body.get("n") or 1
    if not isinstance(count, int) or not 1 <= count <= MAX_CHOICES:
        raise BadRequest(f"n must be 1 to {MAX_CHOICES}")
    return count


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    """OpenAI's names, with their defaults; the rest of the context if max_tokens is left out."""
    stop = body.get("stop") or ()
    values = {
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "top_k": body.get("top_k"),
        "min_p": body.get("min_p"),
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or 2**31,
        "min_tokens": body.get("min_tokens"),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
    }
    given = {name: value for name, value in values.items() if value is not None}
    for name in ("temperature", "top_p", "min_p"):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadRequest(f"{name} must be a number of at least 0")
    for name in ("top_k", "max_tokens", "min_tokens"):
        value, least = given.get(name, 0), -1 if name == "top_k" else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**31:
            raise BadRequest(f"{name} must be a whole number of at least {least}")
    return SamplingParams(**given)
