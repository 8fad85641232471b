"""Requests in OpenAI's shape to completions of an engine, and back, with token ids and log-probs if asked for.

Knows no HTTP: app.py serves it, in grpo-infer and in the training process. Nothing here samples; the engine does.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from shoal.envs.tools import parse_tool_calls
from shoal.protocols import Heard, RolloutEngine, StreamingEngine
from shoal.server.asked import (
    BadRequest,
    read_count,
    read_ids,
    read_messages,
    read_sampling,
    read_seed,
    read_tools,
    refuse_unknown,
)
from shoal.server.sessions import Session, Tokens, call_id
from shoal.types import Completion, Message, Request, SamplingParams

__all__ = ["Asked", "BadRequest", "Completions", "Served"]


@dataclass(frozen=True)
class Served:
    """What is served, under which name, and how many tokens prompt and completion may have together."""

    engine: RolloutEngine
    tokens: Tokens
    model: str
    context_tokens: int


@dataclass(frozen=True)
class Asked:
    """One request, read and checked: what is to be drawn and what the answer is to hold."""

    kind: Literal["chat.completion", "text_completion"]
    body: Mapping[str, Any]
    prompt_ids: list[int]
    sampling: SamplingParams
    seeds: list[int]  # one a choice
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    session: Session | None = None

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))


class Completions:
    def __init__(self, served: Served) -> None:
        self.served = served
        self.tokens = {"prompt": 0, "completion": 0}  # of what was answered
        self._numbers = itertools.count()

    @property
    def streams(self) -> bool:
        """Whether the engine tells of tokens while they are drawn."""
        return isinstance(self.served.engine, StreamingEngine)

    def read_chat(self, body: Mapping[str, Any], session: Session | None = None) -> Asked:
        messages, tools = read_messages(body.get("messages")), read_tools(body)
        if session is None:
            refuse_unknown(body)
            tools = None if body.get("tool_choice") == "none" else tools
            prompt_ids = self.served.tokens.prompt_ids(messages, tools)
            sampling, seeds = self._limited(read_sampling(body), prompt_ids), _seeds(body)
            return Asked("chat.completion", body, prompt_ids, sampling, seeds, messages, tools)
        prompt_ids = session.prompt_ids(self.served.tokens, messages, tools)
        sampling = self._limited(session.sampling, prompt_ids, session.context_tokens)
        seeds = [session.seed_of(session.begin_turn())]
        return Asked("chat.completion", body, prompt_ids, sampling, seeds, messages, tools, session)

    def read_text(self, body: Mapping[str, Any]) -> Asked:
        """Text or token ids; the plain completions endpoint."""
        refuse_unknown(body)
        prompt = body.get("prompt")
        ids = self.served.tokens.encode(prompt) if isinstance(prompt, str) and prompt else read_ids(prompt, "prompt")
        if ids is None:
            raise BadRequest("prompt must be a text or a list of token ids, one prompt a request", "prompt")
        return Asked("text_completion", body, ids, self._limited(read_sampling(body), ids), _seeds(body))

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A text as it stands, or messages as the chat template writes them."""
        prompt, tokens = body.get("prompt"), self.served.tokens
        if body.get("add_special_tokens"):
            raise BadRequest("add_special_tokens: nothing is put around a prompt here", "add_special_tokens")
        if body.get("messages") is not None:
            ids = tokens.prompt_ids(read_messages(body["messages"]), read_tools(body))
        elif isinstance(prompt, str):
            ids = tokens.encode(prompt)
        else:
            raise BadRequest("give prompt, a text, or messages", "prompt")
        return {"count": len(ids), "max_model_len": self.served.context_tokens, "tokens": ids}

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ids = read_ids(body.get("tokens"), "tokens")
        if ids is None or not all(0 <= i < 2**31 for i in ids):
            raise BadRequest("tokens must be a list of token ids", "tokens")
        return {"prompt": self.served.tokens.full_text(ids)}

    def _limited(self, sampling: SamplingParams, prompt_ids: list[int], limit: int | None = None) -> SamplingParams:
        limit = self.served.context_tokens if limit is None else limit
        room = limit - len(prompt_ids)
        if room < 1:
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens, but the prompt has {len(prompt_ids)}"
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    async def answer(self, asked: Asked) -> dict[str, Any]:
        drawn = await asyncio.gather(*(self.draw(asked, number) for number in range(len(asked.seeds))))
        choices = [self.choice(asked, number, completion) for number, completion in enumerate(drawn)]
        reply = {**self.envelope(asked), "choices": choices, "usage": usage(asked, drawn)}
        return {**reply, "prompt_token_ids": asked.prompt_ids} if asked.body.get("return_token_ids") else reply

    async def draw(self, asked: Asked, number: int, heard: Heard | None = None) -> Completion:
        sampling = replace(asked.sampling, seed=asked.seeds[number])
        request = Request(f"http/{next(self._numbers)}", asked.prompt_ids, sampling)
        if heard is not None and self.streams:
            completion = await cast(StreamingEngine, self.served.engine).generate(request, heard)
        else:
            completion = await self.served.engine.generate(request)
        self.tokens["prompt"] += len(request.prompt_ids)
        self.tokens["completion"] += len(completion.token_ids)
        return completion

    def choice(self, asked: Asked, number: int, completion: Completion) -> dict[str, Any]:
        """What a choice of the answer says. A session takes note of it."""
        about = {"index": number, **self.details(asked, completion.token_ids, completion.logprobs)}
        reason = "stop" if completion.finish_reason == "stop" else "length"
        if not asked.chat:
            about |= {"text": completion.text, "finish_reason": reason}
            return about | _exactly(completion) if asked.body.get("return_token_ids") else about
        answer = self._message(asked, number, completion)
        if asked.session is not None:
            asked.session.record((asked.messages, asked.tools), asked.prompt_ids, completion, answer)
        return {**about, "message": answer, "finish_reason": "tool_calls" if answer.get("tool_calls") else reason}

    def _message(self, asked: Asked, number: int, completion: Completion) -> Message:
        text, calls = parse_tool_calls(completion.text) if asked.tools else (completion.text, [])
        message: Message = {"role": "assistant", "content": text}
        if calls:
            session = asked.session
            name, turn = (session.name, len(session.turns)) if session else (completion.request_id, 0)
            ids = [call_id(name, turn, 100 * number + i) for i in range(len(calls))]
            message["tool_calls"] = [call.as_openai(id_) for call, id_ in zip(calls, ids, strict=True)]
        return message

    def details(self, asked: Asked, token_ids: list[int], values: list[float]) -> dict[str, Any]:
        """Log-probs and ids of tokens, if asked for."""
        fields: dict[str, Any] = {"logprobs": None}
        wanted = asked.body.get("logprobs")
        if wanted is not None and wanted is not False:  # 0 asks for that of the token drawn, and no others
            texts = [self.served.tokens.token_text(i) for i in token_ids]
            if asked.chat:
                pairs = zip(texts, values, strict=True)
                content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
                fields["logprobs"] = {"content": content, "refusal": None}
            else:
                fields["logprobs"] = {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        if asked.body.get("return_token_ids"):
            fields["token_ids"] = token_ids
        return fields

    def envelope(self, asked: Asked) -> dict[str, Any]:
        return {
            "id": f"shoal-{next(self._numbers)}",
            "object": asked.kind,
            "created": int(time.time()),
            "model": str(asked.body.get("model") or self.served.model),
        }


def usage(asked: Asked, drawn: list[Completion] | tuple[Completion, ...]) -> dict[str, int]:
    prompt, completed = len(asked.prompt_ids), sum(len(completion.token_ids) for completion in drawn)
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def _exactly(completion: Completion) -> dict[str, Any]:
    """What OpenAI's shape has no place for, and training needs."""
    spans = [[span.start, span.end, span.version] for span in completion.spans]
    return {"shoal": {"spans": spans, "kept_ids": completion.kept_ids, "finish_reason": completion.finish_reason}}


def _seeds(body: Mapping[str, Any]) -> list[int]:
    seed = read_seed(body)
    if seed is not None and body.get("n") in (None, 1):
        return [seed % 2**63]
    first = (seed if seed is not None else time.monotonic_ns()) % 2**62
    return [first + number for number in range(read_count(body))]
