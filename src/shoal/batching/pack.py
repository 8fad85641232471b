"""Packs samples into rows and fixes, once, what every token weighs in the step's loss.

Rows hold whole rollouts, so a loss sees every token of a sequence at once; optimizer minibatches hold whole groups. The
weights are the aggregation: denominators are counts over the whole minibatch, taken before any loss drops anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.config.catalogue import AGGREGATIONS
from shoal.types import Batch, Row, Sample


@dataclass(frozen=True, slots=True)
class Totals:
    """Trained tokens, rollouts and groups that have any, over one minibatch. Add those of all ranks before packing."""

    tokens: int = 0
    sequences: int = 0
    prompts: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences, self.prompts + other.prompts)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """The samples of one rollout that have something to train: the unit that is never split."""

    rollout_id: str
    group_id: str
    samples: list[Sample]
    tokens: int  # of all samples, as they take room in a row
    trained: int  # |y|


def count_totals(samples_by_rollout: Iterable[Sequence[Sample]]) -> Totals:
    """What one minibatch's denominators are made of, on this rank."""
    rollouts = _collect(samples_by_rollout)
    groups = {rollout.group_id for rollout in rollouts}
    return Totals(sum(rollout.trained for rollout in rollouts), len(rollouts), len(groups))


def split_minibatches(samples_by_rollout: Iterable[Sequence[Sample]], minibatches: int) -> list[list[list[Sample]]]:
    """Whole groups, in order, in at most `minibatches` parts of nearly equal numbers of groups; no part is empty."""
    groups: dict[str, list[list[Sample]]] = {}
    for rollout in _collect(samples_by_rollout):
        groups.setdefault(rollout.group_id, []).append(rollout.samples)
    parts = min(minibatches, len(groups))
    ordered = list(groups.values())
    bounds = [len(ordered) * part // parts for part in range(parts + 1)] if parts else []
    return [[samples for group in ordered[start:end] for samples in group] for start, end in pairwise(bounds)]


def make_batches(
    samples_by_rollout: Sequence[Sequence[Sample]],
    *,
    token_budget: int,
    aggregation: str,
    max_tokens: int,
    minibatches: int = 1,
    totals: Sequence[Totals] | None = None,
) -> list[Batch]:
    """One batch an optimizer minibatch, at most `minibatches`, each in rows of at most `token_budget` tokens.

    `max_tokens` is sampling.max_tokens, the norm of seq-mean-token-sum-norm. `totals`, one a minibatch, replaces this
    rank's own counts by those of all ranks. A sample without a trained token has no gradient and is not packed.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {aggregation}")
    if token_budget < 1 or max_tokens < 1 or minibatches < 1:
        raise ValueError(f"token_budget {token_budget}, max_tokens {max_tokens}, minibatches {minibatches}: all >= 1")
    parts = split_minibatches(samples_by_rollout, minibatches)
    counted = [count_totals(part) for part in parts] if totals is None else list(totals)
    if len(counted) != len(parts):
        raise ValueError(f"{len(parts)} minibatches but totals for {len(counted)}")
    return [
        _make_batch(_collect(part), token_budget, _Weigher(aggregation, max_tokens, total))
        for part, total in zip(parts, counted, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Weigher:
    """What one trained token of a rollout weighs."""

    aggregation: str
    max_tokens: int
    totals: Totals

    def weight(self, rollout: _Rollout, group_tokens: int) -> float:
        if self.aggregation == "token-mean":
            return 1 / self.totals.tokens
        if self.aggregation == "token-sum":
            return 1.0
        if self.aggregation == "seq-mean-token-mean":
            return 1 / (self.totals.sequences * rollout.trained)
        if self.aggregation == "seq-mean-token-sum-norm":
            return 1 / (self.totals.sequences * self.max_tokens)
        return 1 / (self.totals.prompts * group_tokens)


def _collect(samples_by_rollout: Iterable[Sequence[Sample]]) -> list[_Rollout]:
    rollouts: list[_Rollout] = []
    seen: set[str] = set()
    for samples in samples_by_rollout:
        ids = {(sample.rollout_id, sample.group_id) for sample in samples}
        if len(ids) > 1:
            raise ValueError(f"samples of several rollouts given as one: {sorted(ids)}")
        trainable = [sample for sample in samples if sample.loss_mask.any()]
        if not trainable:
            continue
        rollout_id, group_id = ids.pop()
        if rollout_id in seen:
            raise ValueError(f"rollout {rollout_id} is given twice; a rollout is trained at most once")
        seen.add(rollout_id)
        tokens = sum(sample.tokens for sample in trainable)
        trained = sum(int(sample.loss_mask.sum()) for sample in trainable)
        rollouts.append(_Rollout(rollout_id, group_id, trainable, tokens, trained))
    return rollouts


def _make_batch(rollouts: list[_Rollout], token_budget: int, weigher: _Weigher) -> Batch:
    group_tokens: Counter[str] = Counter()
    for rollout in rollouts:
        group_tokens[rollout.group_id] += rollout.trained
    weights = {r.rollout_id: weigher.weight(r, group_tokens[r.group_id]) for r in rollouts}
    return Batch([_lay_out(contents, weights) for contents in _first_fit(rollouts, token_budget)])


def _first_fit(rollouts: list[_Rollout], token_budget: int) -> list[list[_Rollout]]:
    """First fit, longest first; ties in the order given, so that packing is the same every time."""
    for rollout in rollouts:
        longest = max(sample.tokens for sample in rollout.samples)
        if longest > token_budget:
            raise ValueError(f"a sample of {rollout.rollout_id} has {longest} tokens, a row holds {token_budget}")
    rows: list[list[_Rollout]] = []
    room: list[int] = []
    for rollout in sorted(rollouts, key=lambda r: -r.tokens):
        index = next((i for i, free in enumerate(room) if rollout.tokens <= free), None)
        if index is None:
            # A rollout of several samples may be longer than a row; it then has one to itself.
            rows.append([rollout])
            room.append(token_budget - rollout.tokens)
        else:
            rows[index].append(rollout)
            room[index] -= rollout.tokens
    return rows


def _lay_out(contents: list[_Rollout], weights: dict[str, float]) -> Row:
    samples = [sample for rollout in contents for sample in rollout.samples]
    lengths = [sample.tokens for sample in samples]
    sequence = [index for index, rollout in enumerate(contents) for _ in rollout.samples]
    mask = np.concatenate([sample.loss_mask for sample in samples])
    per_sample = np.array([weights[sample.rollout_id] for sample in samples], dtype=np.float64)
    kept = [kept for sample in samples for kept in (sample.kept_ids or [None] * sample.tokens)]
    return Row(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        segment_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sequence_ids=np.repeat(np.array(sequence, dtype=np.int64), lengths),
        rollout_ids=[rollout.rollout_id for rollout in contents],
        loss_mask=mask,
        sampler_logprobs=np.concatenate([sample.sampler_logprobs for sample in samples]),
        temperatures=np.concatenate([sample.temperatures for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        weights=np.where(mask, np.repeat(per_sample, lengths), 0.0),
        kept_ids=kept if any(sample.kept_ids is not None for sample in samples) else None,
    )
