"""The interfaces between the core and the other packages. `build` and `split` choose the implementations."""

# pyright: reportReturnType=false
# Protocol methods have a docstring and no body.

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from shoal.core.types import (
    Completion,
    EpisodeResult,
    Message,
    Request,
    Rollout,
    RolloutGroup,
    Row,
    SamplingParams,
    Score,
    ScoredTokens,
    ScoreRequest,
    Task,
    Tools,
)


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions. Implementations are in `rollout`: embedded, Shoal server, vLLM and SGLang."""

    @property
    def version(self) -> int:
        """The weight version that samples new tokens."""

    @property
    def path(self) -> str:
        """The decoding path, for the console."""

    @property
    def activity(self) -> str:
        """What the engine is doing, for the console; empty if nothing. Called from other threads."""

    @property
    def opening(self) -> str:
        """What `connect` starts or waits for, for the console; empty if nothing."""

    async def connect(self) -> None:
        """Wait until the engine can sample. Calling it again does nothing."""

    async def describe(self) -> dict[str, Any]:
        """Limits of a server that Shoal did not start: max_model_len, lora, max_lora_rank. Empty = nothing to check."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Concurrent calls are batched; simultaneous calls with one prompt share its prefill."""

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        """Serve `version` from now on. Returns a hash of the served weights."""

    async def rest(self) -> None:
        """Release device memory for training if the engine is idle and supports it."""

    async def pause(self) -> None:
        """Stop sampling until `resume`; requests in flight stay."""

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


# Receives new tokens and their log-probs.
TokenListener = Callable[[list[int], list[float]], None]


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that reports tokens while it samples them."""

    streams: bool

    async def generate(self, request: Request, on_tokens: TokenListener | None = None) -> Completion: ...


@runtime_checkable
class NoiseMeter(Protocol):
    """An engine that measures the noise on its weights after rounding to their precision."""

    @property
    def applied_sigma(self) -> float: ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that also computes log-probs of given texts, under the weights that it serves."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]: ...


class PendingResults(Protocol):
    """Results of a micro-batch that the device may still be computing."""

    def read(self) -> tuple[Mapping[str, tuple[float, float]], list[np.ndarray]]:
        """Metric name → (sum, count), and log-probs: one array [T] per row, 0 where loss_mask is false."""


class Policy(Protocol):
    """The model being trained. It knows no algorithm; the objective is an argument."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether a shared prompt may be computed once for all its samples. False with dropout."""

    @property
    def passes_together(self) -> bool:
        """Whether all ranks must make the same number of passes, because each holds a shard of the weights."""

    def logprobs(self, rows: Sequence[Row]) -> PendingResults:
        """Log-probs of the masked tokens under the current weights. No gradient."""

    def reference_logprobs(self, rows: Sequence[Row]) -> PendingResults:
        """The same under the reference model."""

    def forward_backward(self, rows: Sequence[Row], objective: Any, mismatch_from: Any = "old") -> PendingResults:
        """Add the gradient of one micro-batch. `mismatch_from`: see LossInputs."""

    def discard_gradient(self) -> None:
        """Discard the accumulated gradient, and free its memory and that of a failed pass."""

    def optim_step(self) -> Mapping[str, float]:
        """Make one optimizer step; skip it if a gradient is not finite. Returns lr, grad_norm and skipped (0 or 1)."""


class Ranks(Protocol):
    """The processes that train one policy. All of them run the same loop over the same groups."""

    rank: int
    world: int
    mesh: Any  # device mesh over all ranks, for sharded weights; None in a single process

    @property
    def cpu_group(self) -> Any:
        """Process group for CPU tensors, for sharded checkpoints; None in a single process."""

    async def exchange(self, mine: bytes) -> list[bytes]:
        """All-gather: the bytes of all ranks, by rank. All ranks call it the same number of times in the same order."""

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Rank 0 does the work; the others wait while it sends heartbeats. All get the result, passed as JSON."""

    def sum_gradients(self, masters: Mapping[str, Any]) -> None:
        """All-reduce: replace the gradient of each tensor by the sum over all ranks."""

    def gather_full(self, tensor: Any) -> Any:
        """The full tensor of a sharded one, on every rank; other tensors unchanged."""

    def minimum(self, numbers: list[int]) -> list[int]:
        """The minimum of each number over all ranks."""

    def watch_peers(self) -> AbstractContextManager[None]:
        """For blocks that communicate with other ranks: raises LostRanksError if one of them ended."""

    def close(self) -> None:
        """Leave the group."""


class WeightChannel(Protocol):
    """Transfers a weight version from trainer to engine."""

    async def publish(self, version: int) -> Mapping[str, Any]:
        """Make `version` available. Returns the manifest for RolloutEngine.load."""


class Replay(Protocol):
    """Groups of earlier steps that are trained again. Its state is part of every checkpoint."""

    metrics: Mapping[str, float]  # of the last step

    def mix(self, kept: Sequence[RolloutGroup], version: int) -> Sequence[RolloutGroup]:
        """All groups to train: `kept`, which are stored as they are now, before learning, and earlier ones."""

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class Episode(Protocol):
    """One attempt at one task; used once."""

    messages: list[Message]  # the conversation so far, which the policy continues
    # An episode may also have `tools: Tools`.

    async def reply(self, answer: Message) -> list[Message] | None:
        """Receive the policy's answer (see Tokens.message). Returns the messages that follow it, or None at the end."""


class StatefulEpisode(Episode, Protocol):
    """An episode with a process of its own, which holds its state."""

    def running(self, phase: Any) -> AbstractAsyncContextManager[Any]:
        """The process runs while the block runs. Afterwards the environment is closed, however the block ended."""

    async def score(self, messages: Sequence[Message]) -> Score | None:
        """The reward from the state; None if the environment has no reward of its own."""


class Environment(Protocol):
    """Provides tasks and rewards. `reward` runs in a worker process that may be killed."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of "train" or "eval", the same in every process."""

    def start(self, task: Task) -> Episode: ...

    def reward(self, task: Task, messages: Sequence[Message]) -> float | Mapping[str, float] | None:
        """Score a finished conversation: a number, named parts, or None to exclude the rollout."""


@runtime_checkable
class EndpointEnvironment(Protocol):
    """An environment that sends its own requests to an OpenAI-compatible endpoint and computes the reward."""

    name: str

    def tasks(self, split: str) -> Sequence[Task]: ...

    async def play(self, task: Task, base_url: str, model: str) -> EpisodeResult:
        """Make one rollout. An exception becomes the rollout's error, TimeoutError its timeout."""

    # An environment that scores a group together also has `async play_group(task, [(base_url, model), …])`, which is
    # called instead. It makes one rollout per pair and returns an EpisodeResult for each; an exception is that of all.


class Tokens(Protocol):
    """The tokenizer and its chat template, as the runner uses them."""

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Token ids of the first prompt."""

    def message(self, prompt_ids: Sequence[int], completion: Completion, tools: Tools = None) -> Message:
        """The answer to a prompt, split into content, reasoning and calls of the offered tools."""

    def next_prompt_ids(
        self, so_far: Sequence[int], messages: Sequence[Message], following: Sequence[Message], tools: Tools = None
    ) -> list[int]:
        """Token ids of the next prompt: `so_far`, then the tokens of the messages that follow.

        If the prompt does not start with `so_far`, the next turn is a sample of its own.
        """


class EpisodePlayer(Protocol):
    """Makes rollouts of an EndpointEnvironment, and writes their turns and messages."""

    async def play(
        self,
        environment: EndpointEnvironment,
        rollouts: Sequence[Rollout],
        sampling: SamplingParams,
        context_tokens: int,
        seed: int,
    ) -> Sequence[Score]:
        """One rollout, or all rollouts of a group that its environment makes together."""
        ...


class Judge(Protocol):
    """Runs Environment.reward in worker processes."""

    async def score(self, env: str, split: str, index: int, messages: Sequence[Message]) -> Score: ...

    async def score_group(
        self, env: str, split: str, index: int, conversations: Sequence[Sequence[Message]]
    ) -> list[Score]:
        """Score all rollouts of a group in one call, for environments with a method `reward_group`."""
        ...

    async def close(self) -> None: ...


class Files(Protocol):
    """Saves and loads the policy: weights, optimizer, random state."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """Write the trained model in the Hugging Face or PEFT format."""


class RunStore(Protocol):
    """The loop's view of the run directory. Only rank 0 writes."""

    def record_rollouts(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        policy_logprobs: Mapping[str, np.ndarray],
        token_text: Callable[[int], str],
    ) -> None:
        """Write all rollouts of a step; `policy_logprobs` by rollout id."""

    def record_evaluation(
        self, step: int, groups: Sequence[RolloutGroup], token_text: Callable[[int], str]
    ) -> None: ...

    def append_journal(self, step: int, record: Mapping[str, Any]) -> None:
        """Write the record of a step. Without it the step is computed again after a resume."""

    def write_status(
        self, state: Literal["running"], *, step: int, reason: str, resumable: bool, next_command: str | None = None
    ) -> None: ...

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> AbstractContextManager[Path]:
        """An empty folder that becomes the checkpoint of the step when the block ends. `state` is the loop's state."""

    def read_state(self, folder: Path) -> dict[str, Any]:
        """The loop's state in a checkpoint."""

    def make_shards_folder(self) -> Path:
        """An empty folder for the shards that all ranks write for the next checkpoint."""

    def take_shards(self, checkpoint: Path) -> None:
        """Move the shards into a checkpoint that is being written."""

    def prune_checkpoints(self, save_total_limit: int | None) -> Any: ...

    def mark_best(self, step: int, value: float) -> None: ...

    def export(self) -> AbstractContextManager[Path]:
        """An empty folder that becomes `final/` when the block ends."""


class ProgressBar(Protocol):
    def advance(self, amount: float = 1) -> None: ...


class Events(Protocol):
    """Records notable events of a run. `kind` is a short word that never changes."""

    def emit(self, kind: str, message: str, *, data: Mapping[str, Any] | None = None) -> None: ...

    def warn(self, kind: str, message: str, *, data: Mapping[str, Any] | None = None) -> None: ...


class Phases(Protocol):
    """Measures the time of named phases, which may overlap."""

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """The phase lasts while the block runs."""

    def take(self) -> dict[str, float]:
        """The time/* metrics since the last call."""


class Observer(Events, Protocol):
    """Console, metrics, events and trackers. An error or delay there never stops or slows a run."""

    def begin_step(self, step: int) -> None:
        """Assign later events to this step."""

    def doing(self, what: str) -> None:
        """Report progress and name what comes next, for heartbeats and stall reports."""

    def progress(self, what: str, total: float) -> AbstractContextManager[ProgressBar]:
        """A progress bar while the block runs."""

    def refilling(self, needed: int, zero_variance: float) -> None:
        """The step waits for `needed` more groups; so far a share `zero_variance` of its groups had equal rewards."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to the run directory, then to the trackers."""

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that was already logged."""

    def log_completions(self, step: int, groups: Sequence[RolloutGroup]) -> None: ...

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step that is in the journal."""

    def show_completions(self, step: int, groups: Sequence[RolloutGroup], number: int) -> None: ...

    def close(self) -> None:
        """Flush the metrics."""
