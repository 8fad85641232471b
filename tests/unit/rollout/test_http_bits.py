"""The engine over HTTP samples the same bits as the engine in this process, for every version."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.models.sampler_view import SamplerView
from shoal.rollout.embedded import EmbeddedRolloutEngine
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.weight_files import describe
from support.engines import ask, make_engine
from support.models import EOS, as_decoder, lora_decoder, random_prompts, small_model
from support.servers import save, serving

PROMPTS = random_prompts(5, 7, 30)
REQUESTS = [
    ask(f"{i}", PROMPTS[i % 2], seed=100 + i, max_tokens=24, **extra)
    for i, extra in enumerate(
        [
            {},
            {"temperature": 0.6},
            {"top_k": 5},
            {"top_p": 0.8, "min_p": 0.02},
            {"min_tokens": 9},
            {"stop": ("a", "bc")},
        ]
        * 2
    )
]


async def drawn(engine: Any) -> list[Any]:
    return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))


@pytest.mark.parametrize("kind", ("full", "lora"))
@pytest.mark.parametrize("sigma", (0.0, 0.05), ids=("plain", "noisy"))
def test_same_bits_as_the_engine_in_this_process(kind: Any, sigma: float, tmp_path: Path):
    """Version 0 and version 2: tokens, log-probs, spans and kept ids, with the noise of the run's seed."""
    base = small_model("qwen3", seed=3)
    trained: Any = as_decoder(small_model("qwen3", seed=6)) if kind == "full" else lora_decoder(seed=3, rank=8)

    async def here() -> list[Any]:
        with ThreadPoolExecutor(1) as device:
            found = []
            for decoder, version in ((as_decoder(copy.deepcopy(base)), 0), (trained, 2)):
                inner = make_engine(decoder, SamplerView(decoder), slots=8, eos_token_ids=(EOS,))
                engine = EmbeddedRolloutEngine(inner, device, noise_seed=11)
                await engine.load(version, {"sigma": sigma})
                found += await drawn(engine)
            return found

    async def there() -> list[Any]:
        lora = {"enable_lora": True, "max_lora_rank": 8} if kind == "lora" else {}
        async with serving(save(base, tmp_path / "base"), **lora) as server:
            engine = HttpRolloutEngine(server.address(), noise_seed=11, adapter_name="pond")
            await engine.load(0, {"sigma": sigma})
            found = await drawn(engine)
            await engine.load(2, {**describe(save(trained.model, tmp_path / "v2"), 2, kind), "sigma": sigma})
            found += await drawn(engine)
            await engine.close()
            _, models = await server.ask("/v1/models")
            assert ("pond" in [model["id"] for model in models["data"]]) == (kind == "lora")
            asked = {"model": "pond", "prompt": PROMPTS[0], "max_tokens": 1}
            assert (await server.ask("/v1/completions", asked))[0] == (200 if kind == "lora" else 404)
            return found

    assert asyncio.run(there()) == asyncio.run(here())


def test_weights_change_during_generation(tmp_path: Path):
    """A request that is running while a version arrives has a span of each version, and is accepted."""
    base, trained = small_model("qwen3", seed=3), small_model("qwen3", seed=6)

    async def run() -> None:
        async with serving(save(base, tmp_path / "base"), max_model_len=512) as server:
            engine = HttpRolloutEngine(server.address())
            await engine.load(0)
            call = asyncio.create_task(engine.generate(ask("r", PROMPTS[0], max_tokens=400, min_tokens=400)))
            while not (await engine.health())["generated_tokens"]:
                await asyncio.sleep(0.005)
            await engine.load(1, describe(save(trained, tmp_path / "v1"), 1, "full"))
            spans = (await call).spans
            assert [span.version for span in spans] == [0, 1] and spans[1].end == 400
            await engine.close()

    asyncio.run(run())
