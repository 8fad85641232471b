"""A Shoal server (grpo-infer) behind the RolloutEngine seam. Imports no torch.

What is lost is asked again: seeds are counters, so the same comes out. A server that was restarted is given the weights
it should have first. What it answers is checked before anybody trains on it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import DeadlineError, EngineError
from shoal.observability import manifest as manifests
from shoal.rollout.link import PROBE_S, SHORTEST_PAUSE_S, SILENT_PROBE_S, Address, Link, Waiting, said_once
from shoal.rollout.lookout import Lookout
from shoal.rollout.lost import Busy, Late, Lost
from shoal.server.control import INCARNATION
from shoal.types import Completion, Request, Span

COMPLETIONS = "/v1/completions"
LOOK_EVERY_S = 10.0
LISTEN_EVERY_S = 0.5  # whether it is silent, in between
# Losses in a row by one server that is up all the same; then it is not the connection.
MOST_LOSSES = 5


class HttpRolloutEngine:
    """`model` is what the server has to serve, if it matters; `noise_seed` the run's seed, for QeRL's noise."""

    def __init__(
        self,
        address: Address,
        model: str | None = None,
        noise_seed: int = 0,
        waiting: Waiting = lambda _: None,
    ) -> None:
        self._link = Link(address, said_once(waiting))
        self._model = model
        self._noise_seed = noise_seed
        self._facts: dict[str, Any] = {}  # what the server says about itself
        self._wanted: dict[str, Any] | None = None  # the manifest it has to serve; None = nothing was loaded yet
        self._version = self._coming = 0
        self._paused = False
        self._asking = 0  # requests that are under way
        self._meeting = asyncio.Lock()
        # A server that hangs, or is gone without a word, is noticed before the time of a request is up.
        self._lookout = Lookout(lambda: self._meet(self._facts["incarnation"]), self._until_due)

    @property
    def version(self) -> int:
        return self._version

    @property
    def path(self) -> str:
        """How tokens are decoded, in words."""
        return f"over HTTP by {self._link.name}"

    @property
    def activity(self) -> str:
        return f"{self._asking} requests at {self._link.address.root}" if self._asking else ""

    async def about(self) -> dict[str, Any]:
        """The server's facts; waits for it if it is not there yet."""
        if not self._facts:
            await self._meet(None)
        return dict(self._facts)

    async def generate(self, request: Request) -> Completion:
        facts = await self.about()
        room = int(facts["max_model_len"]) - len(request.prompt_ids)
        if not request.prompt_ids or min(room, request.sampling.max_tokens) < 1:
            return Completion(request.request_id, [], [], [], "length")
        asked_at = self._version
        reply = await self._ask(COMPLETIONS, _body(request), self._link.address.request_s)
        try:
            completion = _completion(request, reply, int(facts["vocab_size"]))
            _check_versions(completion, (asked_at, self._version, self._coming))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise EngineError(f"{self._link.name} answered {request.request_id} wrongly: {what}") from error
        return completion

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """A manifest without weights is about the version that is served: its noise."""
        await self.about()
        body = {"noise_seed": self._noise_seed, **(manifest or {}), "version": version}
        self._coming = version  # from now on it may be what tokens are drawn with
        reply = await self._ask("/shoal/load", body, self._link.address.deadline_s)
        before = self._wanted
        if before is not None and before["version"] == version and not _has_weights(body):
            body = {**before, **body}  # a server that is restarted needs all of it
        self._check_loaded(body, reply)
        self._wanted, self._version = body, version
        return str(reply["hash"])

    def _check_loaded(self, body: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        if reply.get("version") != body["version"]:
            raise EngineError(f"{self._link.name} serves version {reply.get('version')}, not {body['version']}")
        if _has_weights(body) and reply.get("hash") != manifests.version_hash(body):
            raise EngineError(
                f"{self._link.name} loaded other weights than version {body['version']}: the hash differs"
            )

    async def pause(self) -> None:
        await self._ask("/shoal/pause", {}, self._link.address.deadline_s)
        self._paused = True

    async def resume(self) -> None:
        await self._ask("/shoal/resume", {}, self._link.address.deadline_s)
        self._paused = False

    async def health(self) -> dict[str, Any]:
        """One look, without waiting."""
        try:
            return (await self._link.get("/health"))[0]
        except (Lost, EngineError) as error:
            return {"ok": False, "version": self._version, "reason": str(error)}

    async def close(self) -> None:
        await self._lookout.close()
        await self._link.close()

    async def _ask(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Ask until there is an answer of the server that has our weights."""
        await self.about()
        self._asking += 1
        try:
            return await self._ask_until_answered(path, body, limit_s)
        finally:
            self._asking -= 1

    async def _ask_until_answered(self, path: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        losses = 0
        while True:
            met = self._facts["incarnation"]
            try:
                answer, headers = await self._lookout.unless_gone(self._link.post(path, body, limit_s))
                if headers.get(INCARNATION) == met:
                    return answer
                why = Lost("it was restarted")
            except Lost as error:
                why = error
            await self._meet(met)
            if isinstance(why, Late) and self._facts["incarnation"] == met:
                slow = path == COMPLETIONS and not isinstance(why.__cause__, Busy)
                key = "orch.client.timeout" if slow else "orch.deadline_s"
                raise DeadlineError(f"{self._link.name}: {why}; raise {key} if that is expected")
            losses = losses + 1 if self._facts["incarnation"] == met else 0
            if losses >= MOST_LOSSES:
                raise EngineError(f"{self._link.name} is up but lost {path} {losses} times in a row: {why}")
            if losses:
                await asyncio.sleep(SHORTEST_PAUSE_S * 2**losses)  # whatever it was, it may pass

    async def _until_due(self) -> None:
        """Until the next look: soon for a server of whom nothing is seen elsewhere either."""
        due = time.monotonic() + LOOK_EVERY_S
        while (left := due - time.monotonic()) > 0:
            await asyncio.sleep(min(left, LISTEN_EVERY_S))
            if self._link.address.silent_s():
                return

    async def _meet(self, met: str | None) -> None:
        """Wait until the server is there; one that is not the one met before is given what it should have."""
        async with self._meeting:
            if self._facts and self._facts["incarnation"] != met:
                return  # somebody else met the new one meanwhile

            async def probe() -> dict[str, Any]:
                limit_s = SILENT_PROBE_S if self._link.address.silent_s() else PROBE_S
                facts = await self._link.meet("/shoal/about", limit_s)
                if met is None or facts.get("incarnation") != met:
                    self._check_facts(facts)
                    await self._restore(facts)
                return facts

            self._facts = await self._link.until_up(probe)
            if met is not None and self._facts["incarnation"] != met:
                self._lookout.gone(Lost("it was restarted"))

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        for key in ("incarnation", "max_model_len", "vocab_size", "version"):
            if key not in facts:
                raise EngineError(f"{self._link.name} does not say its {key}; is it a Shoal server?")
        if self._model is not None and facts.get("model") != self._model:
            raise EngineError(f"{self._link.name} serves {facts.get('model')!r}, not {self._model!r}")

    async def _restore(self, facts: Mapping[str, Any]) -> None:
        """Our weights, and our pause: another client may have left one behind."""
        limit_s = self._link.address.deadline_s
        if self._wanted is not None:
            reply, _ = await self._link.post("/shoal/load", self._wanted, limit_s)
            self._check_loaded(self._wanted, reply)
        if self._paused != bool(facts.get("paused")):
            await self._link.post("/shoal/pause" if self._paused else "/shoal/resume", {}, limit_s)


def _has_weights(manifest: Mapping[str, Any]) -> bool:
    return "path" in manifest or "tensors" in manifest


def _body(request: Request) -> dict[str, Any]:
    """Everything said, so that no default of the server applies."""
    sampling = request.sampling
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed")
    stops = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    wanted = {"n": 1, "logprobs": 1, "return_token_ids": True, "stream": False}
    return {"prompt": request.prompt_ids, **{name: getattr(sampling, name) for name in names}, **stops, **wanted}


def _completion(request: Request, reply: Mapping[str, Any], vocab_size: int) -> Completion:
    """The answer as a Completion. Raises ValueError for one that no sampler gives."""
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
        raise ValueError(f"{len(ids)} tokens, {request.sampling.max_tokens} were asked for")
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


def _spans(said: Sequence[Sequence[int]], count: int) -> list[Span]:
    spans = [Span(int(start), int(end), int(version)) for start, end, version in said]
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), count]
    if edges[::2] != edges[1::2] or any(span.start >= span.end for span in spans):
        raise ValueError(f"its spans do not cover {count} tokens: {said}")
    return spans


def _check_kept(kept: Sequence[Sequence[int]] | None, ids: Sequence[int], vocab_size: int) -> None:
    """What was drawn is one of those it was drawn from; ~id stands for one that was not."""
    for drawn, of in zip(ids, kept or (), strict=False):
        if not all(type(i) is int and -vocab_size <= i < vocab_size for i in of):
            raise ValueError("a kept id is not one of the vocabulary")
        if ~drawn in of or (drawn not in of and any(i >= 0 for i in of)):
            raise ValueError(f"token {drawn} is not among those that were kept")


def _check_versions(completion: Completion, served: tuple[int, ...]) -> None:
    wrong = [span.version for span in completion.spans if not min(served) <= span.version <= max(served)]
    if wrong:
        raise ValueError(f"drawn with version {wrong[0]}, it should be {max(served)}")
