"""From rollouts to samples, batches and micro-batches, with the loss weight of every token. The learner calls it.

A row has whole rollouts, so a loss sees all tokens of a sequence; a minibatch has whole groups. The weights contain the
aggregation: their denominators are counts over the minibatch, before a loss drops any token. `layout` places samples in
rows. Nothing is tokenised here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shoal.core.layout import PackedRollout, by_group, fill_rows, lay_out
from shoal.core.types import Batch, LossKind, Rollout, Sample, Turn


@dataclass(slots=True)
class _SampleBuilder:
    """A sample under construction. A piece is a run of tokens that are all context or all sampled."""

    token_ids: list[int] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int] | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the pieces
    sampled: list[bool] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)  # this and the next two: one per token
    cross_entropy: list[float] = field(default_factory=list)
    ignored: list[bool] = field(default_factory=list)
    truncated: bool = False  # some token was not sampled from the whole vocabulary

    def append(self, turn: Turn, advantages: Sequence[float], kind: LossKind, context_weight: float) -> None:
        """`context_weight`: cross-entropy weight of the tokens before the completion that are not in the sample yet."""
        context = turn.prompt_ids[len(self.token_ids) :]
        self._extend(context, False, [0.0] * len(context), 1.0, None)
        completion = turn.completion
        self._extend(completion.token_ids, True, completion.logprobs, turn.temperature, completion.kept_ids)
        count = len(completion.token_ids)
        self.advantages += [*([0.0] * len(context)), *advantages]
        self.cross_entropy += [*([context_weight] * len(context)), *([float(kind == "cross_entropy")] * count)]
        self.ignored += [*([False] * len(context)), *([kind == "ignore"] * count)]

    def _extend(
        self, ids: list[int], sampled: bool, logprobs: list[float], temperature: float, kept_ids: list[list[int]] | None
    ) -> None:
        self.token_ids.extend(ids)
        self.sampler_logprobs.extend(logprobs)
        self.kept_ids.extend([None] * len(ids) if kept_ids is None else kept_ids)
        self.lengths.append(len(ids))
        self.sampled.append(sampled)
        self.temperatures.append(temperature)
        self.truncated |= bool(kept_ids)


def rollout_samples(
    rollout: Rollout, *, train: bool = True, advantage: float | None = None, context_weight: float = 0.0
) -> list[Sample]:
    """The samples of one rollout, in order.

    A conversation is one sample as long as every prompt starts with the exact token ids before it. Otherwise (such as a
    chat template that removes earlier reasoning) a new sample starts. Each sampled token is trained in one sample. With
    `train` false no token is in the loss. `advantage` replaces the rollout's own, before advantages are known.
    `context_weight`: the cross-entropy weight of the tokens that the environment adds after the first prompt.
    """
    value = rollout.advantage if advantage is None else advantage
    if value is None and train:
        raise ValueError(f"{rollout.rollout_id} has no advantage yet")
    per_token = rollout.token_advantages if advantage is None else None
    drafts: list[_SampleBuilder] = []
    for number, turn in enumerate(rollout.turns):
        starts = not drafts or turn.prompt_ids[: len(drafts[-1].token_ids)] != drafts[-1].token_ids
        if starts:
            drafts.append(_SampleBuilder())
        constant = [0.0 if value is None else value] * len(turn.completion.token_ids)
        kind: LossKind = "policy" if rollout.kinds is None else rollout.kinds[number]
        # A prompt is not trained, nor is a conversation that is repeated at the start of a new sample.
        weight = 0.0 if starts else context_weight
        drafts[-1].append(turn, constant if per_token is None else per_token[number], kind, weight)
    return [_finish(rollout, draft, train) for draft in drafts if draft.token_ids]


def _finish(rollout: Rollout, draft: _SampleBuilder, train: bool) -> Sample:
    cross_entropy = np.array(draft.cross_entropy, dtype=np.float32)
    sampled = np.repeat(np.array(draft.sampled, dtype=bool), draft.lengths)
    mask = ((sampled & ~np.array(draft.ignored, dtype=bool)) | (cross_entropy > 0)) & train
    temperatures = np.repeat(np.array(draft.temperatures, dtype=np.float32), draft.lengths)
    mask[0] = False  # after an empty prompt, the first sampled token has no context
    return Sample(
        rollout_id=rollout.rollout_id,
        group_id=rollout.prompt.group_id,
        token_ids=np.array(draft.token_ids, dtype=np.int64),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, np.array(draft.sampler_logprobs, dtype=np.float32), np.float32(0)),
        temperatures=np.where(mask, temperatures, np.float32(1)),
        advantages=np.array(draft.advantages, dtype=np.float32),
        kept_ids=draft.kept_ids if draft.truncated else None,
        signals={"cross_entropy": cross_entropy} if cross_entropy.any() else {},
    )


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean")


@dataclass(frozen=True, slots=True)
class Totals:
    """Trained tokens of one minibatch, and the rollouts and groups that have any."""

    tokens: int = 0
    sequences: int = 0
    prompts: int = 0


@dataclass(frozen=True, slots=True)
class Packing:
    """How samples become batches."""

    token_budget: int  # tokens per row
    aggregation: str
    max_tokens: int  # sampling.max_tokens, the denominator of seq-mean-token-sum-norm
    minibatches: int = 1
    share_prefixes: bool = True  # store the common prefix of a group once per row

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {self.aggregation}")
        if self.token_budget < 1 or self.max_tokens < 1 or self.minibatches < 1:
            raise ValueError(f"token_budget, max_tokens and minibatches must be >= 1: {self}")


def count_totals(samples_by_rollout: Iterable[Sequence[Sample]]) -> Totals:
    """The counts for the denominators of one minibatch."""
    rollouts = _collect(samples_by_rollout)
    groups = {rollout.group_id for rollout in rollouts}
    return Totals(sum(rollout.trained for rollout in rollouts), len(rollouts), len(groups))


def split_minibatches(samples_by_rollout: Iterable[Sequence[Sample]], minibatches: int) -> list[list[list[Sample]]]:
    """At most `minibatches` parts of whole groups, in order, with nearly equal numbers of groups. No part is empty."""
    groups = by_group(_collect(samples_by_rollout))
    parts = min(minibatches, len(groups))
    bounds = [len(groups) * part // parts for part in range(parts + 1)] if parts else []
    return [[rollout.samples for group in groups[start:end] for rollout in group] for start, end in pairwise(bounds)]


def make_batches(samples_by_rollout: Sequence[Sequence[Sample]], packing: Packing) -> list[Batch]:
    """One batch per minibatch. Samples without a trained token are left out."""
    parts = split_minibatches(samples_by_rollout, packing.minibatches)
    return [_make_batch(_collect(part), packing, count_totals(part)) for part in parts]


def _collect(samples_by_rollout: Iterable[Sequence[Sample]]) -> list[PackedRollout]:
    rollouts: list[PackedRollout] = []
    seen: set[str] = set()
    for samples in samples_by_rollout:
        ids = {(sample.rollout_id, sample.group_id) for sample in samples}
        if len(ids) > 1:
            raise ValueError(f"samples of several rollouts are given as one: {sorted(ids)}")
        trainable = [sample for sample in samples if sample.loss_mask.any()]
        if not trainable:
            continue
        rollout_id, group_id = ids.pop()
        if rollout_id in seen:
            raise ValueError(f"rollout {rollout_id} is given twice; a rollout is trained at most once")
        seen.add(rollout_id)
        rollouts.append(PackedRollout(rollout_id, group_id, trainable))
    return rollouts


def _make_batch(rollouts: list[PackedRollout], packing: Packing, totals: Totals) -> Batch:
    group_tokens: Counter[str] = Counter()
    for rollout in rollouts:
        group_tokens[rollout.group_id] += rollout.trained
    weights = {r.rollout_id: _weight(r, packing, totals, group_tokens[r.group_id]) for r in rollouts}
    rows = fill_rows(rollouts, packing.token_budget, packing.share_prefixes)
    return Batch([lay_out(chunks, weights) for chunks in rows])


def _weight(rollout: PackedRollout, packing: Packing, totals: Totals, group_tokens: int) -> float:
    """The weight of each trained token of the rollout."""
    if packing.aggregation == "token-mean":
        return 1 / totals.tokens
    if packing.aggregation == "token-sum":
        return 1.0
    if packing.aggregation == "seq-mean-token-mean":
        return 1 / (totals.sequences * rollout.trained)
    if packing.aggregation == "seq-mean-token-sum-norm":
        return 1 / (totals.sequences * packing.max_tokens)
    return 1 / (totals.prompts * group_tokens)


def micro_batches(sizes: Sequence[int], tokens: int | None, max_rows: int | None) -> list[range]:
    """Consecutive rows in few micro-batches of similar size. None = no limit.

    A row with more than `tokens` tokens has its own micro-batch.
    """
    bound = sum(sizes)
    if tokens is not None:
        count = len(_fill(sizes, tokens, max_rows))
        bound = bisect_left(range(tokens), True, key=lambda bound: len(_fill(sizes, bound, max_rows)) <= count)
    return _fill(sizes, bound, max_rows)


def smaller(parts: Sequence[Sequence[int]]) -> int | None:
    """Half the size of the largest micro-batch, given the sizes of their rows; None if each has one row."""
    return max(map(sum, parts)) // 2 if max(map(len, parts)) > 1 else None


def _fill(sizes: Sequence[int], bound: int, max_rows: int | None) -> list[range]:
    """Consecutive rows as long as they stay within the limits."""
    parts: list[range] = []
    filled = 0
    for at, size in enumerate(sizes):
        if parts and filled + size <= bound and (max_rows is None or len(parts[-1]) < max_rows):
            parts[-1], filled = range(parts[-1].start, at + 1), filled + size
        else:
            parts.append(range(at, at + 1))
            filled = size
    return parts
