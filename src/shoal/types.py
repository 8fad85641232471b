"""The nouns of Shoal. Plain data, no torch, no behaviour beyond checking itself.

One word an idea: a *prompt* is answered by a *group* of *rollouts*; a rollout is one or more *turns*, each a prompt and
a *completion* in token ids; rollouts become *samples* (one token sequence each), samples are packed into *rows*, rows
make up a *batch* (one optimizer step).

Worked example, one rollout of one turn, prompt ids [5, 6], completion ids [7, 2]:

    Turn(prompt_ids=[5, 6], completion=Completion(token_ids=[7, 2], logprobs=[-.1, -.3], ...))
    Sample(token_ids=[5, 6, 7, 2], loss_mask=[0, 0, 1, 1], sampler_logprobs=[0, 0, -.1, -.3], ...)

Every per-token array is indexed by the token it speaks of: `sampler_logprobs[t]` is the log-prob of `token_ids[t]`
given all tokens before it. Position 0 of a sample has none and is never in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]
FinishReason = Literal["stop", "length", "abort"]
RolloutStatus = Literal["ok", "error", "timeout", "excluded"]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of an environment's data: what is asked, and what its judge needs to know. JSON-compatible."""

    messages: list[Message]
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task as it was dispatched. (env, index, epoch, attempt) with the index in the group identifies a rollout."""

    env: str
    index: int  # position in the environment's split
    messages: list[Message]
    split: str = "train"
    epoch: int = 0
    attempt: int = 0

    @property
    def prompt_id(self) -> str:
        return f"{self.env}/{self.index}"

    @property
    def group_id(self) -> str:
        return f"{self.env}/{self.index}/{self.epoch}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is drawn. Everything explicit: no engine default applies."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """True if the distribution sampled from is not the model's whole one."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Span:
    """Completion tokens [start, end) were drawn by weight version `version`."""

    start: int
    end: int
    version: int


@dataclass(slots=True)
class Completion:
    """What an engine returns: token ids and the log-prob of each under the distribution it was drawn from."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: FinishReason
    text: str = ""
    # Per token, what it could be drawn from: the ids left by top-p/top-k/min-p; or ~id for each id that was not allowed
    # (min_tokens); or nothing, the whole vocabulary. None = the whole vocabulary for every token.
    kept_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{self.request_id}: {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs")
        if self.kept_ids is not None and len(self.kept_ids) != len(self.token_ids):
            raise ValueError(f"{self.request_id}: {len(self.token_ids)} tokens but {len(self.kept_ids)} kept sets")


@dataclass(slots=True)
class Turn:
    prompt_ids: list[int]
    completion: Completion
    temperature: float = 1.0


@dataclass(slots=True)
class Score:
    """What a reward call came to. `reward` is None unless the status is ok."""

    status: Literal["ok", "error", "timeout"]
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Played:
    """What an environment that talks to the endpoint itself made of a rollout."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)  # the whole conversation; empty = as the endpoint saw it


@dataclass(slots=True)
class Rollout:
    """One attempt at one prompt. `reward` is what training sees, `raw_reward` what the environment said."""

    prompt: Prompt
    index: int  # in its group
    turns: list[Turn]
    status: RolloutStatus = "ok"
    reward: float | None = None
    raw_reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    advantage: float | None = None
    messages: list[Message] = field(default_factory=list)  # the whole conversation, for people and rewards
    reward_s: float = 0.0

    @property
    def rollout_id(self) -> str:
        return f"{self.prompt.group_id}/{self.index}"

    @property
    def scored(self) -> bool:
        return self.status == "ok" and self.reward is not None

    @property
    def completion_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return bool(self.turns) and self.turns[-1].completion.finish_reason == "length"

    @property
    def oldest_version(self) -> int:
        return min((span.version for turn in self.turns for span in turn.completion.spans), default=0)


@dataclass(slots=True)
class RolloutGroup:
    prompt: Prompt
    rollouts: list[Rollout]
    version: int = 0  # the policy version when the group was dispatched
    drop_reason: str | None = None  # uniform-good, uniform-bad, too-few-scored, stale; None = kept

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts if r.reward is not None and r.status == "ok"]


@dataclass(slots=True)
class Sample:
    """One token sequence to train on. All arrays have length T = len(token_ids)."""

    rollout_id: str
    group_id: str
    token_ids: np.ndarray  # [T] int64
    loss_mask: np.ndarray  # [T] bool, true on tokens the policy sampled
    sampler_logprobs: np.ndarray  # [T] float32, 0 where loss_mask is false
    temperatures: np.ndarray  # [T] float32, 1 where loss_mask is false
    advantages: np.ndarray  # [T] float32
    kept_ids: list[list[int] | None] | None = None  # [T]; None = nothing was truncated

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("token_ids", "loss_mask", "sampler_logprobs", "temperatures", "advantages")
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{self.rollout_id}: lengths differ: {lengths}")
        if self.loss_mask.size and self.loss_mask[0]:
            raise ValueError(f"{self.rollout_id}: the first token has no context and cannot be trained")

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Row:
    """Samples laid end to end. `segment_starts` bounds attention; `sequence_ids` says which rollout a token is of.

    What samples of one group begin with lies there once, as a segment of its own, and each of them goes on in a segment
    whose `segment_prefix` names it. Prompt [5, 6] answered by [7, 2] and by [8]:

        token_ids [5, 6, 7, 2, 8]  position_ids [0, 1, 2, 3, 2]  segment_starts [0, 2, 4, 5]  segment_prefix [-1, 0, 0]

    `weights[t]` is the whole aggregation: loss = sum_t weights[t] * token_loss[t], with denominators counted over the
    whole optimizer step, so any split into rows, micro-batches or ranks gives the same gradient.
    """

    token_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64, from 0 in each sample
    segment_starts: np.ndarray  # [S+1] int32, cumulative lengths, first 0, last T
    segment_prefix: np.ndarray  # [S] int32, the segment this one continues, or -1; that one continues none itself
    sequence_ids: np.ndarray  # [T] int64, index into `rollout_ids`; in a shared prefix that of the first rollout
    rollout_ids: list[str]
    loss_mask: np.ndarray  # [T] bool
    sampler_logprobs: np.ndarray  # [T] float32
    temperatures: np.ndarray  # [T] float32
    advantages: np.ndarray  # [T] float32
    weights: np.ndarray  # [T] float64, 0 where loss_mask is false
    kept_ids: list[list[int] | None] | None = None  # [T]
    old_logprobs: np.ndarray | None = None  # [T] float32, filled in when a forward was taken at the start of the batch
    reference_logprobs: np.ndarray | None = None  # [T] float32

    @property
    def tokens(self) -> int:
        """Tokens to compute: what is shared counts once."""
        return len(self.token_ids)

    @property
    def sample_tokens(self) -> int:
        """Tokens of the samples: what is shared counts in each of them."""
        lengths = np.diff(self.segment_starts)
        shared = self.segment_prefix[self.segment_prefix >= 0]
        return int(self.tokens + lengths[shared].sum() - lengths[np.unique(shared)].sum())

    @property
    def gathered_keys(self) -> int:
        """Keys that segments see, each with its prefix; none need gathering where nothing is shared."""
        shared = self.segment_prefix[self.segment_prefix >= 0]
        return int(self.tokens + np.diff(self.segment_starts)[shared].sum()) if len(shared) else 0

    @property
    def predecessors(self) -> np.ndarray:
        """[T] where the token before each one lies, whose state predicts it. The first of a sample has none: it names
        what happens to lie before it, and is never in the loss."""
        before = np.arange(self.tokens) - 1
        tails = np.flatnonzero(self.segment_prefix >= 0)
        before[self.segment_starts[tails]] = self.segment_starts[self.segment_prefix[tails] + 1] - 1
        return before


@dataclass(slots=True)
class Batch:
    """The rows of one optimizer step (one minibatch)."""

    rows: list[Row]

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def sample_tokens(self) -> int:
        return sum(row.sample_tokens for row in self.rows)
