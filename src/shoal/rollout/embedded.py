"""The embedded engine behind the RolloutEngine seam: requests from coroutines, steps on the device's thread.

The trainer uses the same thread, so on one device sampling and training take turns by the step and need no lock.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import torch

from shoal.engine.engine import EmbeddedEngine
from shoal.errors import EngineError
from shoal.types import Completion, Request

# Engine steps between two looks at what else the loop wants of the device's thread.
STEPS_PER_TURN = 16


class EmbeddedRolloutEngine:
    def __init__(self, engine: EmbeddedEngine, device: Executor, noise_seed: int = 0) -> None:
        self._engine = engine
        self._device = device
        self._noise_seed = noise_seed
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._inbox: deque[Request] = deque()  # filled by coroutines, emptied by the device's thread
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._paused = asyncio.Event()
        self._paused.set()  # set = running

    @property
    def path(self) -> str:
        """How tokens are decoded, in words."""
        return self._engine.path

    @property
    def activity(self) -> str:
        """What it is doing, in words; read by the console's thread, so only counters."""
        scheduler = self._engine.scheduler
        waiting, running = len(scheduler.waiting) + len(self._inbox), len(scheduler.running)
        return f"{waiting} to prefill, {running} decoding" if waiting or running else ""

    @property
    def version(self) -> int:
        return self._engine.view.version

    async def generate(self, request: Request) -> Completion:
        if self._failure is not None:
            raise EngineError(f"the embedded engine failed earlier: {self._failure}")
        self._engine.check(request)
        if request.request_id in self._answers:
            raise EngineError(f"request {request.request_id} is already running")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        self._inbox.append(request)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="engine")
        try:
            return await answer
        finally:
            self._answers.pop(request.request_id, None)

    async def _run(self) -> None:
        """Step while there is work. A failure ends every request with its reason instead of leaving them waiting."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # whoever asked together is batched together
        try:
            while self._inbox or self._engine.busy:
                await self._paused.wait()
                for completion in await loop.run_in_executor(self._device, self._turn):
                    answer = self._answers.get(completion.request_id)
                    if answer is not None and not answer.done():
                        answer.set_result(completion)
        except Exception as error:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(EngineError(f"the embedded engine failed: {type(error).__name__}: {error}"))
            self._failure = error

    def _turn(self) -> list[Completion]:
        """On the device's thread: step until something finishes or the turn is over; requests join at every step."""
        finished: list[Completion] = []
        for _ in range(STEPS_PER_TURN):
            while self._inbox:
                answer = self._engine.add(self._inbox.popleft())
                if answer is not None:
                    finished.append(answer)
            if finished or not self._engine.busy:
                break
            finished += self._engine.step()
        return finished

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve the trainer's current weights as `version`. The manifest may carry the noise of this version."""
        sigma = float((manifest or {}).get("sigma", 0.0))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._device, self._load, version, sigma)

    def _load(self, version: int, sigma: float) -> str:
        view = self._engine.view
        view.refresh(version, sigma, self._noise_seed)
        # A few numbers of every tensor the sampler reads: a step moves them all, and hashing the rest costs time.
        with view.active():
            numbers = torch.cat([tensor.detach().flatten()[:32].float() for tensor in view.served_tensors()])
            return hashlib.blake2b(numbers.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    async def pause(self) -> None:
        self._paused.clear()

    async def resume(self) -> None:
        self._paused.set()

    async def health(self) -> dict[str, Any]:
        scheduler = self._engine.scheduler
        return {
            "ok": self._failure is None,
            "version": self.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self._inbox),
            "generated_tokens": self._engine.generated_tokens,
        }

    async def close(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._inbox.clear()
        # On the device's thread, behind the turn that may still be running there.
        await asyncio.get_running_loop().run_in_executor(self._device, self._engine.abort)
        for answer in self._answers.values():
            if not answer.done():
                answer.cancel()
