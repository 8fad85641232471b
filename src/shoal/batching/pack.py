"""Packs samples into rows and fixes, once, what every token weighs in the step's loss.

Rows hold whole rollouts, so a loss sees every token of a sequence at once; optimizer minibatches hold whole groups. The
weights are the aggregation: denominators are counts over the whole minibatch, taken before any loss drops anything.
Where samples lie in a row is the business of layout.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.batching.layout import PackedRollout, fill_rows, lay_out
from shoal.config.catalogue import AGGREGATIONS
from shoal.types import Batch, Sample


@dataclass(frozen=True, slots=True)
class Totals:
    """Trained tokens, rollouts and groups that have any, over one minibatch. Add those of all ranks before packing."""

    tokens: int = 0
    sequences: int = 0
    prompts: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences, self.prompts + other.prompts)


@dataclass(frozen=True, slots=True)
class Packing:
    """How samples become batches. `max_tokens` is sampling.max_tokens, the norm of seq-mean-token-sum-norm."""

    token_budget: int  # of a row
    aggregation: str
    max_tokens: int
    minibatches: int = 1
    share_prefixes: bool = True  # what samples of a group begin with is computed once a row

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, not {self.aggregation}")
        if self.token_budget < 1 or self.max_tokens < 1 or self.minibatches < 1:
            raise ValueError(
                f"token_budget {self.token_budget}, max_tokens {self.max_tokens}, minibatches {self.minibatches}: "
                "all >= 1"
            )


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
    samples_by_rollout: Sequence[Sequence[Sample]], packing: Packing, totals: Sequence[Totals] | None = None
) -> list[Batch]:
    """One batch an optimizer minibatch, each in rows of at most `packing.token_budget` tokens.

    `totals`, one a minibatch, replaces this rank's own counts by those of all ranks. A sample without a trained token
    has no gradient and is not packed.
    """
    parts = split_minibatches(samples_by_rollout, packing.minibatches)
    counted = [count_totals(part) for part in parts] if totals is None else list(totals)
    if len(counted) != len(parts):
        raise ValueError(f"{len(parts)} minibatches but totals for {len(counted)}")
    return [_make_batch(_collect(part), packing, total) for part, total in zip(parts, counted, strict=True)]


def _collect(samples_by_rollout: Iterable[Sequence[Sample]]) -> list[PackedRollout]:
    rollouts: list[PackedRollout] = []
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
    """What one trained token of the rollout weighs."""
    if packing.aggregation == "token-mean":
        return 1 / totals.tokens
    if packing.aggregation == "token-sum":
        return 1.0
    if packing.aggregation == "seq-mean-token-mean":
        return 1 / (totals.sequences * rollout.trained)
    if packing.aggregation == "seq-mean-token-sum-norm":
        return 1 / (totals.sequences * packing.max_tokens)
    return 1 / (totals.prompts * group_tokens)
