"""Reasoning in answers of the server: complete answers, and the parts of a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from shoal.core.types import Completion, SamplingParams
from shoal.models.chat import Chat
from shoal.models.random_models import CHAT_TEMPLATE, character_tokenizer
from shoal.server.app import LocalEndpoint
from shoal.server.completions import CompletionRequest, ServedModel
from shoal.server.streaming import AnswerSoFar
from support.chats import byte_pair_tokenizer
from support.scripted import ScriptedEngine

THINKING = CHAT_TEMPLATE + "{# <think> … </think> #}"
HARMONY = CHAT_TEMPLATE + "{# <|channel|>final<|message|> #}"
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")


def chat_of(template: str) -> Chat:
    tokenizer = byte_pair_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHANNELS)})  # type: ignore[arg-type]
    return Chat(tokenizer)


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (THINKING, "<think>\n1 < 2 </th\n</think>\n\nyes <b>\n", "1 < 2 </th", "yes <b>"),
        (THINKING, "no <thi thoughts \n", "", "no <thi thoughts \n"),
        (THINKING, "<think>never ends", "never ends", ""),
        (THINKING, "\n <think>late</think>\nyes", "late", "yes"),
        (THINKING, "\n no thoughts", "", "\n no thoughts"),
        (CHAT_TEMPLATE, "<think>a</think>b", "", "<think>a</think>b"),
        (
            HARMONY,
            "<|channel|>analysis<|message|>ünd <x<|end|><|start|>assistant<|channel|>final<|message|>4 <b<|return|>",
            "ünd <x",
            "4 <b",
        ),
        (HARMONY, "plain", "", "plain"),
    ],
)
def test_stream_parts_equal_the_whole_answer(template: str, text: str, reasoning: str, content: str) -> None:
    chat = chat_of(template)
    ids = [*chat.tokenizer.encode(text, add_special_tokens=False), chat.tokenizer.eos_token_id]
    completion = Completion("r", ids, [-1.0] * len(ids), [], "stop", chat.text(ids))
    request = CompletionRequest("chat.completion", "fish", [[1]], SamplingParams(), [0], 400)
    answer, parts = AnswerSoFar(chat, request, 0), {"reasoning_content": "", "content": ""}
    message = chat.message([1], completion)
    for piece in [*(answer.add([i]) for i in ids), answer.finish(completion.text, message)]:
        for key, more in piece.items():
            parts[key] += more
    assert parts == {"reasoning_content": reasoning, "content": content}
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)


def test_server_answers_with_reasoning_and_calls() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = THINKING
    said = '<think>add them</think>I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    async def run() -> tuple[Any, str]:
        served = ServedModel(ScriptedEngine(lambda _: (said, "stop")), Chat(tokenizer), "fish", 400)
        endpoint = LocalEndpoint(served)
        base = await endpoint.start()
        body = {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": tools}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            async with http.post(base + "/chat/completions", json=body) as response:
                whole = (await response.json())["choices"][0]
            async with http.post(base + "/chat/completions", json=body | {"stream": True}) as response:
                events = await response.text()
        await endpoint.close()
        return whole, events

    whole, events = asyncio.run(run())
    message = whole["message"]
    assert (message["reasoning_content"], message["content"]) == ("add them", "I add.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert whole["finish_reason"] == "tool_calls" and "text" not in message
    delta = json.loads(events.split("\n\n")[0].removeprefix("data: "))["choices"][0]["delta"]
    assert delta["reasoning_content"] == "add them" and delta["tool_calls"][0]["index"] == 0
