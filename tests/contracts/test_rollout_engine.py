"""Every RolloutEngine satisfies the contract of `protocols.RolloutEngine`.

To add an engine: write a function that serves the given model and yields a `Served`, and add it to SERVERS. The suite
compares with plain transformers on the same weights, so it needs no other engine.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.protocols import RolloutEngine
from shoal.core.types import Completion, Request, Span
from shoal.models.sampler_view import SamplerView
from shoal.rollout.embedded import EmbeddedRolloutEngine
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.weight_files import describe
from support import engine_servers
from support.engines import ask, make_engine
from support.models import EOS, TOKENIZER, as_decoder, random_prompts, small_model
from support.servers import save, serving

CONTEXT_TOKENS = 96
SHORT, LONG = random_prompts(3, 6, 40)


@dataclass
class Served:
    """An engine that serves version 0 of a model with end token EOS and a context of CONTEXT_TOKENS."""

    engine: RolloutEngine
    # Makes these weights version N for the engine. The result is the argument of `load`.
    publish: Callable[[int, Mapping[str, torch.Tensor]], Awaitable[Mapping[str, Any] | None]]


@asynccontextmanager
async def embedded(model: Any) -> AsyncIterator[Served]:
    decoder = as_decoder(model)
    with ThreadPoolExecutor(1) as device:
        view = SamplerView(decoder)
        inner = make_engine(decoder, view, slots=16, context_tokens=CONTEXT_TOKENS, eos_token_ids=(EOS,))
        engine = EmbeddedRolloutEngine(inner, device)

        def write(weights: Mapping[str, torch.Tensor]) -> None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])

        async def publish(version: int, weights: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
            await asyncio.get_running_loop().run_in_executor(device, write, weights)
            return {"version": version}

        try:
            yield Served(engine, publish)
        finally:
            await engine.close()


@asynccontextmanager
async def vllm(model: Any) -> AsyncIterator[Served]:
    """A real vLLM server, shared by all tests of the session and started with the weights of `bench`."""

    async def publish(version: int, weights: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        return engine_servers.publish(version, weights)

    async with engine_servers.attached_vllm() as engine:
        yield Served(engine, publish)


@asynccontextmanager
async def sglang_double(model: Any) -> AsyncIterator[Served]:
    """SGLang needs CUDA, so this is a test server with its published API (support/sglang_double.py)."""

    async def publish(version: int, weights: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        return engine_servers.publish(version, weights)

    async with engine_servers.attached_double(model) as (engine, _):
        yield Served(engine, publish)


@asynccontextmanager
async def over_http(model: Any) -> AsyncIterator[Served]:
    """A grpo-infer with its own copy of the weights, in this process but behind a real socket."""
    with TemporaryDirectory() as folder:
        settings = {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": 16}
        async with serving(save(model, Path(folder) / "model"), **settings) as server:
            trained = copy.deepcopy(model)

            async def publish(version: int, weights: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
                with torch.no_grad():
                    for name, parameter in trained.named_parameters():
                        parameter.copy_(weights[name])
                return describe(save(trained, Path(folder) / f"v{version:06}"), version, "full")

            engine = HttpRolloutEngine(server.address(deadline_s=20))
            try:
                yield Served(engine, publish)
            finally:
                await engine.close()


SERVERS: dict[str, Callable[[Any], AbstractAsyncContextManager[Served]]] = {
    "embedded": embedded,
    "embedded-over-http": over_http,
    "vllm": vllm,
    "sglang_double": sglang_double,
}
MARKS = {"vllm": (pytest.mark.vllm, pytest.mark.timeout(600))}  # the first test starts the server


@dataclass
class Bench:
    """One kind of engine, the model that it serves, and the same model in plain transformers."""

    serve: Callable[[Any], AbstractAsyncContextManager[Served]]
    model: Any
    reference: Any

    def run(self, test: Callable[[Served], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.serve(self.model) as served:
                await test(served)

        asyncio.run(main())

    @torch.no_grad()
    def logprobs(self, prompt: list[int], answer: list[int], temperature: float = 1.0) -> np.ndarray:
        logits = self.reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy()


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in SERVERS])
def bench(request: pytest.FixtureRequest) -> Bench:
    model = small_model("qwen3", seed=8)
    return Bench(SERVERS[request.param], model, copy.deepcopy(model))


async def draw(served: Served, *requests: Request) -> list[Completion]:
    return await asyncio.gather(*(served.engine.generate(request) for request in requests))


def assert_well_formed(completion: Completion, request: Request) -> None:
    ids = completion.token_ids
    assert completion.request_id == request.request_id
    assert len(ids) == len(completion.logprobs) <= request.sampling.max_tokens
    assert all(isinstance(i, int) and i >= 0 for i in ids)
    assert all(isinstance(value, float) and value <= 0 for value in completion.logprobs)
    assert completion.finish_reason in ("stop", "length", "abort")
    edges = [edge for span in completion.spans for edge in (span.start, span.end)]
    if ids:
        assert edges[0] == 0 and edges[-1] == len(ids) and edges[1:-1:2] == edges[2:-1:2], "spans cover all tokens"
    if completion.finish_reason == "stop" and not request.sampling.stop:
        assert ids[-1] == EOS or ids[-1] in request.sampling.stop_token_ids


def test_engine_implements_the_protocol(bench: Bench) -> None:
    async def check(served: Served) -> None:
        assert isinstance(served.engine, RolloutEngine) and served.engine.version == 0

    bench.run(check)


def test_connect_is_idempotent_and_sampling_works_after_rest(bench: Bench) -> None:
    request = ask("a", SHORT, seed=1, max_tokens=4)

    async def check(served: Served) -> None:
        engine = served.engine
        await engine.connect()
        await engine.connect()
        facts = await engine.describe()
        assert not facts or int(facts["max_model_len"]) == CONTEXT_TOKENS
        await engine.rest()
        (completion,) = await draw(served, request)
        assert_well_formed(completion, request)
        assert all(isinstance(text, str) for text in (engine.path, engine.activity, engine.opening))

    bench.run(check)


def test_every_completion_is_well_formed(bench: Bench) -> None:
    requests = [
        ask(f"{i}", (SHORT, LONG)[i % 2], seed=i, temperature=(0.0, 0.7, 1.0)[i % 3], max_tokens=1 + 3 * i)
        for i in range(20)
    ]

    async def check(served: Served) -> None:
        for request, completion in zip(requests, await draw(served, *requests), strict=True):
            assert_well_formed(completion, request)
            assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)

    bench.run(check)


def test_greedy_equals_generate(bench: Bench) -> None:
    async def check(served: Served) -> None:
        for prompt in (SHORT, LONG):
            (answer,) = await draw(served, ask("r", prompt, temperature=0.0, max_tokens=20))
            ids = torch.tensor([prompt])
            out = bench.reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
            assert answer.token_ids == out[0, len(prompt) :].tolist()

    bench.run(check)


@pytest.mark.parametrize("temperature", (1.0, 0.6, 1.5))
def test_logprobs_match_the_sampled_distribution(bench: Bench, temperature: float) -> None:
    async def check(served: Served) -> None:
        requests = [ask(f"{i}", LONG, seed=i, temperature=temperature, max_tokens=20) for i in range(4)]
        for answer in await draw(served, *requests):
            expected = bench.logprobs(LONG, answer.token_ids, temperature)
            np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-4)

    bench.run(check)


def test_kept_ids_are_returned_or_none(bench: Bench) -> None:
    """Training on a truncated distribution needs the kept ids. An engine that cannot return them returns None."""

    async def check(served: Served) -> None:
        (answer,) = await draw(served, ask("r", SHORT, top_k=4, max_tokens=12))
        if answer.kept_ids is not None:
            assert all(len(ids) == 4 for ids in answer.kept_ids)
            assert all(token in ids for token, ids in zip(answer.token_ids, answer.kept_ids, strict=True))
        (whole,) = await draw(served, ask("w", SHORT, max_tokens=12))
        assert whole.kept_ids is None

    bench.run(check)


def test_seed_determines_the_result(bench: Bench) -> None:
    async def check(served: Served) -> None:
        requests = [ask(f"{i}", SHORT, seed=s, max_tokens=20) for i, s in enumerate((1, 1, 2, 3))]
        first, again, *others = [answer.token_ids for answer in await draw(served, *requests)]
        assert first == again and first not in others and others[0] != others[1]

    bench.run(check)


def test_limits_and_ends(bench: Bench) -> None:
    async def check(served: Served) -> None:
        (free,) = await draw(served, ask("free", SHORT, max_tokens=20, seed=5))
        stop = free.token_ids[3]
        one, stopped, full, over = await draw(
            served,
            ask("one", SHORT, max_tokens=1, seed=5),
            ask("stopped", SHORT, max_tokens=20, seed=5, stop_token_ids=(stop,)),
            ask("full", random_prompts(0, CONTEXT_TOKENS - 1)[0], max_tokens=20),
            ask("over", random_prompts(0, CONTEXT_TOKENS + 10)[0], max_tokens=20),
        )
        assert one.token_ids == free.token_ids[:1]
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert stopped.finish_reason == "stop"
        assert len(full.token_ids) == 1
        assert (over.token_ids, over.finish_reason) == ([], "length")

    bench.run(check)


def test_stop_strings_cut_the_text_and_not_the_tokens(bench: Bench) -> None:
    async def check(served: Served) -> None:
        for seed in range(20):
            (free,) = await draw(served, ask("free", SHORT, max_tokens=12, seed=seed))
            if len(free.text) == 12 and free.text.index(free.text[6:8]) == 6:
                break
        (answer,) = await draw(served, ask("r", SHORT, max_tokens=12, seed=seed, stop=(free.text[6:8],)))
        assert answer.finish_reason == "stop" and answer.text == free.text[:6]
        assert answer.token_ids == free.token_ids[:8]

    bench.run(check)


def test_min_tokens(bench: Bench) -> None:
    async def check(served: Served) -> None:
        requests = [ask(f"{i}", SHORT, seed=i, min_tokens=30, max_tokens=60) for i in range(16)]
        answers = await draw(served, *requests)
        assert all(EOS not in answer.token_ids[:30] and len(answer.token_ids) >= 30 for answer in answers)

    bench.run(check)


def test_many_concurrent_calls_are_answered(bench: Bench) -> None:
    async def check(served: Served) -> None:
        requests = [ask(f"{i}", (SHORT, LONG)[i % 2], seed=i, max_tokens=1 + i % 9) for i in range(70)]
        answers = await draw(served, *requests)
        assert [answer.request_id for answer in answers] == [request.request_id for request in requests]

    bench.run(check)


def test_new_version(bench: Bench) -> None:
    """New weights have another version, hash and log-probs. The same weights have the same hash."""
    other = small_model("qwen3", seed=9)

    async def check(served: Served) -> None:
        first = await served.engine.load(0)
        (before,) = await draw(served, ask("r", SHORT, temperature=0.0))
        manifest = await served.publish(7, dict(other.named_parameters()))
        second = await served.engine.load(7, manifest)
        assert second != first and await served.engine.load(7, manifest) == second
        assert served.engine.version == 7
        (after,) = await draw(served, ask("r", SHORT, temperature=0.0))
        assert after.spans == [Span(0, len(after.token_ids), 7)] and before.spans[0].version == 0
        bench.reference = other
        expected = bench.logprobs(SHORT, after.token_ids)
        np.testing.assert_allclose(after.logprobs, expected, rtol=0, atol=1e-4)

    bench.run(check)


def test_prompt_cache_ends_with_the_weight_version(bench: Bench) -> None:
    """Prompt computations belong to one weight version, so a prefix cache must not outlive it."""
    other = small_model("qwen3", seed=9)

    async def check(served: Served) -> None:
        await draw(served, *(ask(f"old {i}", LONG, seed=i, max_tokens=4) for i in range(4)))
        await served.engine.load(5, await served.publish(5, dict(other.named_parameters())))
        answers = await draw(served, *(ask(f"new {i}", LONG, seed=i, max_tokens=4) for i in range(4)))
        bench.reference = other
        for answer in answers:
            expected = bench.logprobs(LONG, answer.token_ids)
            np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-4)

    bench.run(check)


def test_pause_stops_sampling_and_allows_version_changes(bench: Bench) -> None:
    async def check(served: Served) -> None:
        await served.engine.pause()
        call = asyncio.create_task(served.engine.generate(ask("r", SHORT, max_tokens=8)))
        done, _ = await asyncio.wait([call], timeout=0.2)
        assert not done, "no tokens are sampled in a pause"
        await served.engine.load(3, await served.publish(3, dict(bench.reference.named_parameters())))
        await served.engine.resume()
        answer = await asyncio.wait_for(call, 30)
        assert answer.spans == [Span(0, len(answer.token_ids), 3)]

    bench.run(check)


def test_health(bench: Bench) -> None:
    async def check(served: Served) -> None:
        health = await served.engine.health()
        assert health["ok"] is True and health["version"] == served.engine.version

    bench.run(check)


def test_closing_twice_does_no_harm(bench: Bench) -> None:
    async def check(served: Served) -> None:
        await draw(served, ask("r", SHORT))
        await served.engine.close()
        await served.engine.close()

    bench.run(check)
