"""The embedded engine behind its interface: batching, cancellation, failures, and weight updates during generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.errors import EngineError, NonFiniteError
from shoal.models.attention import Context, Packed
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from shoal.rollout.embedded import EmbeddedRolloutEngine
from support.engines import ask, make_engine
from support.models import EOS, VOCABULARY, lora_decoder, random_prompts, shake_adapter, small_decoder

PROMPTS = random_prompts(0, 10, 20, 15)


class CountingDecoder(Decoder):
    prefilled = 0

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        self.prefilled += input_ids.numel() if isinstance(context, Packed) else 0
        return super().hidden(input_ids, position_ids, context)


class BreakingDecoder(Decoder):
    broken = False

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        if self.broken:
            raise IndexError("the device failed")
        return super().hidden(input_ids, position_ids, context)


@pytest.fixture
def device() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def make(device: ThreadPoolExecutor, decoder: Decoder | None = None, **settings: Any) -> EmbeddedRolloutEngine:
    return EmbeddedRolloutEngine(make_engine(decoder or small_decoder(), **settings), device)


def test_simultaneous_calls_share_a_prefill(device: ThreadPoolExecutor) -> None:
    decoder = CountingDecoder(small_decoder().model)
    engine = make(device, decoder, slots=32)
    decoder.prefilled = 0

    async def groups() -> None:
        requests = [ask(f"{g}/{i}", PROMPTS[g], seed=i, max_tokens=4) for g in range(3) for i in range(8)]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [a.request_id for a in answers] == [r.request_id for r in requests]

    asyncio.run(groups())
    assert decoder.prefilled == 48, "45 tokens of three prompts, padded to whole rows"


def test_invalid_request_is_refused_alone(device: ThreadPoolExecutor) -> None:
    engine = make(device)

    async def both() -> None:
        bad, good = ask("bad", [5, VOCABULARY], max_tokens=3), ask("good", PROMPTS[0], max_tokens=3)
        refused, answered = await asyncio.gather(engine.generate(bad), engine.generate(good), return_exceptions=True)
        assert isinstance(refused, EngineError) and "token ids must be" in str(refused)
        assert not isinstance(answered, BaseException) and answered.token_ids

    asyncio.run(both())


def test_request_id_is_unique_while_running(device: ThreadPoolExecutor) -> None:
    engine = make(device)

    async def twice() -> None:
        results = await asyncio.gather(
            *(engine.generate(ask("same", PROMPTS[0])) for _ in range(2)), return_exceptions=True
        )
        assert sum(isinstance(result, EngineError) for result in results) == 1
        assert len((await engine.generate(ask("same", PROMPTS[0]))).token_ids) == 16, "and again when it is done"

    asyncio.run(twice())


def test_cancelled_call_does_not_affect_others(device: ThreadPoolExecutor) -> None:
    engine = make(device)

    async def cancel_one() -> None:
        calls = [asyncio.create_task(engine.generate(ask(f"{i}", PROMPTS[0], seed=i, max_tokens=60))) for i in range(3)]
        await asyncio.sleep(0.01)
        calls[1].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert [len(r.token_ids) for r in (results[0], results[2]) if not isinstance(r, BaseException)] == [60, 60]
        assert (await engine.health())["ok"]

    asyncio.run(cancel_one())


def test_cancelled_call_frees_its_slot(device: ThreadPoolExecutor) -> None:
    """Eight slots, all used by calls that would take minutes. After cancellation, eight more are answered."""
    engine = make(device, slots=8, context_tokens=4096)

    async def cancel_all() -> None:
        endless = [asyncio.create_task(engine.generate(ask(f"{i}", PROMPTS[0], max_tokens=4000))) for i in range(12)]
        while (await engine.health())["running"] < 8:
            await asyncio.sleep(0.01)
        for call in endless:
            call.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        answers = await asyncio.gather(*(engine.generate(ask(f"n{i}", PROMPTS[1], max_tokens=3)) for i in range(8)))
        assert [len(answer.token_ids) for answer in answers] == [3] * 8
        health = await engine.health()
        assert (health["running"], health["waiting"]) == (0, 0) and health["generated_tokens"] < 4000

    asyncio.run(cancel_all())


def test_reused_request_id_gets_a_new_answer(device: ThreadPoolExecutor) -> None:
    engine = make(device)

    async def reuse() -> None:
        expected = (await engine.generate(ask("x", PROMPTS[1], seed=2, max_tokens=6))).token_ids
        for wait_s in (0.0, 0.001, 0.005, 0.02):
            old = asyncio.create_task(engine.generate(ask("x", PROMPTS[0], seed=1, max_tokens=30)))
            await asyncio.sleep(wait_s)
            old.cancel()
            await asyncio.gather(old, return_exceptions=True)
            again = await engine.generate(ask("x", PROMPTS[1], seed=2, max_tokens=6))
            assert (again.request_id, again.token_ids) == ("x", expected)

    asyncio.run(reuse())


def test_no_tokens_are_sampled_after_pause_returns(device: ThreadPoolExecutor) -> None:
    engine = make(device, context_tokens=2048)

    async def pause() -> None:
        call = asyncio.create_task(engine.generate(ask("r", PROMPTS[0], max_tokens=300)))
        for _ in range(4):
            await asyncio.sleep(0.02)
            await engine.pause()
            drawn = (await engine.health())["generated_tokens"]
            await asyncio.sleep(0.05)
            assert (await engine.health())["generated_tokens"] == drawn
            await engine.resume()
        assert len((await call).token_ids) == 300

    asyncio.run(pause())


def test_listener_receives_every_token_except_the_last_step(device: ThreadPoolExecutor) -> None:
    engine = make(device)

    async def listen() -> None:
        received: list[int] = []
        values: list[float] = []

        def note(token_ids: list[int], logprobs: list[float]) -> None:
            received.extend(token_ids)
            values.extend(logprobs)

        quiet = await engine.generate(ask("quiet", PROMPTS[0], max_tokens=20))
        answer = await engine.generate(ask("loud", PROMPTS[0], max_tokens=20), note)
        assert answer.token_ids == quiet.token_ids and received == answer.token_ids[:19]
        assert values == answer.logprobs[:19]

    asyncio.run(listen())


def test_failure_ends_every_request_with_its_reason(device: ThreadPoolExecutor) -> None:
    decoder = BreakingDecoder(small_decoder().model)
    engine = make(device, decoder)
    decoder.broken = True

    async def fail() -> None:
        results = await asyncio.gather(
            *(engine.generate(ask(str(i), PROMPTS[i])) for i in range(2)), return_exceptions=True
        )
        assert all(isinstance(r, EngineError) and "IndexError" in str(r) for r in results)
        assert (await engine.health())["ok"] is False
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.generate(ask("later", PROMPTS[0]))

    asyncio.run(fail())


def test_nonfinite_weights_end_the_run(device: ThreadPoolExecutor) -> None:
    """Between two versions: these tokens are never trained, and the reason is reported."""
    decoder = small_decoder()
    engine = make(device, decoder)

    async def work() -> None:
        assert (await engine.generate(ask("good", PROMPTS[0]))).token_ids
        with torch.no_grad():
            next(p for name, p in decoder.model.named_parameters() if "down_proj" in name)[0, 0] = float("nan")
        await engine.load(1)
        with pytest.raises(NonFiniteError, match="log-probs of version 1 are not finite"):
            await engine.generate(ask("bad", PROMPTS[0]))

    asyncio.run(work())


def test_closing_ends_what_is_running(device: ThreadPoolExecutor) -> None:
    engine = make(device, context_tokens=512)

    async def close() -> None:
        call = asyncio.create_task(engine.generate(ask("r", PROMPTS[0], max_tokens=400)))
        await asyncio.sleep(0.02)
        await engine.close()
        with pytest.raises(asyncio.CancelledError):
            await call
        health = await engine.health()
        assert (health["running"], health["waiting"]) == (0, 0)

    asyncio.run(close())


def test_health_counts(device: ThreadPoolExecutor) -> None:
    engine = make(device, slots=8)

    async def count() -> None:
        await asyncio.gather(*(engine.generate(ask(f"{i}", PROMPTS[0], max_tokens=5)) for i in range(12)))
        assert await engine.health() == {
            "ok": True, "version": 0, "running": 0, "waiting": 0, "generated_tokens": 60,
        }  # fmt: skip

    asyncio.run(count())


@pytest.mark.parametrize("mode", ("shared", "snapshot"))
@pytest.mark.parametrize("make_decoder", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_hash_identifies_the_served_weights(make_decoder: Any, mode: Any, device: ThreadPoolExecutor) -> None:
    decoder = make_decoder()
    view = SamplerView(decoder, mode)
    engine = EmbeddedRolloutEngine(make_engine(view.decoder, view), device, noise_seed=4)

    async def hashes() -> None:
        first = await engine.load(1)
        assert await engine.load(1) == first
        noisy = await engine.load(1, {"sigma": 0.1})
        assert noisy != first and await engine.load(1) == first
        shake_adapter(decoder, seed=1)
        second = await engine.load(2)
        assert second != first and await engine.load(2) == second

    asyncio.run(hashes())


def test_waiting_group_is_prefilled_with_current_weights(device: ThreadPoolExecutor) -> None:
    """Half of a group starts with version 0. Its prompt is computed again for the half that starts with version 1."""
    decoder = small_decoder()
    engine, fresh = make(device, decoder, slots=8), make(device, small_decoder(seed=5), slots=8)

    def adopt() -> None:
        with torch.no_grad():
            for mine, other in zip(decoder.model.parameters(), small_decoder(seed=5).model.parameters(), strict=True):
                mine.copy_(other)

    async def check() -> None:
        group = [ask(f"{i}", PROMPTS[1], seed=i, max_tokens=30 + i % 2 * 10) for i in range(16)]
        calls = [asyncio.create_task(engine.generate(request)) for request in group]
        while not (await engine.health())["generated_tokens"]:
            await asyncio.sleep(0)
        await engine.pause()
        await asyncio.get_running_loop().run_in_executor(device, adopt)
        await engine.load(1)
        await engine.resume()
        answers = await asyncio.gather(*calls)
        late = [i for i, answer in enumerate(answers) if [span.version for span in answer.spans] == [1]]
        assert [[span.version for span in answers[i].spans] for i in range(8)] == [[0, 1]] * 8
        assert late == list(range(8, 16))
        wanted = await asyncio.gather(*(fresh.generate(group[i]) for i in late))
        assert [answers[i].token_ids for i in late] == [answer.token_ids for answer in wanted]
        assert [answers[i].logprobs for i in late] == [answer.logprobs for answer in wanted]

    asyncio.run(check())


def test_hash_covers_the_last_layer(device: ThreadPoolExecutor) -> None:
    decoder = small_decoder()
    engine = make(device, decoder)
    before = asyncio.run(engine.load(1))
    with torch.no_grad():
        decoder.inner.lm_head.weight[0, 0] += 1  # type: ignore[union-attr,index]
    assert asyncio.run(engine.load(2)) != before


def test_noise_comes_from_the_manifest_and_the_run_s_seed(device: ThreadPoolExecutor) -> None:
    async def sample(sigma: float, seed: int) -> list[float]:
        engine = EmbeddedRolloutEngine(make_engine(small_decoder(), eos_token_ids=(EOS,)), device, noise_seed=seed)
        await engine.load(3, {"sigma": sigma})
        return (await engine.generate(ask("r", PROMPTS[0]))).logprobs

    plain, one, again, other = (asyncio.run(sample(s, n)) for s, n in ((0, 0), (0.1, 0), (0.1, 0), (0.1, 1)))
    assert one == again and one != plain and other not in (one, plain)


@pytest.mark.parametrize("what", ["load", "pause"])
def test_weights_and_pauses_wait_for_one_step_alone(device: ThreadPoolExecutor, what: str) -> None:
    inner = make_engine(small_decoder())
    engine, step = EmbeddedRolloutEngine(inner, device), inner.step
    inside, gate, steps, found = threading.Event(), threading.Event(), [], []

    def gated() -> Any:
        steps.append(len(steps))
        inside.set()
        assert gate.wait(10)
        return step()

    inner.step = gated

    async def run() -> None:
        drawn = asyncio.create_task(engine.generate(ask("a", PROMPTS[0], max_tokens=12, min_tokens=12)))
        await asyncio.to_thread(inside.wait, 10)
        waiting = asyncio.create_task(engine.load(1) if what == "load" else engine.pause())
        await asyncio.sleep(0)
        device.submit(lambda: found.append(len(steps)))
        gate.set()
        await asyncio.wait_for(waiting, 10)
        await engine.resume()
        assert len((await drawn).token_ids) == 12 and found == [1]

    asyncio.run(run())
