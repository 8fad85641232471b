"""Turns OpenAI requests into engine requests and completions into OpenAI responses. Contains no HTTP; see app.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from prometheus_client import Counter, disable_created_metrics

from shoal.core.protocols import RolloutEngine, ScoringEngine, StreamingEngine, TokenListener
from shoal.core.types import Completion, Message, Request, SamplingParams, ScoreRequest
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
    decode,
)
from shoal.server.sessions import ChatTokens, Session

__all__ = ["BadRequest", "CompletionRequest", "Completions", "ServedModel"]

T = TypeVar("T")
MAX_SCORES = 2**21  # log-probs of one answer, to bound its memory
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
    top: int = 0  # how many of the most likely tokens are reported per position
    echo: list[str] | None = None  # the text of each prompt, if it precedes the completion
    return_token_ids: bool = False
    stream: bool = False
    with_usage: bool = False  # whether a stream ends with the token counts
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    session: Session | None = None

    @property
    def chat(self) -> bool:
        return self.kind == "chat.completion"

    @property
    def scores(self) -> bool:
        """Whether the answer has log-probs that sampling does not give."""
        return bool(self.top or (self.echo and self.logprobs))

    @property
    def max_scores(self) -> int:
        """The most log-probs that the answer can have."""
        rooms = (
            len(ids) * (self.echo is not None) + min(self.sampling.max_tokens, self.context_tokens - len(ids))
            for ids in self.prompts
        )
        return sum(rooms) * (len(self.seeds) // len(self.prompts)) * (1 + self.top)

    @property
    def needs_whole_completion(self) -> bool:
        """Whether a stream cannot send parts of a completion."""
        return bool(self.tools or self.session is not None or self.scores or self.echo)

    def prompt_number(self, number: int) -> int:
        """The number of a choice's prompt."""
        return number * len(self.prompts) // len(self.seeds)

    def prompt(self, number: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[self.prompt_number(number)]


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

    def read_chat(self, raw: bytes, check_model: Callable[[str | None], None]) -> CompletionRequest:
        """In the pool: bodies that wait for it are not parsed yet, because parsed ones may need 20 times the memory."""
        body = decode(raw, ChatBody)
        check_model(body.model)
        body.check_supported()
        tools = None if body.tool_choice == "none" else body.tools or None
        ids = self._chat_ids(body.messages, tools, body.chat_template_kwargs)
        return replace(self._request("chat.completion", body, [ids]), tools=tools)

    def _chat_ids(self, given: list[dict[str, Any]], tools: Any, options: dict[str, Any] | None = None) -> list[int]:
        messages = chat_messages(given)
        _check_characters((messages, tools, options), self.served.context_tokens)
        return self.served.tokens.prompt_ids(messages, tools, options)

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
            _check_tokens(body.prompt, self.served.context_tokens, max(self._longest_prompt(body), MAX_PROMPTS))
        prompts, limit, encode = body.prompts(), self.served.context_tokens, self.served.tokens.encode
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_characters(prompt, self._longest_prompt(body) + 1)
            else:
                _check_tokens(prompt, limit, self._longest_prompt(body))
        if body.max_tokens == 0 and not body.echo:
            raise BadRequest("max_tokens: 0 requires echo", "max_tokens")
        ids = [
            await self.off_loop(lambda text=prompt: encode(text, body.add_special_tokens))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        request = self._request("text_completion", body, ids)
        if not body.echo:
            return request
        text = self.served.tokens.full_text
        texts = [
            given if isinstance(given, str) else await self.off_loop(lambda ids=given: text(ids)) for given in prompts
        ]
        return self._check_scoring(replace(request, echo=texts))

    def _longest_prompt(self, body: SamplingBody) -> int:
        """A prompt leaves room for a token, unless nothing is sampled."""
        return self.served.context_tokens - (body.max_tokens != 0)

    def _request(self, kind: Any, body: SamplingBody, prompts: list[list[int]]) -> CompletionRequest:
        limit = self.served.context_tokens
        for ids in prompts:
            _check_tokens(ids, limit, self._longest_prompt(body))
        model, seeds = body.model or self.served.model, _seeds(body, len(prompts))
        request = CompletionRequest(kind, model, prompts, body.sampling(), seeds, limit, **_options(body))
        return self._check_scoring(replace(request, top=body.top()))

    def _check_scoring(self, request: CompletionRequest) -> CompletionRequest:
        """Only some engines score texts. The others answer `logprobs: 1` with the log-probs of the sampled tokens."""
        if not request.scores:
            return request
        if isinstance(self.served.engine, ScoringEngine):
            if request.max_scores > MAX_SCORES:
                raise BadRequest(
                    f"the answer may have {request.max_scores} log-probs, at most {MAX_SCORES} are supported; lower "
                    "logprobs (top_logprobs), max_tokens or the number of prompts"
                )
            return request
        if request.echo or request.chat or request.top > 1:
            name = "echo" if request.echo else "top_logprobs" if request.chat else "logprobs"
            raise BadRequest(f"{name}: the engine of this server reports log-probs of sampled tokens only", name)
        return replace(request, top=0)

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """In the pool, like `read_chat`."""
        body, limit = decode(raw, TokenizeBody), self.served.context_tokens
        if body.messages is not None:
            ids = self._chat_ids(body.messages, body.tools or None)
        elif body.prompt is not None:
            _check_characters(body.prompt, limit)
            ids = self.served.tokens.encode(body.prompt, body.add_special_tokens)
        else:
            raise BadRequest("prompt or messages is required", "prompt")
        return {"count": len(ids), "max_model_len": limit, "tokens": ids}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        _check_tokens(body.tokens, self.served.context_tokens + 1)  # a full context can be decoded
        return {"prompt": await self.off_loop(lambda: self.served.tokens.full_text(body.tokens))}

    async def answer(self, request: CompletionRequest) -> dict[str, Any]:
        numbers = range(len(request.seeds))
        results = await asyncio.gather(*(self.generate(request, number) for number in numbers))
        choices = await asyncio.gather(*(self.choice(request, number, results[number]) for number in numbers))
        reply = {**self.envelope(request), "choices": choices, "usage": usage(request, results)}
        if request.return_token_ids:
            reply["prompt_token_ids"] = request.prompts[0] if len(request.prompts) == 1 else request.prompts
        return reply

    async def generate(
        self, request: CompletionRequest, number: int, on_tokens: TokenListener | None = None
    ) -> Completion:
        """The completion of one choice."""
        prompt = request.prompt(number)
        limit = min(request.sampling.max_tokens, request.context_tokens - len(prompt))
        if limit == 0:  # echo alone
            return Completion(f"http/{next(self._numbers)}", [], [], [], "length")
        sampling = replace(request.sampling, seed=request.seeds[number], max_tokens=limit)
        call = Request(f"http/{next(self._numbers)}", prompt, sampling)
        if on_tokens is not None and self.streams:
            completion = await cast(StreamingEngine, self.served.engine).generate(call, on_tokens)
        else:
            completion = await self.served.engine.generate(call)
        self.prompt_tokens.inc(len(prompt))
        self.completion_tokens.inc(len(completion.token_ids))
        return completion

    async def choice(self, request: CompletionRequest, number: int, completion: Completion) -> dict[str, Any]:
        """A choice of the response. In a session, the turn is recorded."""
        common = {"index": number, **await self._whole_details(request, number, completion)}
        reason = "stop" if completion.finish_reason == "stop" else "length"
        if not request.chat:
            before = request.echo[request.prompt_number(number)] if request.echo else ""
            common |= {"text": before + completion.text, "finish_reason": reason}
            return common | _training_fields(completion) if request.return_token_ids else common
        message = self.message(request, number, completion)
        if request.session is not None:
            conversation = request.messages, request.tools
            request.session.record(conversation, request.prompt(number), completion, message)
        sent = {key: value for key, value in message.items() if key != "text"}
        return {**common, "message": sent, "finish_reason": "tool_calls" if message.get("tool_calls") else reason}

    async def _whole_details(self, request: CompletionRequest, number: int, completion: Completion) -> dict[str, Any]:
        """The details of a finished completion, with scores by the engine if they are requested."""
        if not request.scores:
            return self.details(request, completion.token_ids, completion.logprobs)
        prompt, start = request.prompt(number), 1 if request.echo else max(1, len(request.prompt(number)))
        text = ScoreRequest(
            [*prompt, *completion.token_ids], start, request.sampling.temperature, request.top, completion.kept_ids
        )
        (scored,) = await cast(ScoringEngine, self.served.engine).score([text])
        if not request.echo:
            return self.details(request, completion.token_ids, completion.logprobs, scored.top)
        values = [None, *scored.logprobs[: len(prompt) - 1], *completion.logprobs]
        fields = self.details(request, text.token_ids, values, [None, *scored.top])
        return fields | {"token_ids": completion.token_ids} if request.return_token_ids else fields

    def message(self, request: CompletionRequest, number: int, completion: Completion) -> Message:
        session = request.session
        scope = f"{session.name}/{len(session.turns)}" if session else f"{completion.request_id}/{number}"
        return self.served.tokens.message(request.prompt(number), completion, request.tools, scope)

    def details(
        self,
        request: CompletionRequest,
        token_ids: list[int],
        values: Sequence[float | None],
        top: Sequence[list[tuple[int, float]] | None] | None = None,
    ) -> dict[str, Any]:
        """Log-probs and token ids, if requested."""
        fields: dict[str, Any] = {"logprobs": None}
        if request.logprobs:
            form = self._chat_logprobs if request.chat else self._text_logprobs
            fields["logprobs"] = form(token_ids, values, top if request.top else None)
        if request.return_token_ids:
            fields["token_ids"] = token_ids
        return fields

    def _chat_logprobs(self, token_ids: list[int], values: Sequence[Any], top: Sequence[Any] | None) -> dict[str, Any]:
        def entry(token_id: int, value: float) -> dict[str, Any]:
            text = self.served.tokens.token_text(token_id)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        rows = zip(token_ids, values, top or [[]] * len(token_ids), strict=True)
        content = [{**entry(i, value), "top_logprobs": [entry(*other) for other in best]} for i, value, best in rows]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, token_ids: list[int], values: Sequence[Any], top: Sequence[Any] | None) -> dict[str, Any]:
        """As OpenAI's: by the text of a token. If tokens share a text, the most likely one counts."""
        texts = [self.served.tokens.token_text(i) for i in token_ids]
        offsets = list(itertools.accumulate(map(len, texts), initial=0))[: len(texts)]
        fields = {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": offsets}
        if top is None:
            return fields
        best = []
        for text, value, row in zip(texts, values, top, strict=True):
            tokens = {self.served.tokens.token_text(i): likely for i, likely in reversed(row or [])}
            best.append(None if row is None else {text: value} | tokens)
        return fields | {"top_logprobs": best}

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


def _check_tokens(ids: list[Any], limit: int, longest: int | None = None) -> None:
    if len(ids) > (limit - 1 if longest is None else longest):
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
