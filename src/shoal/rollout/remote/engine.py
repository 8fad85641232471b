"""The rollout engine on vLLM and SGLang: weight versions, adapters, verification, pauses and restarts of the server.

The subclasses in vllm.py and sglang.py implement the requests (server_api.py). Every request contains all sampling
parameters, so no server default applies; text is decoded here from the returned ids. Free of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DeadlineError, EngineError, ShoalError
from shoal.core.types import Completion, Request
from shoal.rollout.remote.client import ConnectionLost, RequestRefused, ResponseTimeout, Waiting
from shoal.rollout.remote.norm_noise import applied_sigma, noisy_norms
from shoal.rollout.remote.process import ServerProcess
from shoal.rollout.remote.server_api import HEALTH_S, ServerApi
from shoal.rollout.remote.server_info import (
    PROBE_TOKENS,
    UNREADABLE,
    ParsedAnswer,
    Probes,
    RemoteSettings,
    check_facts,
    content_of,
    model_folder,
    startup_manifest,
)
from shoal.runs.weight_files import verify

RESTARTED = "it was restarted"
GENERATE = "a generate request"


@dataclass
class _ServedVersion:
    """A version that the server serves, and the manifest of its weights."""

    version: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)
    proof: str = ""
    adapter: str | None = None
    noise: tuple[float, int] = (0.0, 0)


class RemoteEngine(ServerApi):
    def __init__(
        self, settings: RemoteSettings, process: ServerProcess | None = None, waiting: Waiting = lambda _: None
    ) -> None:
        super().__init__(settings, waiting, process)
        self._served = _ServedVersion()
        self._probes = Probes(self.name)
        self._loading: int | None = None  # the version being loaded
        self._unverified: str | None = None  # weights loaded during a pause: probed after `resume`
        self._in_flight: Counter[str | None] = Counter()  # requests by adapter
        self._running = asyncio.Event()
        self._running.set()
        self._connected = False
        self.applied_sigma = 0.0  # of the noise on the norms after rounding
        self._lock = asyncio.Lock()  # one load, restart or connection at a time
        self.path = self.link.name

    @property
    def version(self) -> int:
        return self._served.version

    @property
    def activity(self) -> str:
        running = sum(self._in_flight.values())
        loads = f"{self.name} loads version {self._loading}" if self._loading is not None else ""
        return loads or (f"{running} requests at {self.name}" if running else "")

    # Connecting

    async def connect(self) -> None:
        """Start the server if it is Shoal's own, wait for it, and compare what it serves with what the run needs.
        Can be called again. The caller must also call `close`."""
        async with self._lock:
            if not self._connected:
                if self._process is not None and self._process.pid is None:
                    self._process.start()
                await self._identify_server()
                facts = await self.resend("the request for its configuration", self.facts)
                check_facts(self.name, facts, self.settings)
                self._connected = True

    async def _identify_server(self) -> None:
        try:
            await self.wait_until_healthy(self.settings.start_s, "infer.start_deadline_s")
        except DeadlineError as error:
            if self._process is not None:
                raise
            raise ConfigError(str(error)) from error  # no server was ever there

    async def describe(self) -> dict[str, Any]:
        """Empty: `connect` compares the server with the run."""
        return {}

    async def rest(self) -> None: ...

    # Sampling

    async def generate(self, request: Request) -> Completion:
        self.reading.check(request)
        sampling = request.sampling
        limit = min(sampling.max_tokens, self.settings.context_tokens - len(request.prompt_ids))
        if not request.prompt_ids or limit < 1:
            return Completion(request.request_id, [], [], [], "length")
        await self.connect()
        await self._running.wait()
        answer, served = await self.resend(GENERATE, lambda: self._complete(request, limit), self._recover)
        if served.adapter is not None:  # it sampled the whole completion, even if another version was loaded meanwhile
            answer = replace(answer, versions=[])
        return self.reading.completion(request, answer, served.version, self.name)

    async def _complete(self, request: Request, limit: int) -> tuple[ParsedAnswer, _ServedVersion]:
        """Also raises ConnectionLost if the server was restarted unnoticed and therefore lacks the weights."""
        served = self._served
        try:
            async with self._counted(served.adapter):
                answer = await self.complete(request, limit, served.adapter)
        except RequestRefused:
            if served.adapter is None or await self.served_version(served.adapter) == served.adapter:
                raise
            raise ConnectionLost(RESTARTED) from None
        loaded = served.adapter is None and served.manifest and not served.manifest.get("own")
        if loaded and not all(name.isdigit() for _, _, name in answer.versions):
            raise ConnectionLost(RESTARTED)  # names of versions that Shoal loaded are numbers
        return answer, served

    @asynccontextmanager
    async def _counted(self, adapter: str | None):
        """An adapter stays loaded while requests use it."""
        self._in_flight[adapter] += 1
        try:
            yield
        finally:
            self._in_flight[adapter] -= 1
            if not self._in_flight[adapter]:
                del self._in_flight[adapter]
                await self._drop_unused(adapter)

    async def _recover(self, error: ConnectionLost) -> None:
        """Wait until the server is back and load the current version again. Shoal does not restart its own server."""
        async with self._lock:
            await self.wait_until_back(error)
            served = self._served
            with contextlib.suppress(ConnectionLost):  # lost again: the next attempt to send reports it
                loaded = await self.served_version(served.adapter) if served.manifest else ""
                if served.manifest and loaded != (served.adapter or str(served.version)):
                    await self._apply(served, served.manifest, served.noise, again=True)
                    if self._running.is_set():
                        await self._verify()

    # Weights

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve the weights of the manifest as `version`. Without weights, only the noise changes."""
        await self.connect()
        wanted, served = dict(manifest or {}), self._served
        noise = (float(wanted.get("sigma", 0.0)), int(wanted.get("noise_seed", self.settings.noise_seed)))
        if "path" not in wanted and "tensors" not in wanted:
            if version != served.version:
                raise EngineError(
                    f"version {version} has no weights in its manifest, and {self.name} serves version {served.version}"
                )
            wanted = served.manifest or await asyncio.to_thread(startup_manifest, self.settings.model)
        proof = await asyncio.to_thread(verify, {**wanted, "version": version}) if "path" in wanted else ""
        attempts = 0

        async def put() -> str:
            nonlocal attempts
            attempts += 1
            coming = _ServedVersion(version, wanted, proof)
            async with self._lock, self._held():
                await self._apply(coming, wanted, noise, again=attempts > 1)
            return coming.proof

        self._loading = version
        try:
            return await self.resend(f"the load of version {version}", put)
        finally:
            self._loading = None

    @asynccontextmanager
    async def _held(self):
        """Pause sampling during an update. If the caller paused the engine, it stays paused and the probe waits."""
        if not self._running.is_set():
            yield
            return
        await self.hold()
        try:
            yield
        except ResponseTimeout:  # it would not respond to `release` either
            raise
        except BaseException:
            with contextlib.suppress(ConnectionLost, ShoalError, TimeoutError):
                async with asyncio.timeout(HEALTH_S):  # the caller already gave up waiting
                    await self.release()
            raise
        await self.release()
        await self._verify()

    async def _apply(
        self, coming: _ServedVersion, manifest: Mapping[str, Any], noise: tuple[float, int], *, again: bool = False
    ) -> None:
        """`again`: the server may have lost the weights."""
        before = self._served
        if manifest.get("kind") == "lora":
            await self._switch_adapter(coming, str(manifest["path"]), again)
        elif "tensors" in manifest:
            await self.receive_weights(manifest, coming.version)
            coming.proof = str(manifest.get("hash", ""))
        elif again or (coming.proof != before.proof and (not manifest.get("own") or before.manifest)):
            await self.read_weights(str(manifest["path"]), coming.version)
        coming.noise = noise
        if noise[0] > 0 or before.noise[0] > 0:
            await self._apply_noise(coming)
        self._served, self._unverified = coming, f"{content_of(manifest)}/{noise}"
        await self._drop_unused(before.adapter)

    async def _switch_adapter(self, coming: _ServedVersion, path: str, again: bool) -> None:
        """One adapter name per version: caches use it as key, and requests in flight finish with their adapter."""
        coming.adapter = f"{self.settings.adapter_name}-v{coming.version:06d}"
        if coming.adapter == self._served.adapter and coming.proof == self._served.proof and not again:
            return
        try:
            await self.add_adapter(coming.adapter, path)
        except RequestRefused as error:
            try:  # an earlier run may have left an adapter of this name
                await self.remove_adapter(coming.adapter)
            except RequestRefused:
                raise error from None
            await self.add_adapter(coming.adapter, path)

    async def _drop_unused(self, adapter: str | None) -> None:
        if adapter is not None and adapter != self._served.adapter and not self._in_flight[adapter]:
            del self._in_flight[adapter]
            with contextlib.suppress(RequestRefused):  # a restarted server no longer has it
                await self.remove_adapter(adapter)

    async def _apply_noise(self, coming: _ServedVersion) -> None:
        lora = coming.manifest.get("kind") == "lora"
        base = model_folder(self.settings.model) if lora else Path(str(coming.manifest.get("path", "")))
        async with noisy_norms(base, self.settings.scratch, coming.noise, coming.version) as folder:
            await self.read_weights(str(folder), coming.version, partial=True)
            self.applied_sigma = await asyncio.to_thread(applied_sigma, base, folder)

    async def _verify(self) -> None:
        """The same weights must give the same log-probs after a fixed prompt, and new weights others."""
        if self._unverified is None:
            return
        key, self._unverified = self._unverified, None
        room = min(PROBE_TOKENS, self.settings.context_tokens - 1)
        ids = [(7919 * i + 13) % self.settings.vocab_size for i in range(room)]
        try:
            values = await self.probe(ids, self._served.adapter)
        except UNREADABLE as error:
            raise EngineError(f"{self.name}'s answer to a probe cannot be read: {error!r}") from error
        self._probes.judge(key, values, self._served.version)

    # The rest of the protocol

    async def pause(self) -> None:
        await self.connect()
        self._running.clear()
        await self._control(self.hold)

    async def resume(self) -> None:
        await self._control(self.release)
        self._running.set()
        await self._control(self._verify)

    async def _control(self, send: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self.with_server_log():
                await send()
        except ConnectionLost as error:
            raise EngineError(await self.failure_message(f"does not answer: {error}")) from error

    async def health(self) -> dict[str, Any]:
        try:
            await self.check_health()
        except (ConnectionLost, EngineError) as error:
            return {"ok": False, "version": self.version, "reason": str(error)}
        running = sum(self._in_flight.values())
        return {"ok": True, "version": self.version, "running": running, "hash": self._served.proof}

    async def close(self) -> None:
        # Remove the noise of this run from a server that it did not start.
        if self.settings.log is None and self._served.noise[0] > 0 and not self.waits:
            with contextlib.suppress(ConnectionLost, ShoalError, TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await self.load(self.version, {"sigma": 0.0})
        await super().close()
        if self._process is not None:
            await self._process.close()
