"""Requests and reactions of the SGLang engine, against the test server with its published API. No SGLang was run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from shoal.core.errors import ConfigError, EngineError
from shoal.core.types import Span
from shoal.rollout.remote.sglang import SglangRolloutEngine
from shoal.runs.weight_files import describe
from support.engine_servers import CONTEXT_TOKENS, attached_double, contract_model, publish, settings
from support.engines import ask
from support.models import TOKENIZER, lora_decoder, random_prompts, small_model
from support.ports import free_port
from support.sglang_double import SglangDouble

(PROMPT,) = random_prompts(5, 12)


def test_server_that_ignores_seeds_is_refused() -> None:
    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8), enable_deterministic_inference=False) as (engine, _):
            await engine.connect()

    with pytest.raises(ConfigError, match=r"ignores seeds.*--enable-deterministic-inference"):
        asyncio.run(main())


def test_weight_update_flushes_the_cache_and_is_recorded_per_token() -> None:
    new = small_model("qwen3", seed=21)

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            running = asyncio.create_task(engine.generate(ask("r", PROMPT, max_tokens=60, min_tokens=60)))
            async with asyncio.timeout(60):
                while double.drawn_tokens < 3:
                    await asyncio.sleep(0)
            await engine.load(4, publish(4, dict(new.named_parameters())))
            drawn = await running
            first, second = drawn.spans
            assert (first.version, second.version, second.end) == (0, 4, 60) and first.end == second.start
            assert double.version == "4" and double.flushes == 1

    asyncio.run(main())


def test_noise_is_refused_by_name() -> None:
    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, _):
            await engine.load(0, {"sigma": 0.1})

    with pytest.raises(ConfigError, match=r"train.noise_scheduler: infer.engine sglang cannot put noise on its norms"):
        asyncio.run(main())


def test_adapters_by_versioned_names(tmp_path: Path) -> None:
    def adapter(version: int, rank: int) -> dict[str, Any]:
        decoder: Any = lora_decoder("qwen3", seed=8, rank=rank, alpha=2 * rank)
        decoder.model.save_pretrained(str(tmp_path / f"{version}"), selected_adapters=["default"])
        return describe(tmp_path / f"{version}", version, "lora")

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            engine.settings = replace(engine.settings, adapter_name="pond")
            await engine.load(1, adapter(1, 4))
            await engine.load(2, adapter(2, 4))
            assert list(double.adapters) == ["pond-v000002"]
            drawn = await engine.generate(ask("r", PROMPT))
            assert drawn.spans == [Span(0, len(drawn.token_ids), 2)]
            with pytest.raises(EngineError, match="LoRA rank 16 exceeds max_lora_rank 8"):
                await engine.load(3, adapter(3, 16))

    asyncio.run(main())


def test_restarted_server_is_reloaded_and_retried() -> None:
    """The seed is in the request, so a repeated request has the same result."""
    port, new = free_port(), small_model("qwen3", seed=21)

    async def serve() -> web.AppRunner:
        double = SglangDouble(small_model("qwen3", seed=8), TOKENIZER, str(contract_model()), CONTEXT_TOKENS)
        runner = web.AppRunner(double.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    async def main() -> None:
        runner = await serve()
        engine = SglangRolloutEngine(settings(f"http://127.0.0.1:{port}"))
        await engine.load(4, publish(4, dict(new.named_parameters())))
        asked = ask("r", PROMPT, max_tokens=60, min_tokens=60, seed=9)
        undisturbed = await engine.generate(asked)
        running = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0.05)
        await runner.cleanup()
        runner = await serve()
        drawn = await running
        assert drawn.token_ids == undisturbed.token_ids and drawn.spans == [Span(0, 60, 4)]
        await engine.close()
        await runner.cleanup()

    asyncio.run(main())


def test_unhealthy_server_breaks_off_requests_and_slow_server_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that will not be answered is repeated when the server is healthy. A slow check cancels nothing."""
    for name, value in (("POLL_EVERY_S", 0.05), ("RECHECK_S", 0.05), ("HEALTH_S", 2.0)):
        monkeypatch.setattr(f"shoal.rollout.remote.server_api.{name}", value)
    asked, looks, over = 0, 0, asyncio.Event()

    async def health(_: web.Request) -> web.Response:
        nonlocal looks
        looks += asked == 1
        if asked == 1 and looks == 1:
            await asyncio.wait_for(over.wait(), 60)
        return web.Response(status=503 if asked == 1 and looks in (2, 3) else 200)

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            expected, answering = await engine.generate(ask("r", PROMPT)), double.generate

            async def generate(request: web.Request) -> web.Response:
                nonlocal asked
                asked += 1
                if asked == 1:
                    await asyncio.wait_for(over.wait(), 60)
                return await answering(request)

            double.generate, double.health = generate, health  # type: ignore[method-assign]
            async with asyncio.timeout(20):
                assert (await engine.generate(ask("r", PROMPT))).token_ids == expected.token_ids
            assert asked == 2 and looks >= 3
            over.set()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_unnoticed_restart_is_found_by_the_served_weights(kind: str, tmp_path: Path) -> None:
    """No request was running, so none was lost. The next one reaches a server with its initial weights."""
    decoder: Any = lora_decoder("qwen3", seed=8, rank=4, alpha=8)
    decoder.model.save_pretrained(str(tmp_path), selected_adapters=["default"])
    new, first = small_model("qwen3", seed=21), small_model("qwen3", seed=8)

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            adapter = describe(tmp_path, 4, "lora")
            await engine.load(4, adapter if kind == "lora" else publish(4, dict(new.named_parameters())))
            undisturbed = await engine.generate(ask("r", PROMPT, seed=9))
            double.model.load_state_dict(first.state_dict())
            double.version = "default"
            double.adapters.clear()
            again = await engine.generate(ask("r", PROMPT, seed=9))
            assert again.token_ids == undisturbed.token_ids and again.logprobs == undisturbed.logprobs
            assert again.spans == [Span(0, len(again.token_ids), 4)]

    asyncio.run(main())


def test_invalid_sampler_answer_is_refused() -> None:
    async def broken(_: web.Request) -> web.Response:
        about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[0.5, 3, None]], "weight_versions": []}
        return web.json_response({"meta_info": about})

    async def main() -> None:
        async with attached_double(small_model("qwen3", seed=8)) as (engine, double):
            double.generate = broken  # type: ignore[method-assign]
            await engine.generate(ask("r", PROMPT))

    with pytest.raises(EngineError, match="SGLang answered r wrongly: a log-prob is positive or not finite"):
        asyncio.run(main())


def test_server_failure_quotes_its_log(tmp_path: Path) -> None:
    """It answers that the log above explains the error, and the log has it."""
    (tmp_path / "sglang.log").write_text("loading\nRuntimeError: the scheduler is out of luck\nbye\n", "utf-8")

    async def dead(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "See stack trace (above)"}}, status=500)

    async def main() -> None:
        double = SglangDouble(small_model("qwen3", seed=8), TOKENIZER, str(contract_model()), CONTEXT_TOKENS)
        double.generate = dead  # type: ignore[method-assign]
        runner = web.AppRunner(double.app())
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        engine = SglangRolloutEngine(settings(f"http://127.0.0.1:{port}", log=tmp_path / "sglang.log"))
        try:
            await engine.generate(ask("r", PROMPT))
        finally:
            await engine.close()
            await runner.cleanup()

    with pytest.raises(EngineError, match=r"(?s)last errors in .*sglang.log:\n  RuntimeError: .* out of luck$"):
        asyncio.run(main())


def test_test_server_samples_from_its_model() -> None:
    """The test server itself, on which the contract suite relies: its log-probs equal transformers."""
    model = small_model("qwen3", seed=8)

    async def main() -> None:
        async with attached_double(model) as (engine, _):
            drawn = await engine.generate(ask("r", PROMPT, temperature=0.7))
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + drawn.token_ids])).logits[0, len(PROMPT) - 1 : -1].double() / 0.7
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(drawn.token_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(drawn.logprobs, expected, rtol=0, atol=1e-5)

    asyncio.run(main())
