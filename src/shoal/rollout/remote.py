"""What vLLM and SGLang have in common behind the RolloutEngine seam: versions, adapters, proofs, pauses, restarts.

A subclass says how its server is asked (server_api.py). Every sampling parameter is sent, so no default of a server's
applies; text is made here from the ids that came back. Free of torch: the process that steers a server may have none.
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

from shoal.errors import ConfigError, DeadlineError, EngineError, ShoalError
from shoal.observability.manifest import verify
from shoal.rollout.answers import UNREADABLE, Answer
from shoal.rollout.facts import RemoteSettings, check_facts, content_of, model_folder, own_files
from shoal.rollout.launch import ServerProcess
from shoal.rollout.link import Waiting
from shoal.rollout.lost import Late, Lost, Refused
from shoal.rollout.norms import noisy_norms
from shoal.rollout.probe import PROBE_TOKENS, Probes
from shoal.rollout.server_api import HEALTH_S, MOST_LOSSES, ServerApi
from shoal.types import Completion, Request

RESTARTED = "it was restarted"


@dataclass
class _Served:
    """The version being served and where its weights are."""

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
        self._served = _Served()
        self._probes = Probes(self.name)
        self._coming: int | None = None  # a version that is being loaded
        self._unproved: str | None = None  # loaded in a pause: asked for its probe when it goes on
        self._in_flight: Counter[str | None] = Counter()  # requests by adapter
        self._running = asyncio.Event()
        self._running.set()
        self._connected = False
        self._lock = asyncio.Lock()  # one load, restart or connection at a time
        self.path = self.link.name

    @property
    def version(self) -> int:
        return self._served.version

    @property
    def activity(self) -> str:
        asked = sum(self._in_flight.values())
        loads = f"{self.name} loads version {self._coming}" if self._coming is not None else ""
        return loads or (f"{asked} asked of {self.name}" if asked else "")

    # Connecting

    async def connect(self) -> None:
        """Wait until it answers, and compare what it serves with what the run needs. Twice does no harm. One of ours
        is started here and not before: whoever connects also closes."""
        async with self._lock:
            if not self._connected:
                if self._process is not None and self._process.pid is None:
                    self._process.start()
                await self._meet()
                facts = await self.as_often_as_lost("was asked what it serves", self.facts)
                check_facts(self.name, facts, self.settings)
                self._connected = True

    async def _meet(self) -> None:
        try:
            await self.until_well(self.settings.start_s, "infer.start_deadline_s")
        except DeadlineError as error:
            if self._process is not None:
                raise
            raise ConfigError(str(error)) from error  # nobody was ever there

    # Drawing

    async def generate(self, request: Request) -> Completion:
        self.reading.check(request)
        sampling = request.sampling
        limit = min(sampling.max_tokens, self.settings.context_tokens - len(request.prompt_ids))
        if not request.prompt_ids or limit < 1:
            return Completion(request.request_id, [], [], [], "length")
        await self.connect()
        await self._running.wait()
        async with self.in_its_words():
            answer, served = await self._asked(request, limit)
        if served.adapter is not None:  # it drew the whole completion, whatever else was loaded meanwhile
            answer = replace(answer, versions=[])
        return self.reading.completion(request, answer, served.version, self.name)

    async def _asked(self, request: Request, limit: int) -> tuple[Answer, _Served]:
        """Asked again if the server went away meanwhile: the seed is in the request, so it comes out the same."""
        lost: Lost | None = None
        for _ in range(MOST_LOSSES):
            try:
                if lost is not None:
                    await self._recover(lost)
                served = self._served
                return await self._drawn(request, limit, served), served
            except Late as error:
                raise self.too_late(error) from error
            except Lost as error:
                lost = error
        raise EngineError(f"{self.link.name} lost a request {MOST_LOSSES} times in a row: {lost}") from lost

    async def _drawn(self, request: Request, limit: int, served: _Served) -> Answer:
        """Raises Lost as well if it was restarted before anybody noticed, and so has none of what it was given."""
        try:
            async with self._counted(served.adapter):
                answer = await self.ask(request, limit, served.adapter)
        except Refused:
            if served.adapter is None or await self.served_version(served.adapter) == served.adapter:
                raise
            raise Lost(RESTARTED) from None
        given = served.adapter is None and served.manifest and not served.manifest.get("own")
        if given and not all(name.isdigit() for _, _, name in answer.versions):
            raise Lost(RESTARTED)  # versions that it was given have numbers
        return answer

    @asynccontextmanager
    async def _counted(self, adapter: str | None):
        """An adapter that a request is drawn with is not unloaded under it."""
        self._in_flight[adapter] += 1
        try:
            yield
        finally:
            self._in_flight[adapter] -= 1
            if not self._in_flight[adapter]:
                del self._in_flight[adapter]
                await self._drop_unused(adapter)

    async def _recover(self, error: Lost) -> None:
        """Wait for the server to come back and give it the version it is to serve. One that we started stays down."""
        async with self._lock:
            await self.back_again(error)
            served = self._served
            if served.manifest and await self.served_version(served.adapter) != (served.adapter or str(served.version)):
                await self._put_in_place(served, served.manifest, served.noise, again=True)
                if self._running.is_set():
                    await self._prove()

    # Weights

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve what the manifest names as `version`. One without a path is about the weights that are served."""
        await self.connect()
        asked, served = dict(manifest or {}), self._served
        noise = (float(asked.get("sigma", 0.0)), int(asked.get("noise_seed", self.settings.noise_seed)))
        if "path" not in asked and "tensors" not in asked:
            if version != served.version:
                raise EngineError(
                    f"version {version} names no weights, and {self.name} serves version {served.version}"
                )
            asked = served.manifest or await asyncio.to_thread(own_files, self.settings.model)
        proof = await asyncio.to_thread(verify, {**asked, "version": version}) if "path" in asked else ""
        asks = 0

        async def put() -> str:
            nonlocal asks
            asks += 1
            coming = _Served(version, asked, proof)
            async with self._lock, self._held():
                await self._put_in_place(coming, asked, noise, again=asks > 1)
            return coming.proof

        self._coming = version
        try:
            return await self.as_often_as_lost(f"loaded version {version}", put)
        finally:
            self._coming = None

    @asynccontextmanager
    async def _held(self):
        """Around an update: nothing is drawn. In a pause of the caller's nothing is released, and the proof waits."""
        if not self._running.is_set():
            yield
            return
        await self.hold()
        try:
            yield
        except Late:  # what it owes an answer to it would not release either
            raise
        except BaseException:
            with contextlib.suppress(Lost, ShoalError, TimeoutError):
                async with asyncio.timeout(HEALTH_S):  # whoever gave up waiting does not begin to wait again
                    await self.release()
            raise
        await self.release()
        await self._prove()

    async def _put_in_place(
        self, coming: _Served, manifest: Mapping[str, Any], noise: tuple[float, int], *, again: bool = False
    ) -> None:
        """`again`: the server may have lost what it was given."""
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
            await self._put_noise(coming)
        self._served, self._unproved = coming, f"{content_of(manifest)}/{noise}"
        await self._drop_unused(before.adapter)

    async def _switch_adapter(self, coming: _Served, path: str, again: bool) -> None:
        """A new name a version: caches are keyed by it, and requests in flight finish with the adapter they began."""
        coming.adapter = f"shoal-v{coming.version:06d}"
        if coming.adapter == self._served.adapter and coming.proof == self._served.proof and not again:
            return
        try:
            await self.add_adapter(coming.adapter, path)
        except Refused as error:  # left there by an earlier run, or this version again with other files; or worse
            try:
                await self.remove_adapter(coming.adapter)
            except Refused:
                raise error from None
            await self.add_adapter(coming.adapter, path)

    async def _drop_unused(self, adapter: str | None) -> None:
        if adapter is not None and adapter != self._served.adapter and not self._in_flight[adapter]:
            del self._in_flight[adapter]
            with contextlib.suppress(Refused):  # a server that was restarted has it no more
                await self.remove_adapter(adapter)

    async def _put_noise(self, coming: _Served) -> None:
        lora = coming.manifest.get("kind") == "lora"
        base = model_folder(self.settings.model) if lora else Path(str(coming.manifest.get("path", "")))
        async with noisy_norms(base, self.settings.scratch, coming.noise, coming.version) as folder:
            await self.read_weights(str(folder), coming.version, partial=True)

    async def _prove(self) -> None:
        """The same weights must give the same log-probs after a fixed prompt as before, and other weights others."""
        if self._unproved is None:
            return
        key, self._unproved = self._unproved, None
        room = min(PROBE_TOKENS, self.settings.context_tokens - 1)
        ids = [(7919 * i + 13) % self.settings.vocab_size for i in range(room)]
        try:
            values = await self.probe(ids, self._served.adapter)
        except UNREADABLE as error:
            raise EngineError(f"{self.name}'s answer to a probe cannot be read: {error!r}") from error
        self._probes.judge(key, values, self._served.version)

    # The rest of the seam

    async def pause(self) -> None:
        await self.connect()
        self._running.clear()
        await self._told(self.hold)

    async def resume(self) -> None:
        await self._told(self.release)
        self._running.set()
        await self._told(self._prove)

    async def _told(self, word: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self.in_its_words():
                await word()
        except Lost as error:
            raise EngineError(await self.last_words(f"does not answer: {error}")) from error

    async def health(self) -> dict[str, Any]:
        try:
            await self.look()
        except (Lost, EngineError) as error:
            return {"ok": False, "version": self.version, "reason": str(error)}
        running = sum(self._in_flight.values())
        return {"ok": True, "version": self.version, "running": running, "hash": self._served.proof}

    async def close(self) -> None:
        # Nobody of this run started the server, so it goes on; the noise is the run's. One that fails is left as it is.
        if self.settings.log is None and self._served.noise[0] > 0 and not self.waits:
            with contextlib.suppress(Lost, ShoalError, TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await self.load(self.version, {"sigma": 0.0})
        await super().close()
        if self._process is not None:
            await self._process.close()
