"""The endpoint over a real socket with a real tokenizer and a scripted engine."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from tokenizers.processors import TemplateProcessing

from shoal.core.errors import EngineError
from shoal.core.types import Request, SamplingParams
from shoal.models.chat import Chat
from shoal.server.app import LocalEndpoint
from shoal.server.completions import ServedModel
from shoal.server.request_schema import ChatBody, CompletionBody, SamplingBody
from shoal.server.sessions import Session
from support.models import EOS, TOKENIZER
from support.scripted import Script, ScriptedEngine

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
Ask = Callable[..., Awaitable[tuple[int, Any]]]


def serve(
    script: Script,
    work: Callable[[LocalEndpoint, Ask], Awaitable[Any]],
    context_tokens: int = 400,
    chat: Chat | None = None,
) -> ScriptedEngine:
    """Run `work(endpoint, ask)` against a served engine; `ask(path, body)` returns (status, JSON or text)."""
    engine = ScriptedEngine(script)

    async def run() -> None:
        endpoint = LocalEndpoint(ServedModel(engine, chat or Chat(TOKENIZER), "fish", context_tokens))
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


def test_answer_with_ids_and_logprobs():
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


def test_engine_without_scoring_raises():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        for body, param in (({"echo": True, "logprobs": 0}, "echo"), ({"logprobs": 2}, "logprobs")):
            status, reply = await ask("/completions", {"prompt": [20], **body})
            assert (status, reply["error"]["param"]) == (400, param)
        status, reply = await ask("/completions", {"prompt": [20, 21], "echo": True, "max_tokens": 0})
        assert status == 200 and reply["choices"][0]["text"] == TOKENIZER.decode([20, 21])

    assert not serve(lambda _: ("hi", "stop"), work).requests


def test_stream_is_the_same_answer_in_events():
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
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": HELLO, "n": 99}, "n"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "temperature": float("nan")}, None),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 16.5}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": True}, "max_tokens"),
        ({"messages": HELLO, "stop": [""]}, "stop"),
        ({"messages": HELLO, "stop": ["x"] * 17}, "stop"),
        ({"messages": HELLO, "stop": "x" * 257}, "stop"),
        ({"messages": HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": HELLO, "seed": "a"}, "seed"),
        ({"messages": HELLO, "seed": 2**63}, "seed"),
        ({"messages": HELLO, "top_k": 2**70}, "top_k"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HELLO, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": HELLO, "top_logprobs": 2, "logprobs": True}, "top_logprobs"),  # not with this engine
        ({"messages": HELLO, "logprobs": 2}, "logprobs"),
        ({"messages": HELLO, "echo": True}, "echo"),
        ({"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        ({"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tools": 3}, "tools"),
        ({"messages": HELLO, "model": 3}, "model"),
        ({"messages": HELLO, "temprature": 1}, "temprature"),
        ({"messages": HELLO, "stream": True, "stream_options": "usage"}, "stream_options"),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, None),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, None),
        ([1], None),
    ],
)
def test_invalid_requests_get_400_with_the_wrong_key(body: Any, param: str | None):
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        status, reply = await ask("/chat/completions", body)
        assert (status, reply["error"]["param"]) == (400, param), reply

    assert not serve(lambda _: ("hi", "stop"), work).requests


@pytest.mark.parametrize(("params", "body"), [(chat_params, ChatBody), (text_params, CompletionBody)])
def test_every_key_of_openai_is_known(params: Any, body: type[SamplingBody]):
    assert params.CompletionCreateParamsBase.__annotations__.keys() - set(body.__struct_fields__) == set()


def test_known_parameters_without_effect_are_accepted():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        ignored = {"user": "a", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "priority": 3}
        chat = {"prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "verbosity": "medium"}
        neutral = {"echo": False, "best_of": 1, "presence_penalty": 0, "response_format": {"type": "text"}}
        assert (await ask("/chat/completions", {"messages": HELLO, **ignored, **neutral, **chat}))[0] == 200
        assert (await ask("/completions", {"prompt": [5], **ignored, **neutral, "suffix": ""}))[0] == 200

    serve(lambda _: ("hi", "stop"), work)


def test_batched_prompts_get_the_results_of_single_ones():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        for prompts in ([[20, 21], [30]], ["one", "two"], [[20], "two"]):
            body = {"prompt": prompts, "n": 2, "seed": 7, "return_token_ids": True}
            status, reply = await ask("/completions", body)
            assert status == 200 and [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
            singles = [(await ask("/completions", {**body, "prompt": prompt}))[1] for prompt in prompts]
            assert reply["prompt_token_ids"] == [single["prompt_token_ids"] for single in singles]
            texts = [choice["text"] for single in singles for choice in single["choices"]]
            assert [choice["text"] for choice in reply["choices"]] == texts
        for prompt in ([], [[]], [20, [21]], [20, "a"], [[20]] * 257, {}, None, [""]):
            status, reply = await ask("/completions", {"prompt": prompt})
            assert (status, reply["error"]["param"]) == (400, "prompt"), prompt

    engine = serve(lambda request: (f"{request.prompt_ids} {request.sampling.seed}", "stop"), work)
    first = [(request.prompt_ids, request.sampling.seed) for request in engine.requests[:4]]
    assert first == [([20, 21], 7), ([20, 21], 8), ([30], 7), ([30], 8)]


def test_template_variables_reach_the_chat_template():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = f"{TOKENIZER.chat_template}{{{{ mood | default('calm') }}}}"

    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        body = {"messages": HELLO, "return_token_ids": True}
        for options, mood in (({}, "calm"), ({"chat_template_kwargs": {"mood": "wild"}}, "wild"), ({}, "calm")):
            _, reply = await ask("/chat/completions", {**body, **options})
            assert Chat(TOKENIZER).full_text(reply["prompt_token_ids"]).endswith(mood)

    serve(lambda _: ("hi", "stop"), work, chat=Chat(tokenizer))


def test_text_prompts_get_the_bos_token_that_the_tokenizer_adds():
    tokenizer = copy.deepcopy(TOKENIZER)
    bos = int(tokenizer.convert_tokens_to_ids("<|im_start|>"))  # type: ignore[arg-type]
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    ids = TOKENIZER.encode("hi", add_special_tokens=False)

    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        for options, expected in (({}, [bos, *ids]), ({"add_special_tokens": False}, ids)):
            _, reply = await ask("/completions", {"prompt": "hi", "return_token_ids": True, **options})
            assert reply["prompt_token_ids"] == expected
        _, reply = await ask("/completions", {"prompt": ids, "return_token_ids": True})
        assert reply["prompt_token_ids"] == ids
        _, reply = await ask("/chat/completions", {"messages": HELLO, "return_token_ids": True})
        assert reply["prompt_token_ids"] == Chat(TOKENIZER).prompt_ids(HELLO)

    serve(lambda _: ("hi", "stop"), work, chat=Chat(tokenizer))


def test_unseeded_choices_differ_within_a_batch():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        await ask("/completions", {"prompt": [[20], [20]], "n": 2})

    engine = serve(lambda _: ("hi", "stop"), work)
    assert len({request.sampling.seed for request in engine.requests}) == 4


def test_unknown_model_gives_the_openai_404():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        for path, body in (("/chat/completions", {"messages": HELLO}), ("/completions", {"prompt": [5]})):
            status, reply = await ask(path, {**body, "model": "cat"})
            assert status == 404 and reply["error"] == {
                "message": "the model 'cat' does not exist; this server serves 'fish'",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            assert (await ask(path, {**body, "model": "fish-v0"}))[0] == 200, "the served version"
            assert (await ask(path, {**body, "model": "fish-v1"}))[0] == 404

    serve(lambda _: ("hi", "stop"), work)


def test_engine_failure_returns_500_and_stays_failed():
    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        status, reply = await ask("/chat/completions", {"messages": HELLO})
        assert status == 500 and "gone" in reply["error"]["message"] and endpoint.failure is not None

    serve(lambda _: EngineError("gone"), work)


def test_session_uses_run_sampling_and_exact_ids():
    """Sampled tokens are reused exactly, and the sampling settings of the client are ignored."""
    sessions: list[Session] = []
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'

    async def work(endpoint: LocalEndpoint, ask: Ask) -> None:
        sampling = SamplingParams(temperature=0.7, max_tokens=20)
        async with endpoint.session("env/0/0/0/1", sampling, 400, lambda turn: 100 + turn) as session:
            sessions.append(session)
            body = {"model": session.model, "messages": HELLO, "tools": TOOLS, "temperature": 2.0, "max_tokens": 1}
            _, first = await ask("/chat/completions", body)
            answer = first["choices"][0]["message"]
            assert first["choices"][0]["finish_reason"] == "tool_calls" and answer["content"] == "I add:"
            assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "4"}
            await ask("/chat/completions", {**body, "messages": [*HELLO, answer, result]})
            await ask("/chat/completions", {**body, "messages": [{"role": "user", "content": "anew"}]})
        status, _ = await ask("/chat/completions", {"model": session.model, "messages": HELLO})
        assert status == 404, "the session is over"

    said = iter([f"I add: {call}", "4", "new"])
    engine = serve(lambda _: (next(said), "stop"), work)
    assert [request.sampling.temperature for request in engine.requests] == [0.7] * 3
    assert [request.sampling.seed for request in engine.requests] == [100, 101, 102]
    first, second, third = sessions[0].turns
    drawn = first.prompt_ids + first.completion.token_ids
    assert second.prompt_ids[: len(drawn)] == drawn, "sampled tokens are not tokenised again"
    tail = TOKENIZER.decode(second.prompt_ids[len(drawn) :])
    assert tail == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", "the call is not written twice"
    assert third.prompt_ids == Chat(TOKENIZER).prompt_ids([{"role": "user", "content": "anew"}])


def test_sessions_that_start_together_have_one_address():
    async def run() -> set[str]:
        endpoint = LocalEndpoint(ServedModel(ScriptedEngine(lambda _: ("hi", "stop")), Chat(TOKENIZER), "fish", 400))

        async def address() -> str:
            async with endpoint.session("s", SamplingParams(), 400, lambda turn: turn) as session:
                return session.base_url

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
