"""vLLM inside the training process: the engine of `GRPOTrainer(use_vllm=True)`.

The only module that imports vLLM. vLLM steps run on the device thread, as training does. Full weights are copied from
the trainer's tensors. An adapter stays loaded until the last request that started with it is done. Between generations
vLLM may sleep, which frees its KV cache and keeps its weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from shoal.core.errors import ConfigError, EngineError, ShoalError
from shoal.core.types import Completion, Request
from shoal.rollout.embedded import PAUSE_S, pause_between_turns
from shoal.rollout.remote.norm_noise import is_noisy_norm, normal
from shoal.rollout.remote.server_info import PROBE_TOKENS, CompletionReader, ParsedAnswer, Probes
from shoal.rollout.remote.vllm import sampling_parameters
from shoal.runs.weight_files import verify

STEPS_PER_TURN = 16


@dataclass
class PendingCall:
    """A running request. Its unique name keeps a repeated request apart from the earlier one."""

    name: str
    request: Request
    limit: int
    answer: asyncio.Future[Completion]
    adapter: Any = None  # its LoRARequest, if any
    version: int = 0  # at its start


class DrawLoop:
    """The requests in vLLM, on the device thread; only the inbox is shared. `engine` is an LLMEngine, `parameters`
    creates its SamplingParams, and `wake` is called before each request."""

    def __init__(
        self, engine: Any, parameters: Callable[..., Any], reading: CompletionReader, wake: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._reading = reading
        self._wake = wake
        self.inbox: deque[PendingCall | str] = deque()  # filled by coroutines; str = cancel
        self.calls: dict[str, PendingCall] = {}  # requests in vLLM
        self.adapter: Any = None  # a LoRARequest
        self.version = 0
        self._earlier: list[Any] = []  # adapters that running requests may use

    @property
    def busy(self) -> bool:
        return bool(self.inbox or self.calls)

    def turn(self) -> list[tuple[PendingCall, ParsedAnswer]]:
        """Step until a request finishes or the turn is over; requests join and leave at every step."""
        for _ in range(STEPS_PER_TURN):
            while self.inbox:
                self._take(self.inbox.popleft())
            outputs = self._engine.step() if self.calls else []
            finished = [(self.calls.pop(output.request_id), output) for output in outputs if output.finished]
            if finished or not self.calls:
                self._drop_unused()
                return [(call, _answer(output.outputs[0])) for call, output in finished]
        return []

    def _take(self, item: PendingCall | str) -> None:
        if isinstance(item, str):
            if self.calls.pop(item, None) is not None:
                self._engine.abort_request([item])
            return
        self._wake()  # only for a new request: a cancellation must not wake vLLM while the device trains
        values = sampling_parameters(item.request, item.limit, self._reading.ends(item.request))
        prompt = {"prompt_token_ids": list(item.request.prompt_ids)}
        item.adapter, item.version = self.adapter, self.version
        self._engine.add_request(item.name, prompt, self._parameters(**values), lora_request=item.adapter)
        self.calls[item.name] = item

    def switch(self, adapter: Any) -> None:
        """Use this adapter for new requests. Running requests keep theirs, which stays loaded until they finish."""
        if self.adapter is not None:
            self._earlier.append(self.adapter)
        self.adapter = adapter
        self._drop_unused()

    def _drop_unused(self) -> None:
        used = {call.adapter.lora_int_id for call in self.calls.values() if call.adapter is not None}
        for adapter in [adapter for adapter in self._earlier if adapter.lora_int_id not in used]:
            self._engine.remove_lora(adapter.lora_int_id)
            self._earlier.remove(adapter)


def _answer(output: Any) -> ParsedAnswer:
    ids = list(output.token_ids)
    logprobs: list[float] = [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=True)]
    spans = [(span["start"], span["end"], str(span["version"])) for span in map(_as_dict, output.weight_versions or ())]
    return ParsedAnswer(ids, logprobs, str(output.finish_reason), spans)


def _as_dict(span: Any) -> Mapping[str, Any]:
    return span if isinstance(span, Mapping) else {name: getattr(span, name) for name in ("start", "end", "version")}


SLEEP_LEVEL = 1  # offloads the weights to host memory; level 2 would discard them
Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class InProcessSettings:
    reading: CompletionReader
    context_tokens: int
    noise_seed: int = 0
    sleeps: bool = False
    adapter_name: str = "default"  # followed by the version


class InProcessVllm:
    """`arguments` are those of vllm.LLM; `weights` yields the trainer's tensors with their names in files."""

    name = "vLLM"
    path = "vLLM in this process"
    opening = ""

    def __init__(
        self, arguments: Mapping[str, Any], device: Executor, weights: Weights, settings: InProcessSettings
    ) -> None:
        self._device = device
        self._weights = weights
        self._settings = settings
        self.applied_sigma = 0.0  # of the noise on the norms after rounding
        self._llm: Any = device.submit(_make, arguments).result()
        self._loop = DrawLoop(self._llm.llm_engine, SamplingParams, settings.reading, self._wake)
        self._calls: dict[str, PendingCall] = {}
        self._names: set[str] = set()  # request ids of the callers
        self._numbers, self._adapter_ids = itertools.count(), itertools.count(1)
        self._pump: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._running, self._between_turns = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._between_turns.set()
        self._loaded: int | None = None  # the last version whose weights were loaded
        self._proof = ""
        self._clean: dict[str, torch.Tensor] = {}  # norms without noise
        self._sigma = 0.0
        self._probes = Probes(self.name)
        self._unverified: str | None = None  # weights loaded while requests ran: probed afterwards
        self._asleep = False
        self._naps = 0

    @property
    def version(self) -> int:
        return self._loop.version

    @property
    def activity(self) -> str:
        return f"{len(self._calls)} requests at vLLM" if self._calls else ""

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    # Sampling

    async def generate(self, request: Request) -> Completion:
        """Cancelling the call aborts the request in vLLM too."""
        settings, request_id = self._settings, request.request_id
        if self._failure is not None:
            raise EngineError(f"vLLM failed earlier: {self._failure}")
        settings.reading.check(request)
        limit = min(request.sampling.max_tokens, settings.context_tokens - len(request.prompt_ids))
        if not request.prompt_ids or limit < 1:
            return Completion(request_id, [], [], [], "length")
        if request_id in self._names:
            raise EngineError(f"request {request_id} is already running")
        name = f"{request_id}#{next(self._numbers)}"
        call = self._calls[name] = PendingCall(name, request, limit, asyncio.get_running_loop().create_future())
        self._names.add(request_id)
        self._send(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._send(name)
            raise
        finally:
            self._names.discard(request_id)
            del self._calls[name]

    def _send(self, item: PendingCall | str) -> None:
        self._loop.inbox.append(item)
        if not self._closed and self._failure is None and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run(), name="vllm")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # concurrent requests start in one batch
        try:
            while self._loop.busy and self._failure is None:
                while not self._running.is_set():  # it may be cleared again before this task wakes up
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

    def _fail(self, error: BaseException, message: str) -> None:
        """Stop sampling, and raise the error in every waiting call."""
        self._failure = error
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(EngineError(message))

    def _settle(self, call: PendingCall, answer: ParsedAnswer) -> None:
        if call.answer.done():
            return
        if call.adapter is not None:  # it sampled the whole completion, even if another version was loaded meanwhile
            answer = replace(answer, versions=[])
        version = call.version if call.adapter is not None else self.version
        try:
            call.answer.set_result(self._settings.reading.completion(call.request, answer, version, self.name))
        except EngineError as error:
            call.answer.set_exception(error)

    def _turn(self) -> list[tuple[PendingCall, ParsedAnswer]]:
        """On the device thread. vLLM sleeps only without requests, and a new one wakes it."""
        finished = self._loop.turn()
        self._verify()
        return finished

    # Weights

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        work = asyncio.get_running_loop().run_in_executor(self._device, self._load, version, dict(manifest or {}))
        try:
            return await work
        except Exception as error:
            if isinstance(error, ShoalError) and not isinstance(error, EngineError):
                raise  # raised before any tensor was replaced
            message = f"vLLM failed while it loaded version {version}: {type(error).__name__}: {error}"
            self._fail(error, message)
            raise EngineError(message) from error

    def _load(self, version: int, manifest: dict[str, Any]) -> str:
        self._wake()
        sigma, seed = float(manifest.get("sigma", 0.0)), int(manifest.get("noise_seed", self._settings.noise_seed))
        if "path" in manifest:
            self._proof = verify({**manifest, "version": version})
            self._read(version, manifest)
        elif version != self._loaded:
            # A version that is served keeps its weights, even if the trainer changed meanwhile; only the noise changes.
            self._proof = self._fingerprint()
            self._reload(((name, tensor.detach()) for name, tensor in self._weights()))
        if version != self._loaded:
            self._clean = {name: tensor.clone() for name, tensor in self._weights() if is_noisy_norm(name, tensor.ndim)}
        if sigma > 0 or self._sigma > 0:
            self._reload(_noisy(self._clean, sigma, seed, version))
            self.applied_sigma = _applied_sigma(self._clean, _noisy(self._clean, sigma, seed, version))
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.set_weight_version(str(version))
        self._loop.version = self._loaded = version
        self._sigma = sigma
        self._unverified = f"{self._proof}/{sigma}/{seed if sigma else 0}"
        self._verify()
        return self._proof

    def _verify(self) -> None:
        if self._unverified is not None and not self._loop.calls:  # the probe would also step running requests
            key, self._unverified = self._unverified, None
            self._probes.judge(key, self._probe(), self.version)

    def _read(self, version: int, manifest: Mapping[str, Any]) -> None:
        """Load a folder: an adapter, or full weights for several workers."""
        path = str(manifest["path"])
        if manifest.get("kind") != "lora":
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        elif version != self._loaded:
            number = next(self._adapter_ids)  # a resumed run may publish the same version number again
            name = f"{self._settings.adapter_name}-v{version:06d}.{number}"
            self._loop.switch(LoRARequest(name, number, path))

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def _fingerprint(self) -> str:
        """The first values of every tensor, as in the embedded engine."""
        numbers = torch.cat([tensor.detach().flatten()[:32].float().cpu() for _, tensor in self._weights()])
        return hashlib.blake2b(numbers.numpy().tobytes(), digest_size=16).hexdigest()

    def _probe(self) -> list[float]:
        room = min(PROBE_TOKENS, self._settings.context_tokens - 1)
        ids = [(7919 * i + 13) % self._settings.reading.vocab_size for i in range(room)]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=PROBE_TOKENS, ignore_eos=True)
        prompt = {"prompt_token_ids": ids}
        (output,) = self._llm.generate([prompt], params, use_tqdm=False, lora_request=self._loop.adapter)
        first = output.outputs[0].logprobs[0]
        return sorted((entry.logprob for entry in first.values()), reverse=True)[:PROBE_TOKENS]

    # Sleeping

    async def rest(self) -> None:
        """Called before training uses the device: sleep if enabled and no request is running."""
        if self._settings.sleeps and not self._asleep and not self._calls:
            await asyncio.get_running_loop().run_in_executor(self._device, self._sleep)

    def _sleep(self) -> None:
        if not self._asleep and not self._loop.calls:
            self._llm.sleep(level=SLEEP_LEVEL)
            self._asleep, self._naps = True, self._naps + 1

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    # The rest of the protocol

    async def pause(self) -> None:
        await pause_between_turns(self._running, self._between_turns, "vLLM", PAUSE_S)

    async def resume(self) -> None:
        self._running.set()

    async def health(self) -> dict[str, Any]:
        resources = getattr(self._llm.llm_engine.engine_core, "resources", None)  # if its core is a process
        dead = "its process ended" if getattr(resources, "engine_dead", False) else None
        reason = dead if self._failure is None else str(self._failure)
        about = {"version": self.version, "running": len(self._calls), "naps": self._naps}
        return {"ok": reason is None, **about, **({} if reason is None else {"reason": reason})}

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
    except (TypeError, ValueError) as error:  # includes pydantic errors
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"vllm_args (infer.engine_args): vLLM rejected its arguments: {reason}") from error


def _applied_sigma(clean: Mapping[str, torch.Tensor], noisy: Iterator[tuple[str, torch.Tensor]]) -> float:
    apart = [(tensor.double() - clean[name].double()).flatten() for name, tensor in noisy]
    return float(torch.cat(apart).square().mean().sqrt())


def _noisy(
    norms: Mapping[str, torch.Tensor], sigma: float, seed: int, version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The norms with noise; sigma 0 gives them unchanged."""
    for name, tensor in norms.items():
        noise = torch.from_numpy(normal(seed, version, name, tuple(tensor.shape))).to(tensor.device, torch.float32)
        yield name, (tensor.float() + sigma * noise).to(tensor.dtype)
