"""vLLM inside the training process, behind the RolloutEngine seam: what `GRPOTrainer(use_vllm=True)` samples with.

The one module that imports vLLM. Its steps run on the device's thread, as training does, so they take turns. New
weights are copied from the trainer's tensors; an adapter is kept until the last request that began with it is done.
Between generations it may sleep, which frees its cache and keeps its weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

from shoal.errors import ConfigError, EngineError, ShoalError
from shoal.observability.manifest import verify
from shoal.rollout.answers import Answer, Reading
from shoal.rollout.norms import is_noisy_norm, normal
from shoal.rollout.pausing import PAUSE_S, pause_between_turns
from shoal.rollout.probe import PROBE_TOKENS, Probes
from shoal.rollout.vllm_drawing import Call, Drawing
from shoal.types import Completion, Request

SLEEP_LEVEL = 1  # weights wait in the host's memory; level 2 would discard them
Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class InProcessSettings:
    reading: Reading
    context_tokens: int
    noise_seed: int = 0
    sleeps: bool = False


class InProcessVllm:
    """`arguments` are those of vllm.LLM; `weights` gives the trainer's tensors under the names they have in files."""

    name = "vLLM"
    path = "vLLM in this process"

    def __init__(
        self, arguments: Mapping[str, Any], device: Executor, weights: Weights, settings: InProcessSettings
    ) -> None:
        self._device = device
        self._weights = weights
        self._settings = settings
        self._llm: Any = device.submit(_make, arguments).result()
        self._drawing = Drawing(self._llm.llm_engine, SamplingParams, settings.reading, self._wake)
        self._calls: dict[str, Call] = {}
        self._names: set[str] = set()  # of requests, as their callers call them
        self._numbers, self._adapter_ids = itertools.count(), itertools.count(1)
        self._pump: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._running, self._between_turns = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._between_turns.set()
        self._loaded: int | None = None  # the version whose weights were given; none at the start
        self._proof = ""
        self._clean: dict[str, torch.Tensor] = {}  # its norms without noise
        self._sigma = 0.0
        self._probes = Probes(self.name)
        self._unproved: str | None = None  # loaded while requests were drawn: asked for its probe after them
        self._asleep = False
        self._naps = 0

    @property
    def version(self) -> int:
        return self._drawing.version

    @property
    def activity(self) -> str:
        return f"{len(self._calls)} asked of vLLM" if self._calls else ""

    # Drawing

    async def generate(self, request: Request) -> Completion:
        """A cancelled call is taken out of vLLM too."""
        settings, asked = self._settings, request.request_id
        if self._failure is not None:
            raise EngineError(f"vLLM failed earlier: {self._failure}")
        settings.reading.check(request)
        limit = min(request.sampling.max_tokens, settings.context_tokens - len(request.prompt_ids))
        if not request.prompt_ids or limit < 1:
            return Completion(asked, [], [], [], "length")
        if asked in self._names:
            raise EngineError(f"request {asked} is already running")
        name = f"{asked}#{next(self._numbers)}"
        call = self._calls[name] = Call(name, request, limit, asyncio.get_running_loop().create_future())
        self._names.add(asked)
        self._send(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._send(name)
            raise
        finally:
            self._names.discard(asked)
            del self._calls[name]

    def _send(self, word: Call | str) -> None:
        self._drawing.inbox.append(word)
        if not self._closed and self._failure is None and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run(), name="vllm")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # whoever asked together is batched together
        try:
            while self._drawing.busy and self._failure is None:
                while not self._running.is_set():  # it may be cleared again before a wake-up comes through
                    await self._running.wait()
                self._between_turns.clear()
                try:
                    finished = await loop.run_in_executor(self._device, self._turn)
                finally:
                    self._between_turns.set()
                for call, answer in finished:
                    self._settle(call, answer)
        except Exception as error:
            self._fail(error, f"vLLM failed: {type(error).__name__}: {error}")

    def _fail(self, error: BaseException, said: str) -> None:
        """Nothing is drawn any more, and whoever waits is told."""
        self._failure = error
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(EngineError(said))

    def _settle(self, call: Call, answer: Answer) -> None:
        if call.answer.done():
            return
        if call.adapter is not None:  # it drew the whole completion, whatever else was loaded meanwhile
            answer = replace(answer, versions=[])
        version = call.version if call.adapter is not None else self.version
        try:
            call.answer.set_result(self._settings.reading.completion(call.request, answer, version, self.name))
        except EngineError as error:
            call.answer.set_exception(error)

    def _turn(self) -> list[tuple[Call, Answer]]:
        """On the device's thread. It sleeps only while it has no request, and a new one wakes it."""
        finished = self._drawing.turn()
        self._prove()
        return finished

    # Weights

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        work = asyncio.get_running_loop().run_in_executor(self._device, self._load, version, dict(manifest or {}))
        try:
            return await work
        except Exception as error:
            if isinstance(error, ShoalError) and not isinstance(error, EngineError):
                raise  # found before a tensor was replaced
            said = f"vLLM failed while it loaded version {version}: {type(error).__name__}: {error}"
            self._fail(error, said)
            raise EngineError(said) from error

    def _load(self, version: int, manifest: dict[str, Any]) -> str:
        self._wake()
        sigma, seed = float(manifest.get("sigma", 0.0)), int(manifest.get("noise_seed", self._settings.noise_seed))
        if "path" in manifest:
            self._proof = verify({**manifest, "version": version})
            self._read(version, manifest)
        elif version != self._loaded:
            # A version that is served already keeps its weights, whatever the trainer did since; only noise changes.
            self._proof = self._fingerprint()
            self._reload(((name, tensor.detach()) for name, tensor in self._weights()))
        if version != self._loaded:
            self._clean = {name: tensor.clone() for name, tensor in self._weights() if is_noisy_norm(name, tensor.ndim)}
        if sigma > 0 or self._sigma > 0:
            self._reload(_noisy(self._clean, sigma, seed, version))
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.set_weight_version(str(version))
        self._drawing.version = self._loaded = version
        self._sigma = sigma
        self._unproved = f"{self._proof}/{sigma}/{seed if sigma else 0}"
        self._prove()
        return self._proof

    def _prove(self) -> None:
        if self._unproved is not None and not self._drawing.calls:  # the probe would answer what is being drawn, too
            key, self._unproved = self._unproved, None
            self._probes.judge(key, self._probe(), self.version)

    def _read(self, version: int, manifest: Mapping[str, Any]) -> None:
        """From the folder: an adapter, or full weights where several workers have to read them."""
        path = str(manifest["path"])
        if manifest.get("kind") != "lora":
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        elif version != self._loaded:
            number = next(self._adapter_ids)  # a run that went back has another version of the same number
            self._drawing.switch(LoRARequest(f"shoal-v{version:06d}.{number}", number, path))

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def _fingerprint(self) -> str:
        """A few numbers of every tensor, as the embedded engine takes them."""
        numbers = torch.cat([tensor.detach().flatten()[:32].float().cpu() for _, tensor in self._weights()])
        return hashlib.blake2b(numbers.numpy().tobytes(), digest_size=16).hexdigest()

    def _probe(self) -> list[float]:
        room = min(PROBE_TOKENS, self._settings.context_tokens - 1)
        ids = [(7919 * i + 13) % self._settings.reading.vocab_size for i in range(room)]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=PROBE_TOKENS, ignore_eos=True)
        prompt = {"prompt_token_ids": ids}
        (output,) = self._llm.generate([prompt], params, use_tqdm=False, lora_request=self._drawing.adapter)
        drawn = output.outputs[0].logprobs[0]
        return sorted((entry.logprob for entry in drawn.values()), reverse=True)[:PROBE_TOKENS]

    # Sleeping

    async def rest(self) -> None:
        """Training is about to use the device. Sleep, unless something is being drawn or sleep was not asked for."""
        if self._settings.sleeps and not self._asleep and not self._calls:
            await asyncio.get_running_loop().run_in_executor(self._device, self._sleep)

    def _sleep(self) -> None:
        if not self._asleep and not self._drawing.calls:
            self._llm.sleep(level=SLEEP_LEVEL)
            self._asleep, self._naps = True, self._naps + 1

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    # The rest of the seam

    async def pause(self) -> None:
        await pause_between_turns(self._running, self._between_turns, "vLLM", PAUSE_S)

    async def resume(self) -> None:
        self._running.set()

    async def health(self) -> dict[str, Any]:
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)  # where its core is a process
        dead = "its process ended" if getattr(resources, "engine_dead", False) else None
        reason = dead if self._failure is None else str(self._failure)
        said = {"version": self.version, "running": len(self._calls), "naps": self._naps}
        return {"ok": reason is None, **said, **({} if reason is None else {"reason": reason})}

    async def close(self) -> None:
        self._closed = True
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.cancel()
        await asyncio.get_running_loop().run_in_executor(self._device, self._llm.llm_engine.engine_core.shutdown)


def _make(arguments: Mapping[str, Any]) -> Any:
    try:
        return LLM(**arguments)
    except (TypeError, ValueError) as error:  # pydantic's too
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"vllm_args (infer.engine_args): vLLM refuses its arguments: {said}") from error


def _noisy(
    norms: Mapping[str, torch.Tensor], sigma: float, seed: int, version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """With sigma 0 they are as they were."""
    for name, tensor in norms.items():
        noise = torch.from_numpy(normal(seed, version, name, tuple(tensor.shape))).to(tensor.device, torch.float32)
        yield name, (tensor.float() + sigma * noise).to(tensor.dtype)
