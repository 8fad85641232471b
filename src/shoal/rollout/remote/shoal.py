"""The engine on another Shoal server (grpo-infer).

A restarted server is recognised by its incarnation and gets its weights back before requests are sent again.
Completions are checked before they are used.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import DeadlineError, EngineError
from shoal.core.types import Completion, Request, Span
from shoal.rollout.remote.client import (
    PROBE_S,
    SILENT_PROBE_S,
    Address,
    ConnectionLost,
    HealthPoller,
    HttpClient,
    ResponseTimeout,
    ServerBusy,
    Waiting,
    report_changes,
)
from shoal.runs import weight_files as manifests
from shoal.runs.secrets import INCARNATION

COMPLETIONS = "/v1/completions"
POLL_EVERY_S = 10.0
HEARTBEAT_EVERY_S = 0.5  # between checks of its heartbeat


class HttpRolloutEngine:
    """`model` is the model that the server must serve (None = any); `noise_seed` is the run's seed for QeRL noise;
    `adapter_name` is the name under which the server serves a trained adapter."""

    def __init__(
        self,
        address: Address,
        model: str | None = None,
        noise_seed: int = 0,
        waiting: Waiting = lambda _: None,
        adapter_name: str | None = None,
    ) -> None:
        self._link = HttpClient(address, report_changes(waiting))
        self._model = model
        self._noise_seed = noise_seed
        self._adapter_name = adapter_name
        self._facts: dict[str, Any] = {}  # what the server reports about itself
        self._wanted: dict[str, Any] | None = None  # the manifest it must serve; None = nothing loaded yet
        self._version = self._loading = 0
        self.applied_sigma = 0.0  # of the noise on the weights after rounding, as the server measured it
        self._paused = False
        self._running = 0  # requests in flight
        self._connecting = asyncio.Lock()
        # Detects a server that hangs or is gone before the timeout of a request.
        self._poller = HealthPoller(lambda: self._reconnect(self._facts["incarnation"]), self._until_next_poll)

    @property
    def version(self) -> int:
        return self._version

    @property
    def path(self) -> str:
        """How tokens are decoded, for the console."""
        return f"over HTTP by {self._link.name}"

    @property
    def activity(self) -> str:
        return f"{self._running} requests at {self._link.address.root}" if self._running else ""

    @property
    def opening(self) -> str:
        return ""  # grpo-infer reports its own start

    async def connect(self) -> None:
        await self.describe()

    async def describe(self) -> dict[str, Any]:
        """What the server reports about itself; waits until it is up."""
        if not self._facts:
            await self._reconnect(None)
        return dict(self._facts)

    async def generate(self, request: Request) -> Completion:
        facts = await self.describe()
        room = int(facts["max_model_len"]) - len(request.prompt_ids)
        if not request.prompt_ids or min(room, request.sampling.max_tokens) < 1:
            return Completion(request.request_id, [], [], [], "length")
        version = self._version
        reply = await self._send(COMPLETIONS, _body(request), self._link.address.request_s)
        try:
            completion = _completion(request, reply, int(facts["vocab_size"]))
            _check_versions(completion, (version, self._version, self._loading))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise EngineError(f"{self._link.name} answered {request.request_id} wrongly: {what}") from error
        return completion

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """A manifest without weights changes the noise of the current version."""
        await self.describe()
        body = {"noise_seed": self._noise_seed, **(manifest or {}), "version": version}
        if body.get("kind") == "lora":
            body["adapter_name"] = self._adapter_name
        self._loading = version  # tokens may be sampled with it from now on
        reply = await self._send("/shoal/load", body, self._link.address.deadline_s)
        before = self._wanted
        if before is not None and before["version"] == version and not _has_weights(body):
            body = {**before, **body}  # a restarted server needs all of it
        self._check_loaded(body, reply)
        self._wanted, self._version = body, version
        self.applied_sigma = float(reply.get("applied_sigma", 0.0))
        return str(reply["hash"])

    def _check_loaded(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        if reply.get("version") != body["version"]:
            raise EngineError(f"{self._link.name} serves version {reply.get('version')}, not {body['version']}")
        if _has_weights(body) and reply.get("hash") != manifests.version_hash(body):
            raise EngineError(
                f"{self._link.name} loaded other weights than version {body['version']}: the hash differs"
            )

    async def rest(self) -> None: ...

    async def pause(self) -> None:
        await self._send("/shoal/pause", {}, self._link.address.deadline_s)
        self._paused = True

    async def resume(self) -> None:
        await self._send("/shoal/resume", {}, self._link.address.deadline_s)
        self._paused = False

    async def health(self) -> dict[str, Any]:
        """One request, without retries."""
        try:
            return (await self._link.get("/health"))[0]
        except (ConnectionLost, EngineError) as error:
            return {"ok": False, "version": self._version, "reason": str(error)}

    async def close(self) -> None:
        await self._poller.close()
        await self._link.close()

    async def _send(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send until a server with the current weights responds."""
        await self.describe()
        self._running += 1
        try:
            return await self._send_until_answered(path, body, limit_s)
        finally:
            self._running -= 1

    async def _send_until_answered(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        sent_to = ""

        async def send() -> dict[str, Any]:
            nonlocal sent_to
            sent_to = self._facts["incarnation"]
            answer, headers = await self._poller.wait_for(self._link.post(path, body, limit_s))
            if headers.get(INCARNATION) != sent_to:
                raise ConnectionLost("it was restarted")
            return answer

        async def recover(error: ConnectionLost) -> bool:
            await self._reconnect(sent_to)
            restarted = self._facts["incarnation"] != sent_to
            if isinstance(error, ResponseTimeout) and not restarted:
                slow = path == COMPLETIONS and not isinstance(error.__cause__, ServerBusy)
                key = "orch.client.timeout" if slow else "orch.deadline_s"
                raise DeadlineError(f"{self._link.name}: {error}; raise {key} if that is expected")
            return restarted

        return await self._link.resend(path, send, recover)

    async def _until_next_poll(self) -> None:
        """Sleep until the next poll; poll immediately if the heartbeat of the server stopped."""
        due = time.monotonic() + POLL_EVERY_S
        while (left := due - time.monotonic()) > 0:
            await asyncio.sleep(min(left, HEARTBEAT_EVERY_S))
            if self._link.address.silent_s():
                return

    async def _reconnect(self, met: str | None) -> None:
        """Wait until the server is up. One that is not the incarnation `met` gets the current weights."""
        async with self._connecting:
            if self._facts and self._facts["incarnation"] != met:
                return  # another request reconnected meanwhile

            async def probe() -> dict[str, Any]:
                limit_s = SILENT_PROBE_S if self._link.address.silent_s() else PROBE_S
                facts = await self._link.identify("/shoal/about", limit_s)
                if met is None or facts.get("incarnation") != met:
                    self._check_facts(facts)
                    await self._restore(facts)
                return facts

            self._facts = await self._link.until_up(probe)
            if met is not None and self._facts["incarnation"] != met:
                self._poller.fail(ConnectionLost("it was restarted"))

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        for key in ("incarnation", "max_model_len", "vocab_size", "version"):
            if key not in facts:
                raise EngineError(f"{self._link.name} does not say its {key}; is it a Shoal server?")
        if self._model is not None and facts.get("model") != self._model:
            raise EngineError(f"{self._link.name} serves {facts.get('model')!r}, not {self._model!r}")

    async def _restore(self, facts: Mapping[str, Any]) -> None:
        """Load the current weights, and pause or resume: another client may have paused it."""
        limit_s = self._link.address.deadline_s
        if self._wanted is not None:
            reply, _ = await self._link.post("/shoal/load", self._wanted, limit_s)
            self._check_loaded(self._wanted, reply)
        if self._paused != bool(facts.get("paused")):
            await self._link.post("/shoal/pause" if self._paused else "/shoal/resume", {}, limit_s)


def _has_weights(manifest: Mapping[str, Any]) -> bool:
    return "path" in manifest or "tensors" in manifest


def _body(request: Request) -> dict[str, Any]:
    """All parameters, so that no default of the server applies."""
    sampling = request.sampling
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed")
    stops = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    wanted = {"n": 1, "logprobs": 0, "return_token_ids": True, "stream": False}
    return {"prompt": request.prompt_ids, **{name: getattr(sampling, name) for name in names}, **stops, **wanted}


def _completion(request: Request, reply: Mapping[str, Any], vocab_size: int) -> Completion:
    """The answer as a Completion. Raises ValueError if it is invalid."""
    (choice,) = reply["choices"]
    ids, values, exact = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["shoal"]
    if reply.get("prompt_token_ids", request.prompt_ids) != request.prompt_ids:
        raise ValueError("it answers another prompt than the one that was sent")
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"a token id is not one of 0 to {vocab_size - 1}")
    if len(values) != len(ids):
        raise ValueError(f"{len(ids)} tokens but {len(values)} log-probs")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError("a log-prob is missing or not finite")
    if any(value > 1e-4 for value in values):
        raise ValueError(f"a log-prob is positive: {max(values)}")
    if len(ids) > request.sampling.max_tokens:
        raise ValueError(f"{len(ids)} tokens, {request.sampling.max_tokens} were requested")
    if exact["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason is {exact['finish_reason']!r}")
    if not isinstance(choice["text"], str):
        raise ValueError(f"its text is {type(choice['text']).__name__}")
    spans = _spans(exact["spans"], len(ids))
    _check_kept(exact["kept_ids"], ids, vocab_size)
    numbers = [float(value) for value in values]
    return Completion(
        request.request_id, ids, numbers, spans, exact["finish_reason"], choice["text"], exact["kept_ids"]
    )


def _spans(reported: Sequence[Sequence[int]], count: int) -> list[Span]:
    spans = [Span(int(start), int(end), int(version)) for start, end, version in reported]
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), count]
    if edges[::2] != edges[1::2] or any(span.start >= span.end for span in spans):
        raise ValueError(f"its spans do not cover {count} tokens: {reported}")
    return spans


def _check_kept(kept: Sequence[Sequence[int]] | None, ids: Sequence[int], vocab_size: int) -> None:
    """Every sampled id must be a kept id; ~id stands for an excluded id."""
    for sampled, kept_ids in zip(ids, kept or (), strict=False):
        if not all(type(i) is int and -vocab_size <= i < vocab_size for i in kept_ids):
            raise ValueError("a kept id is not one of the vocabulary")
        if ~sampled in kept_ids or (sampled not in kept_ids and any(i >= 0 for i in kept_ids)):
            raise ValueError(f"token {sampled} is not among those that were kept")


def _check_versions(completion: Completion, served: tuple[int, ...]) -> None:
    wrong = [span.version for span in completion.spans if not min(served) <= span.version <= max(served)]
    if wrong:
        raise ValueError(f"sampled with version {wrong[0]}, it should be {max(served)}")
