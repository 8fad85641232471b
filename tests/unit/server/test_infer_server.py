"""grpo-infer with the official openai client: completions, streams, adapters, weights; a real engine and socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from shoal.runs.weight_files import describe
from support.models import EOS, TOKENIZER, lora_decoder, small_model
from support.servers import Server, save, serving

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
Work = Callable[[Server, openai.AsyncOpenAI], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(small_model("qwen3", seed=3), tmp_path_factory.mktemp("model"))


@pytest.fixture
def serve(folder: Path) -> Callable[..., None]:
    def run(work: Work, **settings: Any) -> None:
        async def main() -> None:
            async with serving(folder, **settings) as server:
                async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
                    await work(server, client)
                assert not server.failures

        asyncio.run(main())

    return run


def test_openai_completions_and_chat(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [server.model, f"{server.model}-v0"]
        assert (await client.models.retrieve(server.model)).owned_by == "shoal"
        ids = TOKENIZER.encode("one two", add_special_tokens=False)
        asked: dict[str, Any] = {"model": server.model, "max_tokens": 12, "seed": 7, "logprobs": 1}
        by_text = await client.completions.create(prompt="one two", **asked, extra_body={"return_token_ids": True})
        by_ids = await client.completions.create(prompt=ids, **asked)
        assert by_text.choices[0].text == by_ids.choices[0].text and by_ids.usage and by_ids.usage.prompt_tokens == 7
        extra = by_text.choices[0].model_extra or {}
        assert by_text.choices[0].text == TOKENIZER.decode(extra["token_ids"], skip_special_tokens=True)
        assert extra["shoal"]["spans"] == [[0, len(extra["token_ids"]), 0]]
        drawn = by_text.choices[0].logprobs
        assert drawn and drawn.token_logprobs and all(value <= 0 for value in drawn.token_logprobs)
        alone = (await client.completions.create(prompt=ids, **{**asked, "logprobs": 0})).choices[0].logprobs
        assert alone and alone.token_logprobs == drawn.token_logprobs, "0: only the sampled token"
        chat = await client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=5, logprobs=True)
        said = chat.choices[0].logprobs
        assert said and said.content and len(said.content) == chat.usage.completion_tokens  # type: ignore[union-attr]

    serve(work)


def test_several_choices_are_those_of_the_following_seeds(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": server.model, "prompt": "abc", "max_tokens": 16}
        together = await client.completions.create(**asked, n=3, seed=5)
        alone = [await client.completions.create(**asked, seed=5 + i) for i in range(3)]
        assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
        assert len({choice.text for choice in together.choices}) == 3

    serve(work)


@pytest.mark.parametrize("stop", ([], ["ab", "Q"], [" "]), ids=str)
def test_stream_equals_the_whole_answer_token_by_token(stop: list[str], serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        pieces = 0
        for seed in range(12):
            asked: dict[str, Any] = {"model": server.model, "max_tokens": 24, "seed": seed, "stop": stop or None}
            whole = await client.completions.create(prompt="x", **asked)
            text, reason = "", None
            async for event in await client.completions.create(prompt="x", **asked, stream=True):
                text, reason = text + event.choices[0].text, event.choices[0].finish_reason or reason
                pieces += 1
            assert (text, reason) == (whole.choices[0].text, whole.choices[0].finish_reason)
            assert not any(end in text for end in stop)
        assert pieces > 12 * 3, "it came in pieces"

    serve(work)


def test_chat_stream_with_logprobs_ids_and_usage(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": server.model, "messages": HELLO, "max_tokens": 9, "seed": 1, "logprobs": True}
        extra = {"return_token_ids": True}
        whole = await client.chat.completions.create(**asked, extra_body=extra)
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        events = [event async for event in stream]
        deltas = [event.choices[0] for event in events if event.choices]
        assert deltas[0].delta.role == "assistant" and events[-1].usage == whole.usage
        assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
        ids = [i for choice in deltas for i in (choice.model_extra or {})["token_ids"]]
        assert ids == (whole.choices[0].model_extra or {})["token_ids"]
        values = [item.logprob for choice in deltas if choice.logprobs for item in choice.logprobs.content or ()]
        assert whole.choices[0].logprobs and [i.logprob for i in whole.choices[0].logprobs.content or ()] == values

    serve(work)


def test_errors_have_the_openai_format(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
            await client.chat.completions.create(model="gpt", messages=HELLO)
        for body in (
            {"top_logprobs": 2},
            {"n": 17},
            {"stop": ["x"] * 17},
            {"max_tokens": 0},
            {"logit_bias": {"4": 1}},
            {"top_p": 1.5},
            {"min_p": 2},
            {"ignore_eos": True},
            {"include_stop_str_in_output": True},
        ):
            with pytest.raises(openai.BadRequestError, match=next(iter(body))):
                await client.chat.completions.create(model=server.model, messages=HELLO, extra_body=body)
        with pytest.raises(openai.BadRequestError, match="token ids must be"):
            await client.completions.create(model=server.model, prompt=[5, 10**6])
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 128 tokens, but the prompt has 200"
        ):
            await client.completions.create(model=server.model, prompt=[5] * 200)
        assert (await server.ask("/health"))[1]["ok"] is True, "the server still works"

    serve(work)


def test_tokenize_and_back(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        _, text = await server.ask("/tokenize", {"prompt": "hi<|im_end|>"})
        assert text == {"count": 3, "max_model_len": 128, "tokens": [*TOKENIZER.encode("hi"), EOS]}
        assert await server.ask("/detokenize", {"tokens": text["tokens"]}) == (200, {"prompt": "hi<|im_end|>"})
        _, chat = await server.ask("/tokenize", {"messages": HELLO})
        assert TOKENIZER.decode(chat["tokens"]) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert (await server.ask("/detokenize", {"tokens": [-1]}))[0] == 400
        assert (await server.ask("/tokenize", {"prompt": 3}))[0] == 400

    serve(work)


def test_metrics_count_what_happened(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        for _ in range(3):
            await client.completions.create(
                model=server.model, prompt=[20] * 5, max_tokens=4, extra_body={"min_tokens": 4}
            )
        assert (await server.ask("/v1/completions", {"prompt": 3}))[0] == 400
        assert [(await server.ask(f"/nowhere/{i}"))[0] for i in range(2)] == [404, 404]
        status, text = await server.ask("/metrics")
        assert status == 200
        found = {k: float(v) for k, v in re.findall(r"^(shoal_\S+) (\S+)$", text, re.MULTILINE)}
        assert found['shoal_requests_total{path="/v1/completions",status="200"}'] == 3
        assert found['shoal_requests_total{path="/v1/completions",status="400"}'] == 1
        assert found['shoal_requests_total{path="other",status="404"}'] == 2
        assert (found["shoal_prompt_tokens_total"], found["shoal_completion_tokens_total"]) == (15, 12)
        assert (found["shoal_requests_running"], found["shoal_weight_version"]) == (0, 0)
        assert found['shoal_request_seconds_bucket{le="+Inf"}'] == found["shoal_request_seconds_count"] == 3
        assert found.keys() >= {"shoal_requests_waiting", "shoal_request_seconds_sum"}
        for line in text.splitlines():
            assert re.fullmatch(r"# (HELP|TYPE) shoal_\w+ .+|shoal_\w+(\{[^}]+\})? [\d.e+-]+", line), line

    serve(work)


@pytest.mark.parametrize("stream", (False, True), ids=("at once", "streamed"))
def test_disconnected_client_frees_its_slot(stream: bool, serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        body = {"prompt": [20, 21], "max_tokens": 3900, "min_tokens": 3900, "stream": stream, "n": 8}
        async with aiohttp.ClientSession() as http:
            call = asyncio.create_task(http.post(f"{server.url}/v1/completions", json=body))
            while (await server.inference.engine.health())["running"] < 8:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await server.until_idle()
        assert (await server.inference.engine.health())["generated_tokens"] < 8 * 3900

    serve(work, max_model_len=4096)


def test_pause_keeps_requests_in_flight(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        body = {"prompt": [20, 21], "max_tokens": 400, "min_tokens": 400, "seed": 4}
        call = asyncio.create_task(server.ask("/v1/completions", body))
        while not (await server.ask("/health"))[1]["generated_tokens"]:
            await asyncio.sleep(0.01)
        assert await server.ask("/shoal/pause", {}) == (200, {"paused": True})
        drawn = (await server.ask("/health"))[1]["generated_tokens"]
        await asyncio.sleep(0.1)
        health = (await server.ask("/health"))[1]
        assert (health["generated_tokens"], health["running"]) == (drawn, 1) and 0 < drawn < 400
        assert (await server.ask("/shoal/about"))[1]["paused"] is True
        assert await server.ask("/shoal/resume", {}) == (200, {"paused": False})
        _, interrupted = await call
        _, again = await server.ask("/v1/completions", body)
        assert interrupted["choices"] == again["choices"]

    serve(work, max_model_len=512)


def test_weights_with_a_flipped_bit_are_refused_and_the_old_ones_still_served(serve: Any, tmp_path: Path):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        ask = {"prompt": [20, 21], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        _, before = await server.ask("/v1/completions", ask)
        manifest = describe(save(small_model("qwen3", seed=4), tmp_path / "v1"), 1, "full")
        file = tmp_path / "v1" / "model.safetensors"
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        status, reply = await server.ask("/shoal/load", manifest)
        assert status == 409 and "checksum" in reply["error"]["message"]
        assert (await server.ask("/shoal/version"))[1]["version"] == 0
        _, after = await server.ask("/v1/completions", ask)
        assert after["choices"] == before["choices"]
        file.write_bytes(good)
        status, reply = await server.ask("/shoal/load", manifest)
        assert (status, reply["version"], reply.pop("applied_sigma")) == (200, 1, 0.0)
        assert await server.ask("/shoal/version") == (200, reply)
        _, new = await server.ask("/v1/completions", {**ask, "model": f"{server.model}-v1"})
        assert new["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
        assert new["choices"][0]["shoal"]["spans"] == [[0, 20, 1]]
        assert (await server.ask("/v1/completions", {**ask, "model": f"{server.model}-v0"}))[0] == 404

    serve(work)


def test_version_without_weights_is_refused_unless_served(serve: Any):
    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        status, reply = await server.ask("/shoal/load", {"version": 3})
        assert status == 409 and "version 3 has no weights in its manifest" in reply["error"]["message"]
        plain = (await server.ask("/v1/completions", {"prompt": [20], "seed": 1, "logprobs": 1}))[1]["choices"]
        assert (await server.ask("/shoal/load", {"version": 0, "sigma": 0.3, "noise_seed": 5}))[0] == 200
        noisy = (await server.ask("/v1/completions", {"prompt": [20], "seed": 1, "logprobs": 1}))[1]["choices"]
        assert noisy != plain
        assert (await server.ask("/shoal/load", {"version": 0}))[0] == 200
        assert (await server.ask("/v1/completions", {"prompt": [20], "seed": 1, "logprobs": 1}))[1]["choices"] == plain
        for wrong in ({"version": -1}, {"version": "1"}, {}, {"version": 0, "sigma": -1}):
            assert (await server.ask("/shoal/load", wrong))[0] == 400

    serve(work)


def test_named_adapters_one_at_a_time(serve: Any, tmp_path: Path):
    one = {"lora_name": "fish-v1", "lora_path": str(save(lora_decoder(seed=3).model, tmp_path / "one"))}
    two = {"lora_name": "fish-v2", "lora_path": str(save(lora_decoder(seed=4).model, tmp_path / "two"))}

    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        async def say(model: str) -> str:
            answer = await client.completions.create(model=model, prompt=[20], max_tokens=20, temperature=0)
            return answer.choices[0].text

        base = await say(server.model)
        assert (await server.ask("/v1/load_lora_adapter", one))[0] == 200
        assert [model.id async for model in client.models.list()] == ["fish-v1"]
        first = await say("fish-v1")
        assert first != base
        with pytest.raises(openai.BadRequestError, match=r"infer.max_loras 1"):
            await say(server.model)
        status, reply = await server.ask("/v1/load_lora_adapter", two)
        assert status == 400 and "infer.max_loras 1" in reply["error"]["message"]
        assert (await server.ask("/v1/unload_lora_adapter", {"lora_name": "fish-v2"}))[0] == 404
        assert (await server.ask("/v1/unload_lora_adapter", {"lora_name": "fish-v1"}))[0] == 200
        assert await say(server.model) == base
        assert (await server.ask("/v1/load_lora_adapter", two))[0] == 200
        assert await say("fish-v2") not in (base, first)
        status, reply = await server.ask("/v1/load_lora_adapter", {**one, "lora_path": str(tmp_path)})
        assert status == 400

    serve(work, enable_lora=True, max_lora_rank=8)


@pytest.mark.parametrize(
    ("settings", "rank", "says"),
    [({}, 4, "infer.enable_lora=true"), ({"enable_lora": True, "max_lora_rank": 4}, 8, "infer.max_lora_rank (4)")],
)
def test_adapters_that_do_not_fit(settings: dict[str, Any], rank: int, says: str, serve: Any, tmp_path: Path):
    folder = save(lora_decoder(seed=3, rank=rank).model, tmp_path / "adapter")

    async def work(server: Server, client: openai.AsyncOpenAI) -> None:
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(folder)}),
            ("/shoal/load", describe(folder, 1, "lora")),
        ):
            status, reply = await server.ask(path, body)
            assert status == 409 and says in reply["error"]["message"], reply

    serve(work, **settings)
