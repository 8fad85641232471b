"""The seams of Shoal. The orchestrator sees nothing but these; build/ decides what stands behind each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.types import Completion, Message, Played, Request, Row, Score, Task


@runtime_checkable
class RolloutEngine(Protocol):
    """Token ids in; ids, log-probs, spans with versions and a finish reason out."""

    @property
    def version(self) -> int:
        """The weight version new tokens are drawn with."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Draw one completion. Concurrent calls are batched; calls made together with equal prompts share a prefill."""
        ...

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve `version` from now on; returns a hash that proves which weights are served."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


# Tokens just drawn and their log-probs.
Heard = Callable[[list[int], list[float]], None]


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can tell of tokens while they are drawn; its `generate` takes who listens."""

    streams: bool

    async def generate(self, request: Request, heard: Heard | None = None) -> Completion: ...


class PendingResults(Protocol):
    """What a micro-batch came to, perhaps still being computed."""

    def read(self) -> tuple[Mapping[str, tuple[float, float]], list[np.ndarray]]:
        """Metric name → (sum, count), to be reduced once by the caller; and log-probs, [T] a row, zero off the mask."""
        ...


class Policy(Protocol):
    """The model being trained. Knows no algorithm: an objective is handed to it."""

    @property
    def shares_prefixes(self) -> bool:
        """True if what samples begin with may be computed once for all of them; not so where dropout is drawn."""
        ...

    @property
    def passes_together(self) -> bool:
        """True if all ranks must make the same passes, since each holds a share of the weights. One without rows for a
        pass makes it over none."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> PendingResults:
        """Log-probs of the masked tokens under the current weights. No gradient."""
        ...

    def reference_logprobs(self, rows: Sequence[Row]) -> PendingResults: ...

    def forward_backward(self, rows: Sequence[Row], objective: Any, mismatch_from: Any = "old") -> PendingResults:
        """Add the gradient of one micro-batch."""
        ...

    def drop_gradient(self) -> None:
        """What was added so far goes, with all memory that it and a pass that failed held."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """One optimizer step, or none if a gradient is not finite. Returns lr, grad_norm and skipped (0 or 1)."""
        ...


class Ranks(Protocol):
    """The processes that train one policy together. All of them run the same loop over the same groups."""

    rank: int
    world: int

    async def exchange(self, mine: bytes) -> list[bytes]:
        """Everyone's bytes, by rank. Called by all ranks, the same number of times and in the same order."""
        ...

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Rank 0 does the work, the others wait for as long as it shows signs of life. All get its result, as JSON."""
        ...


class WeightChannel(Protocol):
    """Carries a weight version from trainer to engine."""

    async def publish(self, version: int) -> Mapping[str, Any]:
        """Make `version` available; the returned manifest is what RolloutEngine.load takes."""
        ...


class Episode(Protocol):
    """One attempt at one task; used once."""

    messages: list[Message]  # the conversation so far; the policy answers it
    # An episode may also have `tools`, OpenAI's schemas of the functions the policy may call.

    async def reply(self, completion: str) -> list[Message] | None:
        """Take the policy's answer. Returns the messages that follow it, or None when the episode is over."""
        ...


class Environment(Protocol):
    """A source of tasks and the judge of answers. `reward` runs in a worker process that may be killed."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of "train" or "eval", the same in every process."""
        ...

    def start(self, task: Task) -> Episode: ...

    def reward(self, task: Task, messages: Sequence[Message]) -> float | Mapping[str, float] | None:
        """Score a finished conversation: a number, named parts, or None to exclude the rollout."""
        ...


@runtime_checkable
class PlayedEnvironment(Protocol):
    """An environment that drives the conversation itself, against an OpenAI-compatible endpoint, and scores it."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]: ...

    async def play(self, task: Task, base_url: str, model: str) -> Played:
        """One rollout. What it raises becomes the rollout's error; TimeoutError its timeout."""
        ...


class Judge(Protocol):
    """Runs Environment.reward somewhere safe."""

    async def score(self, env: str, split: str, index: int, messages: Sequence[Message]) -> Score: ...

    async def close(self) -> None: ...


class MetricSink(Protocol):
    """Receives what was measured. May fail; a failure is counted and never stops training."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_completions(self, step: int, rows: Sequence[Any], /) -> None:
        """A few completions of the step, as a table where there are tables."""
        ...

    def close(self) -> Any: ...
