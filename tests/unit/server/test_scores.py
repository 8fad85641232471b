"""Echo, prompt log-probs and the most likely tokens, over HTTP and with the openai client; a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from shoal.server import completions
from support.models import TOKENIZER, random_prompts, small_model
from support.servers import Server, save, serving

PROMPTS = random_prompts(2, 9, 30, 1, 14)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
Work = Callable[[Server, openai.AsyncOpenAI], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small_model("qwen3", seed=3), tmp_path_factory.mktemp("model"))


def serve(folder: Path, work: Work, **settings: Any) -> None:
    async def main() -> None:
        async with serving(folder, **settings) as server:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
                await work(server, client)
            assert not server.failures

    asyncio.run(main())


def own_logprobs(ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = small_model("qwen3", seed=3)(input_ids=torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits / temperature, -1)


def test_echo_scores_a_batch_of_prompts_as_lm_eval_sends_it(folder: Path):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        body: Any = {"model": server.model, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
        reply = await client.completions.create(prompt=PROMPTS, **body, extra_body={"return_token_ids": True})
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        for prompt, choice in zip(PROMPTS, reply.choices, strict=True):
            (drawn,) = choice.model_extra["token_ids"]  # type: ignore[index]
            found, ids = choice.logprobs, [*prompt, drawn]
            assert found and found.token_logprobs and found.top_logprobs and found.tokens and found.text_offset
            said = str(TOKENIZER.decode([drawn], skip_special_tokens=True))
            assert choice.text == f"{TOKENIZER.decode(prompt)}{said}"
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            own = own_logprobs(ids)[:-1]
            expected = own[torch.arange(len(prompt)), torch.tensor(ids[1:])].tolist()
            assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
            best = [max(top.values()) for top in found.top_logprobs[1:]]
            assert best == pytest.approx(own.max(-1).values.tolist(), abs=1e-5)
            assert drawn == int(own[-1].argmax())
            assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(ids))]
        alone = await client.completions.create(prompt=PROMPTS[1], **{**body, "max_tokens": 0})
        only, batched = alone.choices[0].logprobs, reply.choices[1].logprobs
        assert only and batched and batched.token_logprobs and only.token_logprobs
        assert only.token_logprobs == batched.token_logprobs[:-1] and alone.choices[0].finish_reason == "length"
        text = await client.completions.create(prompt="one two", **body)
        assert text.choices[0].text.startswith("one two")
        assert text.choices[0].logprobs and text.choices[0].logprobs.top_logprobs

    serve(folder, work)


def test_top_logprobs_of_chat_and_completions(folder: Path):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": server.model, "max_tokens": 6, "temperature": 0.7, "seed": 5}
        extra = {"return_token_ids": True}
        chat = await client.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=4, **asked, extra_body=extra
        )
        drawn = chat.choices[0].model_extra["token_ids"]  # type: ignore[index]
        prompt = chat.model_extra["prompt_token_ids"]  # type: ignore[index]
        own = own_logprobs([*prompt, *drawn], 0.7)[len(prompt) - 1 : -1]
        content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert content and len(content) == len(drawn)
        for entry, row, token in zip(content, own, drawn, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
            best = row.topk(4)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert [top.token for top in entry.top_logprobs] == [TOKENIZER.decode([i]) for i in best.indices.tolist()]
        events = await client.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=4, **asked, stream=True
        )
        streamed = [e.choices[0].logprobs.content async for e in events if e.choices[0].logprobs]
        assert [entry for part in streamed for entry in part or ()] == content, "a stream has the same"
        plain = await client.completions.create(prompt=prompt, logprobs=3, **asked)
        found = plain.choices[0].logprobs
        assert found and found.top_logprobs and found.token_logprobs and found.tokens
        rows = zip(found.top_logprobs, found.tokens, found.token_logprobs, strict=True)
        assert all(len(top) in (3, 4) and top[token] == pytest.approx(value, abs=1e-5) for top, token, value in rows)
        narrow = await client.completions.create(prompt=prompt, logprobs=20, **asked, top_p=0.5)
        assert narrow.choices[0].logprobs and narrow.choices[0].logprobs.top_logprobs
        for top in narrow.choices[0].logprobs.top_logprobs:
            assert sum(2.718281828**value for value in top.values()) == pytest.approx(1, abs=1e-3)

    serve(folder, work)


def test_scoring_shares_the_device_with_sampling_and_follows_a_pause(folder: Path):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        engine = server.inference.engine
        body: Any = {"prompt": PROMPTS * 4, "max_tokens": 0, "echo": True, "logprobs": 0}
        sampling = asyncio.create_task(
            server.ask("/v1/completions", {"prompt": [20], "max_tokens": 60, "min_tokens": 60})
        )
        replies = await asyncio.gather(*(server.ask("/v1/completions", body) for _ in range(4)))
        assert [status for status, _ in replies] == [200] * 4
        assert all(reply["choices"] == replies[0][1]["choices"] for _, reply in replies)
        assert (await sampling)[0] == 200
        await engine.pause()
        waiting = asyncio.create_task(server.ask("/v1/completions", body))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await engine.resume()
        assert (await waiting)[1]["choices"] == replies[0][1]["choices"]

    serve(folder, work)


def test_limits_of_scoring(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        full: Any = {"prompt": [20] * 128, "max_tokens": 0, "echo": True, "logprobs": 1}
        assert (await server.ask("/v1/completions", full))[0] == 200, "a full context, since nothing is sampled"
        for body, param in (
            ({"prompt": [20] * 129, "max_tokens": 0, "echo": True}, None),
            ({"prompt": [20] * 128, "max_tokens": 1, "echo": True}, None),
            ({"prompt": [20], "max_tokens": 0}, "max_tokens"),
            ({"prompt": [20], "logprobs": 21}, "logprobs"),
            ({"prompt": [20, 10**6], "max_tokens": 0, "echo": True, "logprobs": 1}, None),
        ):
            status, reply = await server.ask("/v1/completions", body)
            assert (status, reply["error"]["param"]) == (400, param), body
        monkeypatch.setattr(completions, "MAX_SCORES", 100)
        assert (await server.ask("/v1/completions", full))[0] == 400

    serve(folder, work)
