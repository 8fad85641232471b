"""The engine around vllm.LLM with requests in flight, run by test_in_process.py in the Python with vLLM.

python in_process_engine.py ASKED.json SAID.json: versions arrive, requests are cancelled, and finally vLLM fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from shoal.core.errors import EngineError
from shoal.core.types import Completion, Request, SamplingParams
from shoal.rollout import vllm_inprocess
from shoal.rollout.remote.server_info import CompletionReader
from shoal.rollout.vllm_inprocess import InProcessSettings, InProcessVllm

TOKENS = 120


class Bench:
    def __init__(self, engine: InProcessVllm, prompt: list[int]) -> None:
        self.engine = engine
        self.inner: Any = engine._llm.llm_engine  # vLLM's scheduler, to read its requests
        self.prompt = prompt

    def ask(self, name: str, tokens: int = TOKENS) -> asyncio.Task[Completion]:
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=4)
        return asyncio.create_task(self.engine.generate(Request(name, self.prompt, sampling)))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)

    async def drawn(self, tokens: int) -> None:
        """Wait until vLLM has sampled this many tokens of its only request."""

        def far_enough() -> bool:
            states = list(self.inner.output_processor.request_states.values())
            return bool(states) and states[0].detokenizer.num_output_tokens() >= tokens

        await self.until(far_enough)

    async def has(self) -> dict[str, Any]:
        """Runs on the device's thread, between two turns."""
        return await asyncio.get_running_loop().run_in_executor(self.engine._device, self._has)

    def _has(self) -> dict[str, Any]:
        return {"requests": self.inner.get_num_unfinished_requests(), "adapters": sorted(self.inner.list_loras())}


async def versions_in_flight(bench: Bench, adapters: list[dict[str, Any]]) -> dict[str, Any]:
    await bench.engine.load(1, adapters[0])
    running = bench.ask("across")
    await bench.drawn(5)
    await bench.engine.load(2, adapters[1])
    meanwhile, still = await bench.has(), not running.done()
    after = bench.ask("after", 8)
    across, after = await running, await after
    said = {"across": told(across), "after": told(after), "meanwhile": meanwhile, "still": still}
    return {**said, "unproved": bench.engine._unverified, "later": await bench.has()}


async def cancelled(bench: Bench) -> dict[str, Any]:
    running = bench.ask("gone")
    await bench.drawn(5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    again = bench.ask("gone", 16)  # with the same name, while the first may still be aborting
    said = told(await again)
    left = await bench.has()
    return {"again": said, "left": left, "undisturbed": told(await bench.ask("alone", 16))}


async def paused(bench: Bench) -> dict[str, Any]:
    running = bench.ask("held")
    await bench.drawn(5)
    await bench.engine.pause()
    (state,) = bench.inner.output_processor.request_states.values()
    before = state.detokenizer.num_output_tokens()
    await asyncio.sleep(0.3)
    held = state.detokenizer.num_output_tokens() == before < TOKENS
    await bench.engine.resume()
    return {"held": held, "tokens": len((await running).token_ids)}


async def not_paused(bench: Bench) -> dict[str, Any]:
    """Other work uses the device, and a turn waits for it."""
    running, free = bench.ask("behind"), threading.Event()
    await bench.drawn(5)
    taken = bench.engine._device.submit(free.wait, 60)
    await bench.until(taken.running)
    await bench.until(lambda: not bench.engine._between_turns.is_set())
    usual, vllm_inprocess.PAUSE_S = vllm_inprocess.PAUSE_S, 0.2
    try:
        await bench.engine.pause()
    except EngineError as error:
        said = str(error)
    else:
        said = "paused"
    finally:
        vllm_inprocess.PAUSE_S = usual
        free.set()
    return {"said": said, "tokens": len((await running).token_ids)}


async def asleep(bench: Bench) -> dict[str, Any]:
    """A call is cancelled after its answer arrived and before its caller saw it. Its name is used again while vLLM
    sleeps.
    """
    engine, running = bench.engine, bench.ask("late", 8)
    await bench.until(lambda: bool(engine._calls))
    (call,) = engine._calls.values()
    while not call.answer.done():
        await asyncio.sleep(0)
    running.cancel()
    await engine.pause()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    await engine.rest()
    word, slept = list(engine._loop.inbox), engine._asleep
    await engine.resume()
    await bench.until(lambda: not engine._loop.busy)
    await bench.has()
    still = engine._asleep
    after = await bench.ask("awake", 8)
    said = {"cancelled": isinstance(ended, asyncio.CancelledError), "words": len(word), "slept": slept, "still": still}
    return {**said, "tokens": len(after.token_ids), "awake": not engine._asleep}


async def broken(bench: Bench) -> dict[str, Any]:
    def break_down() -> None:
        raise RuntimeError("the device is lost")

    well = await bench.engine.health()
    bench.inner.step = break_down
    said = []
    for name in ("first", "second"):
        try:
            await bench.ask(name, 8)
        except EngineError as error:
            said.append(str(error))
    return {"well": well, "said": said, "ill": await bench.engine.health()}


def told(completion: Completion) -> dict[str, Any]:
    spans = [[span.start, span.end, span.version] for span in completion.spans]
    return {"ids": completion.token_ids, "logprobs": completion.logprobs, "spans": spans}


async def main(asked: dict[str, Any]) -> dict[str, Any]:
    reading = CompletionReader(asked["vocab_size"], tuple(asked["eos"]), lambda ids: " ".join(map(str, ids)))
    arguments = {
        "model": asked["model"], "dtype": "float32", "max_model_len": 160, "max_num_seqs": 8, "enforce_eager": True,
        "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_lora": True, "max_lora_rank": 8,
        "max_loras": 2,
    }  # fmt: skip
    device = ThreadPoolExecutor(1)
    engine = InProcessVllm(arguments, device, lambda: iter(()), InProcessSettings(reading, 160, sleeps=True))
    bench = Bench(engine, asked["prompt"])
    said = {"versions": await versions_in_flight(bench, asked["adapters"]), "cancelled": await cancelled(bench)}
    said |= {"paused": await paused(bench), "not_paused": await not_paused(bench)}
    said |= {"asleep": await asleep(bench), "broken": await broken(bench)}
    await engine.close()
    device.shutdown()
    return said


if __name__ == "__main__":
    done = asyncio.run(main(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
    Path(sys.argv[2]).write_text(json.dumps(done), "utf-8")
