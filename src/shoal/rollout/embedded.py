"""The embedded engine behind the RolloutEngine seam: requests from coroutines, steps on the device's thread.

The trainer uses the same thread, so on one device sampling and training take turns by the step and need no lock. A
server has no trainer: it is given weights of its own, which `load` replaces.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.engine.engine import EmbeddedEngine
from shoal.errors import EngineError, StorageError
from shoal.models.own_weights import OwnWeights
from shoal.observability import manifest as manifests
from shoal.observability.atomic import fault
from shoal.protocols import Heard
from shoal.rollout.pausing import PAUSE_S, pause_between_turns
from shoal.types import Completion, Request

log = logging.getLogger(__name__)
Done = TypeVar("Done")
# Engine steps between two looks at what else the loop wants of the device's thread.
STEPS_PER_TURN = 16


@dataclass
class _Call:
    """A request as it runs: under a name of its own, so that one that is asked again is never answered by the old."""

    request: Request
    name: str  # as the caller calls it
    answer: asyncio.Future[Completion]
    heard: Heard | None = None
    told: int = 0  # tokens that were told so far; the device's thread counts


class EmbeddedRolloutEngine:
    streams = True  # it is a protocols.StreamingEngine

    def __init__(
        self, engine: EmbeddedEngine, device: Executor, noise_seed: int = 0, weights: OwnWeights | None = None
    ) -> None:
        self._engine = engine
        self._device = device
        self._noise_seed = noise_seed
        self._weights = weights
        self._served: tuple[dict[str, Any], str] | None = None  # manifest and hash of a version that came from afar
        self._calls: dict[str, _Call] = {}
        self._names: set[str] = set()
        self._numbers = itertools.count()
        self._inbox: deque[Request | str] = deque()  # filled by coroutines, emptied by the device's thread; str = drop
        self._listening: dict[str, _Call] = {}
        self._called = 0  # who waits for the device's thread with something that a turn gives way to
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._running = asyncio.Event()  # cleared by a pause
        self._running.set()
        self._between_turns = asyncio.Event()
        self._between_turns.set()

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

    async def generate(self, request: Request, heard: Heard | None = None) -> Completion:
        """`heard` is told of tokens as they are drawn, on the loop's thread. A cancelled call gives its slot back."""
        if self._failure is not None:
            raise EngineError(f"the embedded engine failed earlier: {self._failure}")
        self._engine.check(request)
        if request.request_id in self._names:
            raise EngineError(f"request {request.request_id} is already running")
        name = f"{request.request_id}#{next(self._numbers)}"
        call = _Call(
            replace(request, request_id=name), request.request_id, asyncio.get_running_loop().create_future(), heard
        )
        self._calls[name] = call
        self._names.add(call.name)
        if heard is not None:
            self._listening[name] = call
        self._send(call.request)
        try:
            completion = await call.answer
        except asyncio.CancelledError:
            if not self._closed:
                self._send(name)
            raise
        finally:
            self._names.discard(call.name)
            self._listening.pop(name, None)
            del self._calls[name]
        return replace(completion, request_id=call.name)

    def _send(self, word: Request | str) -> None:
        self._inbox.append(word)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="engine")

    async def _run(self) -> None:
        """Step while there is work. A failure ends every request with its reason instead of leaving them waiting."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # whoever asked together is batched together
        try:
            while self._inbox or self._engine.busy:
                while not self._running.is_set():  # it may be cleared again before a wake-up comes through
                    await self._running.wait()
                self._between_turns.clear()
                try:
                    finished = await loop.run_in_executor(self._device, self._turn, loop)
                finally:
                    self._between_turns.set()
                for completion in finished:
                    call = self._calls.get(completion.request_id)
                    if call is not None and not call.answer.done():
                        call.answer.set_result(completion)
        except Exception as error:
            log.exception("the embedded engine failed")
            for call in self._calls.values():
                if not call.answer.done():
                    reason = f"the embedded engine failed: {type(error).__name__}: {error}"
                    call.answer.set_exception(error if isinstance(error, EngineError) else EngineError(reason))
            self._failure = error

    def _turn(self, loop: asyncio.AbstractEventLoop) -> list[Completion]:
        """On the device's thread: step until something finishes, the turn is over or weights or a pause are waiting;
        requests join at every step.
        """
        finished: list[Completion] = []
        fault("engine:turn")
        for _ in range(STEPS_PER_TURN):
            dropped: set[str] = set()
            while self._inbox:
                word = self._inbox.popleft()
                if isinstance(word, str):
                    dropped.add(word)
                elif (answer := self._engine.add(word)) is not None:
                    finished.append(answer)
            if dropped:
                self._engine.cancel(dropped)
            if finished or self._called or not self._running.is_set() or not self._engine.busy:
                break
            finished += self._engine.step()
            if self._listening:
                self._tell(loop)
        return finished

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the device's thread: what was drawn since the last time, to whoever listens."""
        for sequence in list(self._engine.scheduler.running.values()):
            call = self._listening.get(sequence.request.request_id)
            drawn = len(sequence.token_ids)
            if call is not None and call.heard is not None and drawn > call.told:
                tokens, values = sequence.token_ids[call.told : drawn], sequence.logprobs[call.told : drawn]
                call.told = drawn
                loop.call_soon_threadsafe(call.heard, tokens, values)

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve the trainer's current weights as `version`, or, in a server, those the manifest names.

        The manifest may carry the noise of this version. Without a path it is about the weights that are there.
        """
        return await self._between_steps(self._load, version, dict(manifest or {}))

    async def _between_steps(self, work: Callable[..., Done], *arguments: Any) -> Done:
        self._called += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._device, work, *arguments)
        finally:
            self._called -= 1

    def _load(self, version: int, manifest: dict[str, Any]) -> str:
        view = self._engine.view
        sigma, seed = float(manifest.get("sigma", 0.0)), int(manifest.get("noise_seed", self._noise_seed))
        if self._weights is not None and ("path" in manifest or "tensors" in manifest):
            manifest = {**manifest, "version": version}
            found = self._replace(self._weights, manifest)
            view.refresh(version, sigma, seed)
            self._served = manifest, found
            return found
        if self._weights is not None and version != view.version:
            raise StorageError(
                f"version {version} has no weights in its manifest, and this server holds version {view.version}"
            )
        view.refresh(version, sigma, seed)
        return self._served[1] if self._served is not None else self._hash()

    def _replace(self, weights: OwnWeights, manifest: Mapping[str, Any]) -> str:
        try:
            return weights.replace(manifest)
        except EngineError as error:
            self._failure = error  # half of a version is none: nothing is drawn any more
            raise

    def _hash(self) -> str:
        view = self._engine.view
        # A few numbers of every tensor the sampler reads: a step moves them all, and hashing the rest costs time.
        with view.active():
            numbers = torch.cat([tensor.detach().flatten()[:32].float() for tensor in view.served_tensors()])
            return hashlib.blake2b(numbers.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    async def load_adapter(self, folder: Path) -> str:
        """Put an adapter on a server's model that no training run published; the version stays what it is."""
        return await self._between_steps(self._load_adapter, folder)

    async def unload_adapter(self) -> str:
        """Back to the version that was published last, or to the model as it was loaded."""
        return await self._between_steps(self._unload_adapter)

    def _load_adapter(self, folder: Path) -> str:
        assert self._weights is not None, "build/ gives a server its own weights"
        if not (folder / "adapter_config.json").is_file():
            raise StorageError(f"lora_path: {str(folder)!r} holds no adapter_config.json; name a folder PEFT wrote")
        return self._replace(self._weights, manifests.describe(folder, self.version, "lora"))

    def _unload_adapter(self) -> str:
        assert self._weights is not None, "build/ gives a server its own weights"
        if self._served is not None and self._served[0].get("kind") == "lora":
            return self._replace(self._weights, self._served[0])
        self._weights.clear_adapter()
        return self._served[1] if self._served is not None else self._hash()

    async def pause(self) -> None:
        await pause_between_turns(self._running, self._between_turns, "the embedded engine", PAUSE_S)

    async def resume(self) -> None:
        self._running.set()

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
        self._closed = True
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._inbox.clear()
        # On the device's thread, behind the turn that may still be running there and gives way after its step.
        await self._between_steps(self._engine.abort)
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.cancel()
