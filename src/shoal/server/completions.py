"""Turns OpenAI requests into engine requests and completions into OpenAI responses. Contains no HTTP; see app.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from prometheus_client import Counter, disable_created_metrics

from shoal.core.protocols import Heard, RolloutEngine, StreamingEngine
from shoal.core.types import Completion, Message, Request, SamplingParams
from shoal.envs.tools import parse_tool_calls
from shoal.models.chat import LONGEST_TOKEN_CHARS
from shoal.server.request_schema import (
    MAX_PROMPTS,
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    SessionBody,
    TokenizeBody,
    chat_messages,
)
from shoal.server.sessions import ChatTokens, Session, call_id

__all__ = ["BadRequest", "CompletionRequest", "Completions", "ServedModel"]

T = TypeVar("T")
disable_created_metrics()


@dataclass(frozen=True)
class ServedModel:
    """An engine, its tokenizer, its model name, and the maximum length of prompt and completion together."""

    engine: RolloutEngine
    tokens: ChatTokens
    model: str
    context_tokens: int


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request. Choices are numbered over all prompts: choice i belongs to prompt i // n."""

    kind: Literal["chat.completion", "text_completion"]
    model: str
    prompts: list[list[int]]
    sampling: SamplingParams
    seeds: list[int]  # one per choice
    context_tokens: int
    logprobs: bool = False
    return_token_ids: bool = False
    stream: bool = False
    with_usage: bool = False  # whether a stream ends with the token counts
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    session: Session | None = None

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    def prompt(self, number: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[number * len(self.prompts) // len(self.seeds)]


class Completions:
    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.prompt_tokens = Counter("shoal_prompt_tokens", "Prompt tokens of finished completions.", registry=None)
        self.completion_tokens = Counter("shoal_completion_tokens", "Sampled tokens.", registry=None)
        self._numbers = itertools.count()
        # One thread: tokenisation of a long prompt delays other texts, but neither /health nor token-id prompts.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def streams(self) -> bool:
        """Whether the engine reports tokens while they are sampled."""
        return isinstance(self.served.engine, StreamingEngine)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run parsing, chat templates and tokenisation in the pool, so that the event loop keeps answering."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def read_chat(self, body: ChatBody) -> CompletionRequest:
        body.check_supported()
        messages, tokens, limit = chat_messages(body.messages), self.served.tokens, self.served.context_tokens
        tools = None if body.tool_choice == "none" else body.tools or None
        _check_characters((messages, tools, body.chat_template_kwargs), limit)
        ids = await self.off_loop(lambda: tokens.prompt_ids(messages, tools, body.chat_template_kwargs))
        request = self._request("chat.completion", body, [ids])
        return replace(request, messages=messages, tools=tools)

    async def read_session(self, body: SessionBody, session: Session) -> CompletionRequest:
        messages, tools, limit = chat_messages(body.messages), body.tools or None, session.context_tokens
        _check_characters((messages, tools), limit)
        ids = await self.off_loop(lambda: session.prompt_ids(self.served.tokens, messages, tools))
        _check_tokens(ids, limit)
        return CompletionRequest(
            "chat.completion", body.model, [ids], session.sampling, [session.seed_of(session.begin_turn())], limit,
            **_options(body), messages=messages, tools=tools, session=session,
        )  # fmt: skip

    async def read_text(self, body: CompletionBody) -> CompletionRequest:
        body.check_supported()
        if isinstance(body.prompt, list):  # before anything iterates over it
            _check_tokens(body.prompt, max(self.served.context_tokens, MAX_PROMPTS + 1))
        prompts, limit, encode = body.prompts(), self.served.context_tokens, self.served.tokens.encode
        for prompt in prompts:
            _check_characters(prompt, limit) if isinstance(prompt, str) else _check_tokens(prompt, limit)
        ids = [
            await self.off_loop(lambda text=prompt: encode(text, body.add_special_tokens))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        return self._request("text_completion", body, ids)

    def _request(self, kind: Any, body: SamplingBody, prompts: list[list[int]]) -> CompletionRequest:
        limit = self.served.context_tokens
        for ids in prompts:
            _check_tokens(ids, limit)
        model, seeds = body.model or self.served.model, _seeds(body, len(prompts))
        return CompletionRequest(kind, model, prompts, body.sampling(), seeds, limit, **_options(body))

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        tokens, limit = self.served.tokens, self.served.context_tokens
        if body.messages is not None:
            messages, tools = chat_messages(body.messages), body.tools or None
            _check_characters((messages, tools), limit)
            ids = await self.off_loop(lambda: tokens.prompt_ids(messages, tools))
        elif body.prompt is not None:
            text = body.prompt
            _check_characters(text, limit)
            ids = await self.off_loop(lambda: tokens.encode(text, body.add_special_tokens))
        else:
            raise BadRequest("prompt or messages is required", "prompt")
        return {"count": len(ids), "max_model_len": limit, "tokens": ids}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        _check_tokens(body.tokens, self.served.context_tokens + 1)  # a full context can be decoded
        return {"prompt": await self.off_loop(lambda: self.served.tokens.full_text(body.tokens))}

    async def answer(self, request: CompletionRequest) -> dict[str, Any]:
        results = await asyncio.gather(*(self.generate(request, number) for number in range(len(request.seeds))))
        choices = [self.choice(request, number, completion) for number, completion in enumerate(results)]
        reply = {**self.envelope(request), "choices": choices, "usage": usage(request, results)}
        if request.return_token_ids:
            reply["prompt_token_ids"] = request.prompts[0] if len(request.prompts) == 1 else request.prompts
        return reply

    async def generate(self, request: CompletionRequest, number: int, on_tokens: Heard | None = None) -> Completion:
        """The completion of one choice."""
        prompt = request.prompt(number)
        limit = min(request.sampling.max_tokens, request.context_tokens - len(prompt))
        sampling = replace(request.sampling, seed=request.seeds[number], max_tokens=limit)
        call = Request(f"http/{next(self._numbers)}", prompt, sampling)
        if on_tokens is not None and self.streams:
            completion = await cast(StreamingEngine, self.served.engine).generate(call, on_tokens)
        else:
            completion = await self.served.engine.generate(call)
        self.prompt_tokens.inc(len(prompt))
        self.completion_tokens.inc(len(completion.token_ids))
        return completion

    def choice(self, request: CompletionRequest, number: int, completion: Completion) -> dict[str, Any]:
        """A choice of the response. In a session, the turn is recorded."""
        common = {"index": number, **self.details(request, completion.token_ids, completion.logprobs)}
        reason = "stop" if completion.finish_reason == "stop" else "length"
        if not request.chat:
            common |= {"text": completion.text, "finish_reason": reason}
            return common | _training_fields(completion) if request.return_token_ids else common
        message = self._message(request, number, completion)
        if request.session is not None:
            conversation = request.messages, request.tools
            request.session.record(conversation, request.prompt(number), completion, message)
        return {**common, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else reason}

    def _message(self, request: CompletionRequest, number: int, completion: Completion) -> Message:
        text, calls = parse_tool_calls(completion.text) if request.tools else (completion.text, [])
        message: Message = {"role": "assistant", "content": text}
        if calls:
            session = request.session
            name, turn = (session.name, len(session.turns)) if session else (completion.request_id, 0)
            ids = [call_id(name, turn, 100 * number + i) for i in range(len(calls))]
            message["tool_calls"] = [call.as_openai(id_) for call, id_ in zip(calls, ids, strict=True)]
        return message

    def details(self, request: CompletionRequest, token_ids: list[int], values: list[float]) -> dict[str, Any]:
        """Log-probs and token ids, if requested."""
        fields: dict[str, Any] = {"logprobs": None}
        if request.logprobs:
            texts = [self.served.tokens.token_text(i) for i in token_ids]
            if request.chat:
                pairs = zip(texts, values, strict=True)
                content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]
                fields["logprobs"] = {"content": content, "refusal": None}
            else:
                fields["logprobs"] = {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        if request.return_token_ids:
            fields["token_ids"] = token_ids
        return fields

    def envelope(self, request: CompletionRequest) -> dict[str, Any]:
        return {
            "id": f"shoal-{next(self._numbers)}",
            "object": request.kind,
            "created": int(time.time()),
            "model": request.model,
        }


def usage(request: CompletionRequest, results: list[Completion] | tuple[Completion, ...]) -> dict[str, int]:
    prompt, completed = sum(map(len, request.prompts)), sum(len(completion.token_ids) for completion in results)
    return {"prompt_tokens": prompt, "completion_tokens": completed, "total_tokens": prompt + completed}


def _training_fields(completion: Completion) -> dict[str, Any]:
    """Data that training needs and OpenAI's format lacks."""
    spans = [[span.start, span.end, span.version] for span in completion.spans]
    return {"shoal": {"spans": spans, "kept_ids": completion.kept_ids, "finish_reason": completion.finish_reason}}


def _options(body: SamplingBody | SessionBody) -> dict[str, Any]:
    return {
        "logprobs": body.logprobs is not None and body.logprobs is not False,  # 0: the sampled token's alone
        "return_token_ids": bool(body.return_token_ids),
        "stream": bool(body.stream),
        "with_usage": body.stream_options is not None and bool(body.stream_options.include_usage),
    }


def _seeds(body: SamplingBody, prompts: int) -> list[int]:
    """One seed per choice. With a given seed, a prompt gets the same result alone and in a batch."""
    count = body.n or 1
    if body.seed is None:
        first = time.monotonic_ns() % 2**62
        return [first + number for number in range(prompts * count)]
    if count == 1:
        return [body.seed % 2**63] * prompts
    return [body.seed % 2**62 + number for number in range(count)] * prompts


def _check_tokens(ids: list[Any], limit: int) -> None:
    if len(ids) >= limit:
        raise BadRequest(f"This model's maximum context length is {limit} tokens, but the prompt has {len(ids)}")


def _check_characters(texts: Any, limit: int) -> None:
    """Reject what cannot fit before it is tokenised: a token has at most LONGEST_TOKEN_CHARS characters."""
    least = _characters(texts) // LONGEST_TOKEN_CHARS
    if least >= limit:
        text = f"This model's maximum context length is {limit} tokens, but the prompt has at least {least}"
        raise BadRequest(text)


def _characters(value: Any) -> int:
    """The number of characters of all strings in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
