"""The data of Shoal: plain records without torch. Properties only derive sizes, totals and indices.

The policy answers a *prompt* with a *group* of *rollouts*. A rollout has one or more *turns*, each a prompt and a
*completion* in token ids. Rollouts become *samples* (one token sequence each), samples are packed into *rows*, and rows
form a *batch* (one optimizer step).

Example: one rollout of one turn with prompt ids [5, 6] and completion ids [7, 2] gives

    Turn(prompt_ids=[5, 6], completion=Completion(token_ids=[7, 2], logprobs=[-.1, -.3], ...))
    Sample(token_ids=[5, 6, 7, 2], loss_mask=[0, 0, 1, 1], sampler_logprobs=[0, 0, -.1, -.3], ...)

Index t of a per-token array describes `token_ids[t]`: `sampler_logprobs[t]` is the log-prob of `token_ids[t]` given all
tokens before it. The first token of a sample has no context and is never in the loss. In shapes, T is the number of
tokens and S the number of segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = dict[str, Any]  # a chat message in the format of OpenAI: role, content, tool calls
Tools = list[dict[str, Any]] | None  # functions that the policy may call, as OpenAI tool schemas
FinishReason = Literal["stop", "length", "abort"]
RolloutStatus = Literal["ok", "error", "timeout", "excluded"]
LossKind = Literal["policy", "cross_entropy", "ignore"]  # how the tokens of a turn are trained


@dataclass(frozen=True, slots=True)
class Task:
    """One example of an environment, JSON-compatible."""

    messages: list[Message]  # the conversation that the policy continues
    data: dict[str, Any] = field(default_factory=dict)  # what the reward needs, such as the expected answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task that was dispatched. (env, index, epoch, attempt) identifies a group; attempt counts its replays."""

    env: str  # name of the environment
    index: int  # position in the split
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
    """How to sample one completion. Every value is explicit: engines apply no defaults of their own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 = off
    min_p: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Whether top-p, top-k or min-p removes tokens from the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion requested from an engine."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Span:
    """Completion tokens [start, end) were sampled with weight version `version`."""

    start: int
    end: int
    version: int


@dataclass(slots=True)
class Completion:
    """The result of a request: token ids, and the log-prob of each under the distribution that it was sampled from."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]  # which version sampled which tokens; covers all tokens
    finish_reason: FinishReason
    text: str = ""
    # Per token, the ids it was sampled from: [3, 9] = only these (top-p, top-k, min-p); [~2] = all except 2
    # (min_tokens); [] = all. None = all ids, for every token.
    kept_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{self.request_id}: {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs")
        if self.kept_ids is not None and len(self.kept_ids) != len(self.token_ids):
            raise ValueError(f"{self.request_id}: {len(self.token_ids)} tokens but {len(self.kept_ids)} kept sets")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A text whose tokens from `start` (at least 1) on are scored."""

    token_ids: list[int]
    start: int = 1
    temperature: float = 1.0  # 0 counts as 1
    top: int = 0  # how many of the most likely tokens are reported per position
    kept_ids: list[list[int]] | None = None  # of the last tokens, as in Completion


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The log-prob of each scored token, and the ids and log-probs of the most likely tokens at its position."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(slots=True)
class Turn:
    """One exchange with the policy, in exact token ids."""

    prompt_ids: list[int]
    completion: Completion
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward in detail, which an environment may return instead of a number or of named parts.

    The total is `total` if given, else the weighted sum of `parts`, else the sum over `turns` or `tokens`.
    """

    total: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    turns: list[float] | None = None  # one per turn of the policy
    tokens: list[list[float]] | None = None  # one per sampled token, by turn
    kinds: list[LossKind] | None = None  # one per turn
    hint: str | None = None  # feedback or a demonstration, which only a teacher sees (train.teacher.self)


@dataclass(slots=True)
class Score:
    """The result of a reward call. With status ok, a reward of None excludes the rollout from training."""

    status: Literal["ok", "error", "timeout"]
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # named components, logged as reward/part/<name>
    part_weights: dict[str, float] = field(default_factory=dict)  # of the parts in the reward; 1 if not named
    error: str | None = None
    seconds: float = 0.0
    turns: list[float] | None = None  # these four as in Reward
    tokens: list[list[float]] | None = None
    kinds: list[LossKind] | None = None
    traceback: str = ""  # of the error
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """The result of a rollout whose environment sends its own requests to the endpoint."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)  # the conversation; empty = as the endpoint recorded it
    error: str | None = None  # of this rollout, if the environment made others of its group


@dataclass(slots=True)
class Rollout:
    """One attempt at one prompt."""

    prompt: Prompt
    index: int  # in the group
    turns: list[Turn]
    status: RolloutStatus = "ok"
    reward: float | None = None  # used for training: raw_reward after shaping and KL
    raw_reward: float | None = None  # returned by the environment
    parts: dict[str, float] = field(default_factory=dict)
    part_weights: dict[str, float] = field(default_factory=dict)  # 1 if not named
    error: str | None = None
    advantage: float | None = None
    messages: list[Message] = field(default_factory=list)  # the conversation, for rewards and the report
    reward_s: float = 0.0  # duration of the reward call
    turn_rewards: list[float] | None = None
    token_rewards: list[list[float]] | None = None  # by turn
    token_advantages: list[list[float]] | None = None  # by turn; None = `advantage` for every token
    kinds: list[LossKind] | None = None  # by turn; None = policy
    traceback: str = ""  # of the error
    hint_ids: list[int] | None = None  # the first prompt with the hint of its reward, for a teacher

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


ZERO_VARIANCE = {
    "uniform-good": "zero-variance group (all good)",
    "uniform-bad": "zero-variance group (all bad)",
    "uniform": "zero-variance group",
}
# Why a group is not trained: the key on disk and in queries, and the words that people see.
DROP_REASONS = {
    **ZERO_VARIANCE,
    "too-few-scored": "group with fewer than two rewards",
    "stale": "stale group",
    "filtered": "group rejected by orch.groups.filter",
}


@dataclass(slots=True)
class RolloutGroup:
    """All rollouts of one prompt. Advantages compare a rollout with the others of its group."""

    prompt: Prompt
    rollouts: list[Rollout]
    version: int = 0  # weight version when the group was dispatched
    drop_reason: str | None = None  # a key of DROP_REASONS; None = kept
    max_reward: float | None = None  # of the environment; None = unknown

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.scored]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the scored rollouts."""
        return [r.reward for r in self.rollouts if r.reward is not None and r.status == "ok"]


@dataclass(slots=True)
class Sample:
    """One token sequence to train on. All arrays have length T."""

    rollout_id: str
    group_id: str
    token_ids: np.ndarray  # [T] int64
    loss_mask: np.ndarray  # [T] bool, true for tokens that are trained, by the policy loss or by cross-entropy
    sampler_logprobs: np.ndarray  # [T] float32, 0 where loss_mask is false
    temperatures: np.ndarray  # [T] float32, 1 where loss_mask is false
    advantages: np.ndarray  # [T] float32
    kept_ids: list[list[int] | None] | None = None  # [T], candidates as in Completion; None = the whole vocabulary
    signals: dict[str, np.ndarray] = field(default_factory=dict)  # [T] float32 each, as in Row

    def __post_init__(self) -> None:
        names = ("token_ids", "loss_mask", "sampler_logprobs", "temperatures", "advantages")
        lengths = {name: len(getattr(self, name)) for name in names}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"{self.rollout_id}: lengths differ: {lengths}")
        if self.loss_mask.size and self.loss_mask[0]:
            raise ValueError(f"{self.rollout_id}: the first token has no context and cannot be trained")

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Row:
    """Concatenated samples. Attention stays inside a segment and its prefix.

    Samples of one group share their prompt: it is stored once as a segment, and each sample continues in a segment
    whose `segment_prefix` points to it. Example: prompt [5, 6] with the completions [7, 2] and [8]:

        token_ids [5, 6, 7, 2, 8]  position_ids [0, 1, 2, 3, 2]  segment_starts [0, 2, 4, 5]  segment_prefix [-1, 0, 0]

    `weights[t]` contains the whole aggregation: loss = sum_t weights[t] * token_loss[t]. Its denominators are counted
    over the whole optimizer step, so any split into rows, micro-batches or ranks gives the same gradient.
    """

    token_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64, starts at 0 in each sample
    segment_starts: np.ndarray  # [S+1] int32, cumulative lengths, first 0, last T
    segment_prefix: np.ndarray  # [S] int32, index of the prefix segment, or -1; a prefix has no prefix itself
    sequence_ids: np.ndarray  # [T] int64, index into `rollout_ids`; a shared prefix has the first of its rollouts
    rollout_ids: list[str]
    loss_mask: np.ndarray  # [T] bool
    sampler_logprobs: np.ndarray  # [T] float32
    temperatures: np.ndarray  # [T] float32
    advantages: np.ndarray  # [T] float32
    weights: np.ndarray  # [T] float64, 0 where loss_mask is false
    kept_ids: list[list[int] | None] | None = None  # [T]
    old_logprobs: np.ndarray | None = None  # [T] float32, None = the sampler's log-probs are used
    reference_logprobs: np.ndarray | None = None  # [T] float32
    # Further inputs of the loss, [T] float32 each; a name is absent if the run does not use it: `cross_entropy` (weight
    # of a token trained by cross-entropy, 0 for the policy loss), `entropy_coef`, `top_entropy` (1 = the policy loss
    # counts), `teacher_logprobs`.
    signals: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens to compute: a shared prefix counts once."""
        return len(self.token_ids)

    @property
    def sample_tokens(self) -> int:
        """Tokens of the samples: a shared prefix counts once per sample."""
        lengths = np.diff(self.segment_starts)
        shared = self.segment_prefix[self.segment_prefix >= 0]
        return int(self.tokens + lengths[shared].sum() - lengths[np.unique(shared)].sum())

    @property
    def gathered_keys(self) -> int:
        """Attention keys copied so that each segment follows its prefix; 0 if the row shares no prefix."""
        shared = self.segment_prefix[self.segment_prefix >= 0]
        return int(self.tokens + np.diff(self.segment_starts)[shared].sum()) if len(shared) else 0

    @property
    def predecessors(self) -> np.ndarray:
        """[T], index of the token before each one, whose hidden state predicts it.

        The first token of a sample has none. Its entry is meaningless, and the loss never uses it.
        """
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
