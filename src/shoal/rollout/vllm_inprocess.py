"""vLLM inside the training process, behind the RolloutEngine seam: what `GRPOTrainer(use_vllm=True)` samples with.

The one module that imports vLLM. Its steps run on the device's thread, as training does, so they take turns. New
weights are copied from the trainer's tensors; between generations it may sleep, which frees its cache and keeps its
weights.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

from shoal.errors import ConfigError, EngineError
from shoal.observability.manifest import verify
from shoal.rollout.answers import Answer, Reading
from shoal.rollout.norms import is_noisy_norm, normal
from shoal.rollout.probe import PROBE_TOKENS, Probes
from shoal.rollout.vllm import sampling_parameters
from shoal.types import Completion, Request

STEPS_PER_TURN = 16
SLEEP_LEVEL = 1  # weights wait in the host's memory; level 2 would discard them
Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class InProcessSettings:
    reading: Reading
    context_tokens: int
    noise_seed: int = 0
    sleeps: bool = False


@dataclass
class _Call:
    request: Request
    limit: int
    answer: asyncio.Future[Completion]


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
        self._calls: dict[str, _Call] = {}
        self._inbox: deque[_Call] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._version = 0
        self._loaded: int | None = None  # the version whose weights were given; none at the start
        self._proof = ""
        self._clean: dict[str, torch.Tensor] = {}  # its norms without noise
        self._adapter: Any = None  # a LoRARequest
        self._sigma = 0.0
        self._probes = Probes(self.name)
        self._asleep = False
        self._naps = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def activity(self) -> str:
        return f"{len(self._calls)} asked of vLLM" if self._calls else ""

    # Drawing

    async def generate(self, request: Request) -> Completion:
        settings, name = self._settings, request.request_id
        settings.reading.check(request)
        limit = min(request.sampling.max_tokens, settings.context_tokens - len(request.prompt_ids))
        if not request.prompt_ids or limit < 1:
            return Completion(name, [], [], [], "length")
        if name in self._calls:
            raise EngineError(f"request {name} is already running")
        call = self._calls[name] = _Call(request, limit, asyncio.get_running_loop().create_future())
        self._inbox.append(call)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="vllm")
        try:
            return await call.answer
        finally:
            self._calls.pop(name, None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # whoever asked together is batched together
        try:
            while self._inbox or self._llm.llm_engine.has_unfinished_requests():
                await self._running.wait()
                for name, answer in await loop.run_in_executor(self._device, self._turn):
                    self._settle(name, answer)
        except Exception as error:
            for call in self._calls.values():
                if not call.answer.done():
                    call.answer.set_exception(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))

    def _settle(self, name: str, answer: Answer) -> None:
        call = self._calls.get(name)
        if call is not None and not call.answer.done():
            try:
                completion = self._settings.reading.completion(call.request, answer, self._version, self.name)
                call.answer.set_result(completion)
            except EngineError as error:
                call.answer.set_exception(error)

    def _turn(self) -> list[tuple[str, Answer]]:
        """On the device's thread: step until something finishes or the turn is over."""
        self._wake()
        engine = self._llm.llm_engine
        for _ in range(STEPS_PER_TURN):
            while self._inbox:
                call = self._inbox.popleft()
                ends = self._settings.reading.ends(call.request)
                params = SamplingParams(**sampling_parameters(call.request, call.limit, ends))
                prompt = {"prompt_token_ids": list(call.request.prompt_ids)}
                engine.add_request(call.request.request_id, prompt, params, lora_request=self._adapter)
            finished = [output for output in engine.step() if output.finished]
            if finished or not engine.has_unfinished_requests():
                return [(output.request_id, _answer(output.outputs[0])) for output in finished]
        return []

    # Weights

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._device, self._load, version, dict(manifest or {}))

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
        self._version = self._loaded = version
        self._sigma = sigma
        if not self._llm.llm_engine.has_unfinished_requests():  # the probe would answer those too
            self._probes.judge(f"{self._proof}/{sigma}/{seed if sigma else 0}", self._probe(), version)
        return self._proof

    def _read(self, version: int, manifest: Mapping[str, Any]) -> None:
        """From the folder: an adapter, or full weights where several workers have to read them."""
        path, before = str(manifest["path"]), self._adapter
        if manifest.get("kind") != "lora":
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        elif version != self._loaded:
            self._adapter = LoRARequest(f"shoal-v{version:06d}", version + 1, path)
            if before is not None:
                self._llm.llm_engine.remove_lora(before.lora_int_id)

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
        (output,) = self._llm.generate([prompt], params, use_tqdm=False, lora_request=self._adapter)
        drawn = output.outputs[0].logprobs[0]
        return sorted((entry.logprob for entry in drawn.values()), reverse=True)[:PROBE_TOKENS]

    # Sleeping

    async def rest(self) -> None:
        """Training is about to use the device. Sleep, unless something is being drawn or sleep was not asked for."""
        if self._settings.sleeps and not self._asleep and not self._calls:
            await asyncio.get_running_loop().run_in_executor(self._device, self._sleep)

    def _sleep(self) -> None:
        if not self._asleep and not self._llm.llm_engine.has_unfinished_requests():
            self._llm.sleep(level=SLEEP_LEVEL)
            self._asleep, self._naps = True, self._naps + 1

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    # The rest of the seam

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def health(self) -> dict[str, Any]:
        return {"ok": True, "version": self._version, "running": len(self._calls), "naps": self._naps}

    async def close(self) -> None:
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


def _answer(output: Any) -> Answer:
    ids = list(output.token_ids)
    logprobs: list[float] = [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=True)]
    spans = [(span["start"], span["end"], str(span["version"])) for span in map(_as_dict, output.weight_versions or ())]
    return Answer(ids, logprobs, str(output.finish_reason), spans)


def _as_dict(span: Any) -> Mapping[str, Any]:
    return span if isinstance(span, Mapping) else {name: getattr(span, name) for name in ("start", "end", "version")}


def _noisy(
    norms: Mapping[str, torch.Tensor], sigma: float, seed: int, version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """With sigma 0 they are as they were."""
    for name, tensor in norms.items():
        noise = torch.from_numpy(normal(seed, version, name, tuple(tensor.shape))).to(tensor.device, torch.float32)
        yield name, (tensor.float() + sigma * noise).to(tensor.dtype)
