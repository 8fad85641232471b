"""The embedded engine as a RolloutEngine: requests come from coroutines, engine steps run on the device thread.

The trainer uses the same thread, so on one device sampling and training alternate without a lock. In a server the
engine has its own weights, which `load` replaces.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.core.errors import EngineError, RequestError, StorageError
from shoal.core.protocols import TokenListener
from shoal.core.types import Completion, Request, ScoredTokens, ScoreRequest
from shoal.engine.engine import EmbeddedEngine
from shoal.engine.scoring import score, take_batch
from shoal.models.served_weights import WeightLoader
from shoal.runs import weight_files as manifests
from shoal.runs.files import fault

PAUSE_S = 600.0  # a turn may wait for a training step


async def pause_between_turns(running: asyncio.Event, between: asyncio.Event, name: str, limit_s: float) -> None:
    """Pause an engine in this process after its current turn; requests are kept. On failure nothing is paused."""
    running.clear()
    try:
        async with asyncio.timeout(limit_s):
            await between.wait()
    except TimeoutError as error:
        running.set()
        raise EngineError(f"{name} was not paused: its turn on the device did not end in {limit_s:g} s") from error


log = logging.getLogger(__name__)
Done = TypeVar("Done")
# Engine steps before the device thread is released to other work.
STEPS_PER_TURN = 16


@dataclass
class _Call:
    """A running request. Its unique name keeps a repeated request apart from the earlier one."""

    request: Request
    name: str  # request id of the caller
    answer: asyncio.Future[Completion]
    on_tokens: TokenListener | None = None
    reported: int = 0  # tokens passed to `on_tokens` so far; used by the device thread


class EmbeddedRolloutEngine:
    streams = True  # it is a protocols.StreamingEngine

    def __init__(
        self, engine: EmbeddedEngine, device: Executor, noise_seed: int = 0, weights: WeightLoader | None = None
    ) -> None:
        self._engine = engine
        self._device = device
        self._noise_seed = noise_seed
        self._weights = weights
        self._served: tuple[dict[str, Any], str] | None = None  # manifest and hash of a version loaded from a manifest
        self._calls: dict[str, _Call] = {}
        self._names: set[str] = set()
        self._numbers = itertools.count()
        self._inbox: deque[Request | str] = deque()  # from coroutines to the device thread; str = cancel
        self._to_score: deque[tuple[ScoreRequest, asyncio.Future[ScoredTokens]]] = deque()
        self._listening: dict[str, _Call] = {}
        self._called = 0  # pending device work that ends a turn early
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._running = asyncio.Event()  # cleared by a pause
        self._running.set()
        self._between_turns = asyncio.Event()
        self._between_turns.set()

    @property
    def path(self) -> str:
        """How tokens are decoded, for the console."""
        return self._engine.path

    @property
    def activity(self) -> str:
        """Current activity; read by the console thread, so it uses only counters."""
        scheduler = self._engine.scheduler
        waiting, running = len(scheduler.waiting) + len(self._inbox), len(scheduler.running)
        return f"{waiting} to prefill, {running} decoding" if waiting or running else ""

    @property
    def opening(self) -> str:
        return ""

    @property
    def version(self) -> int:
        return self._engine.view.version

    @property
    def applied_sigma(self) -> float:
        return self._engine.view.applied_sigma

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    async def generate(self, request: Request, on_tokens: TokenListener | None = None) -> Completion:
        """`on_tokens` is called with new tokens on the event loop's thread. Cancelling the call frees its slot."""
        if self._failure is not None:
            raise EngineError(f"the embedded engine failed earlier: {self._failure}")
        self._engine.check(request)
        if request.request_id in self._names:
            raise EngineError(f"request {request.request_id} is already running")
        name = f"{request.request_id}#{next(self._numbers)}"
        call = _Call(
            replace(request, request_id=name), request.request_id, asyncio.get_running_loop().create_future(), on_tokens
        )
        self._calls[name] = call
        self._names.add(call.name)
        if on_tokens is not None:
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

    async def score(self, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        """One batch per turn, so that texts to score and running requests share the device."""
        if self._failure is not None:
            raise EngineError(f"the embedded engine failed earlier: {self._failure}")
        for request in requests:
            self._engine.check_ids("score", request.token_ids)
        loop = asyncio.get_running_loop()
        answers: dict[int, asyncio.Future[ScoredTokens]] = {
            i: loop.create_future() for i, request in enumerate(requests) if len(request.token_ids) > request.start
        }
        self._to_score += [(requests[i], answer) for i, answer in answers.items()]
        self._start()
        try:
            found = dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))
        finally:
            for answer in answers.values():  # of a call that was cancelled, or of which one part failed
                answer.cancel()
        return [found.get(i) or ScoredTokens([], []) for i in range(len(requests))]

    def _send(self, item: Request | str) -> None:
        self._inbox.append(item)
        self._start()

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="engine")

    async def _run(self) -> None:
        """Run turns while there is work. A failure is raised in every waiting request."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # concurrent requests start in one batch
        try:
            while self._inbox or self._to_score or self._engine.busy:
                while not self._running.is_set():  # it may be cleared again before this task wakes up
                    await self._running.wait()
                self._between_turns.clear()
                try:
                    await self._score_batch()
                    finished = await loop.run_in_executor(self._device, self._turn, loop)
                finally:
                    self._between_turns.set()
                for completion in finished:
                    call = self._calls.get(completion.request_id)
                    if call is not None and not call.answer.done():
                        call.answer.set_result(completion)
        except Exception as error:
            log.exception("the embedded engine failed")
            reason = f"the embedded engine failed: {type(error).__name__}: {error}"
            for answer in (*(call.answer for call in self._calls.values()), *(answer for _, answer in self._to_score)):
                if not answer.done():
                    answer.set_exception(error if isinstance(error, EngineError) else EngineError(reason))
            self._to_score.clear()
            self._failure = error

    async def _score_batch(self) -> None:
        """Score waiting texts, at most as many tokens as a prefill has."""
        while self._to_score and self._to_score[0][1].done():  # cancelled
            self._to_score.popleft()
        if not self._to_score:
            return
        lengths = [len(request.token_ids) for request, _ in self._to_score]
        batch = [self._to_score.popleft() for _ in range(take_batch(lengths, self._engine.settings.prefill_tokens))]
        requests = [request for request, _ in batch]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._device, score, self._engine.view, requests)
        except torch.OutOfMemoryError:
            problem = RequestError(f"not enough device memory to score {sum(lengths[: len(batch)])} tokens at once")
            found = [problem] * len(batch)
        except BaseException:
            self._to_score.extendleft(reversed(batch))  # they fail with the engine
            raise
        for (_, answer), scored in zip(batch, found, strict=True):
            if answer.done():
                continue
            answer.set_exception(scored) if isinstance(scored, Exception) else answer.set_result(scored)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> list[Completion]:
        """On the device thread: step until a request finishes, the turn is over, or other work or a pause is pending.
        Requests join at every step."""
        finished: list[Completion] = []
        fault("engine:turn")
        for _ in range(STEPS_PER_TURN):
            dropped: set[str] = set()
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, str):
                    dropped.add(item)
                elif (answer := self._engine.add(item)) is not None:
                    finished.append(answer)
            if dropped:
                self._engine.cancel(dropped)
            if finished or self._called or not self._running.is_set() or not self._engine.busy:
                break
            finished += self._engine.step()
            if self._listening:
                self._report(loop)
        return finished

    def _report(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the device thread: pass new tokens to streaming calls."""
        for sequence in list(self._engine.scheduler.running.values()):
            call = self._listening.get(sequence.request.request_id)
            count = len(sequence.token_ids)
            if call is not None and call.on_tokens is not None and count > call.reported:
                tokens, values = sequence.token_ids[call.reported : count], sequence.logprobs[call.reported : count]
                call.reported = count
                loop.call_soon_threadsafe(call.on_tokens, tokens, values)

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve the trainer's current weights as `version`, or, in a server, the weights of the manifest.

        The manifest may contain the noise of this version. Without weights only the noise changes.
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

    def _replace(self, weights: WeightLoader, manifest: Mapping[str, Any]) -> str:
        try:
            return weights.replace(manifest)
        except EngineError as error:
            self._failure = error  # the weights may be half replaced, so nothing may be sampled
            raise

    def _hash(self) -> str:
        view = self._engine.view
        # The first 32 values of each tensor: a step changes all tensors, and hashing everything is slow.
        with view.active():
            numbers = torch.cat([tensor.detach().flatten()[:32].float() for tensor in view.served_tensors()])
            return hashlib.blake2b(numbers.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    async def load_adapter(self, folder: Path) -> str:
        """Load an adapter that no training run published; the version does not change."""
        return await self._between_steps(self._load_adapter, folder)

    async def unload_adapter(self) -> str:
        """Return to the last published version, or to the base model."""
        return await self._between_steps(self._unload_adapter)

    def _load_adapter(self, folder: Path) -> str:
        assert self._weights is not None, "a server has its own weights"
        if not (folder / "adapter_config.json").is_file():
            raise StorageError(f"lora_path: {str(folder)!r} holds no adapter_config.json; name a folder PEFT wrote")
        return self._replace(self._weights, manifests.describe(folder, self.version, "lora"))

    def _unload_adapter(self) -> str:
        assert self._weights is not None, "a server has its own weights"
        if self._served is not None and self._served[0].get("kind") == "lora":
            return self._replace(self._weights, self._served[0])
        self._weights.clear_adapter()
        return self._served[1] if self._served is not None else self._hash()

    async def rest(self) -> None: ...

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
        # Runs after a turn in progress, which ends after its current step.
        await self._between_steps(self._engine.abort)
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.cancel()
        for _, answer in self._to_score:
            answer.cancel()
