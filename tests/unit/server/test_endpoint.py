"""The endpoint as an OpenAI client meets it: a real socket and tokenizer, an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from shoal.errors import EngineError
from shoal.models.chat import Chat
from shoal.server.completions import Served
from shoal.server.local import LocalEndpoint
from shoal.server.sessions import Session
from shoal.types import Request, SamplingParams
from support.models import EOS, TOKENIZER
from support.scripted import Script, ScriptedEngine

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
Ask = Callable[..., Awaitable[tuple[int, Any]]]


def serve(
    script: Script, work: Callable[[LocalEndpoint, Ask], Awaitable[Any]], context_tokens: int = 400
) -> ScriptedEngine:
    """Run `work(endpoint, ask)` against a served engine; `ask(path, body)` gives (status, JSON or text)."""
    engine = ScriptedEngine(script)

    async def run() -> None:
        endpoint = LocalEndpoint(Served(engine, Chat(TOKENIZER), "fish", context_tokens))
        base = await endpoint.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:

            async def ask(path: str, body: Any = None) -> tuple[int, Any]:
                request = http.get(base + path) if body is None else http.post(base + path, json=body)
                async with request as response:
                    text = await response.text()
                    return response.status, json.loads(text) if text.startswith("{") else text

            await work(endpoint, ask)
        await endpoint.close()

    asyncio.run(run())
    return engine


def test_an_answer_with_ids_and_logprobs():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        status, reply = await ask(
            "/chat/completions",
            {
                "model": "fish",
                "messages": HELLO,
                "logprobs": True,
                "return_token_ids": True,
                "max_tokens": 9,
                "temperature": 0.5,
            },
        )
        (choice,) = reply["choices"]
        ids = [*TOKENIZER.encode("hi", add_special_tokens=False), EOS]
        assert status == 200 and choice["message"] == {"role": "assistant", "content": "hi"}
        assert choice["token_ids"] == ids and choice["finish_reason"] == "stop"
        assert reply["prompt_token_ids"] == Chat(TOKENIZER).prompt_ids(HELLO)
        assert [item["logprob"] for item in choice["logprobs"]["content"]] == [-0.5] * 3
        assert [item["token"] for item in choice["logprobs"]["content"]][:2] == ["h", "i"]
        assert reply["usage"]["completion_tokens"] == 3
        _, models = await ask("/models")
        assert [model["id"] for model in models["data"]] == ["fish", "fish-v0"]

    engine = serve(lambda _: ("hi", "stop"), work)
    assert (engine.requests[0].sampling.max_tokens, engine.requests[0].sampling.temperature) == (9, 0.5)


def test_several_choices_and_plain_completions_of_ids():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        _, reply = await ask("/chat/completions", {"messages": HELLO, "n": 3, "seed": 7})
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        _, plain = await ask(
            "/completions", {"prompt": [20, 21], "max_tokens": 4, "logprobs": 1, "return_token_ids": True}
        )
        assert plain["choices"][0]["text"] == "hi" and plain["prompt_token_ids"] == [20, 21]
        assert plain["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3

    engine = serve(lambda _: ("hi", "stop"), work)
    assert [request.sampling.seed for request in engine.requests[:3]] == [7, 8, 9]
    assert engine.requests[3].prompt_ids == [20, 21]


def test_a_stream_is_the_same_answer_in_events():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        _, text = await ask("/chat/completions", body)
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        pieces = [json.loads(event) for event in events[:-1]]
        assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces if p["choices"]) == "hi"
        assert pieces[1]["choices"][0]["finish_reason"] == "stop" and pieces[-1]["usage"]["completion_tokens"] == 3

    serve(lambda _: ("hi", "stop"), work)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "needs a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text"),
        ({"messages": HELLO, "n": 99}, "n must be"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature must be"),
        ({"messages": HELLO, "temperature": float("nan")}, "not JSON"),
        ({"messages": HELLO, "temperature": -1}, "temperature must be"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"messages": HELLO, "stop": [""]}, "stop must be"),
        ({"messages": HELLO, "stop": ["x"] * 17}, "at most 16 texts"),
        ({"messages": HELLO, "seed": "a"}, "seed must be"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs is not available"),
        ({"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias is not available"),
        ({"messages": HELLO, "max_tokens": 16.5}, "max_tokens must be a whole number"),
        ({"messages": HELLO, "top_k": 2**70}, "top_k must be a whole number"),
        ({"messages": HELLO, "model": 3}, "model must be a text"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "maximum context length is 400"),
        ({"messages": HELLO, "stream": True, "stream_options": "usage"}, "stream_options must be an object"),
        ([1], "must be a JSON object"),
    ],
)
def test_bad_requests_are_told_why(body: Any, says: str):
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        status, reply = await ask("/chat/completions", body)
        assert status == 400 and says in reply["error"]["message"], reply

    assert not serve(lambda _: ("hi", "stop"), work).requests


def test_a_model_that_is_not_served_is_a_404_as_openai_words_it():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        for path, body in (("/chat/completions", {"messages": HELLO}), ("/completions", {"prompt": [5]})):
            status, reply = await ask(path, {**body, "model": "cat"})
            assert status == 404 and reply["error"] == {
                "message": "there is no model 'cat' here; there is 'fish'",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            assert (await ask(path, {**body, "model": "fish-v0"}))[0] == 200, "the version that is served"
            assert (await ask(path, {**body, "model": "fish-v1"}))[0] == 404

    serve(lambda _: ("hi", "stop"), work)


def test_a_broken_engine_is_a_500_and_is_remembered():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        status, reply = await ask("/chat/completions", {"messages": HELLO})
        assert status == 500 and "gone" in reply["error"]["message"] and endpoint.failure is not None

    serve(lambda _: EngineError("gone"), work)


def test_a_session_draws_as_the_run_says_and_continues_in_exact_ids():
    """Tokens of an earlier answer are sent on as they were drawn, and the client's own sampling is not asked."""
    session = Session("env/0/0/0/1", SamplingParams(temperature=0.7, max_tokens=20), 400, lambda turn: 100 + turn)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'

    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        async with endpoint.session(session) as (_, model):
            body = {"model": model, "messages": HELLO, "tools": TOOLS, "temperature": 2.0, "max_tokens": 1}
            _, first = await ask("/chat/completions", body)
            answer = first["choices"][0]["message"]
            assert first["choices"][0]["finish_reason"] == "tool_calls" and answer["content"] == "I add:"
            assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "4"}
            await ask("/chat/completions", {**body, "messages": [*HELLO, answer, result]})
            await ask("/chat/completions", {**body, "messages": [{"role": "user", "content": "anew"}]})
        status, _ = await ask("/chat/completions", {"model": model, "messages": HELLO})
        assert status == 404, "the session is over"

    said = iter([f"I add: {call}", "4", "new"])
    engine = serve(lambda _: (next(said), "stop"), work)
    assert [request.sampling.temperature for request in engine.requests] == [0.7] * 3
    assert [request.sampling.seed for request in engine.requests] == [100, 101, 102]
    first, second, third = session.turns
    drawn = first.prompt_ids + first.completion.token_ids
    assert second.prompt_ids[: len(drawn)] == drawn, "what was drawn is not tokenised again"
    tail = TOKENIZER.decode(second.prompt_ids[len(drawn) :])
    assert tail == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", "the call is not written twice"
    assert third.prompt_ids == Chat(TOKENIZER).prompt_ids([{"role": "user", "content": "anew"}])


def test_sessions_that_start_together_have_one_address():
    async def run() -> set[str]:
        endpoint = LocalEndpoint(Served(ScriptedEngine(lambda _: ("hi", "stop")), Chat(TOKENIZER), "fish", 400))

        async def address() -> str:
            async with endpoint.session(Session("s", SamplingParams(), 400, lambda turn: turn)) as (base_url, _):
                return base_url

        try:
            return set(await asyncio.gather(*(address() for _ in range(8))))
        finally:
            await endpoint.close()

    (base_url,) = asyncio.run(run())
    assert ":0/" not in base_url


def test_requests_are_what_the_engine_protocol_says():
    engine = serve(lambda _: ("hi", "stop"), lambda _, ask: ask("/chat/completions", {"messages": HELLO}))
    (request,) = engine.requests
    assert isinstance(request, Request) and request.sampling.max_tokens == 400 - len(request.prompt_ids)
