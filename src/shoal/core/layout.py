"""Places samples in rows. The common prefix of a group is stored once per row, and each sample continues from it.

Called by `batching`. G completions of R tokens to a prompt of P tokens need P + ΣR tokens instead of G·P + ΣR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.types import Row, Sample


@dataclass(frozen=True, slots=True)
class PackedRollout:
    """The samples of one rollout that have trained tokens. They stay in one row."""

    rollout_id: str
    group_id: str
    samples: list[Sample]

    @property
    def trained(self) -> int:  # |y|
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rollouts in one row whose samples all start with the same `prefix` tokens."""

    rollouts: list[PackedRollout]
    prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.prefix + sum(_tail_tokens(rollout, self.prefix) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens [start, stop) of a sample. `prefix`: index of the segment with the tokens before start, or -1."""

    sample: Sample
    start: int
    stop: int
    sequence: int
    prefix: int = -1

    def cut(self, name: str) -> np.ndarray:
        return getattr(self.sample, name)[self.start : self.stop]

    def signal(self, name: str) -> np.ndarray:
        values = self.sample.signals.get(name)
        return np.zeros(self.stop - self.start, np.float32) if values is None else values[self.start : self.stop]

    def kept_ids(self) -> list[list[int] | None]:
        kept = self.sample.kept_ids
        return [None] * (self.stop - self.start) if kept is None else kept[self.start : self.stop]


def fill_rows(rollouts: Sequence[PackedRollout], token_budget: int, share_prefixes: bool) -> list[list[Chunk]]:
    """The chunks of each row. A rollout with several samples may exceed the budget; it then has its own row."""
    for rollout in rollouts:
        longest = max(sample.tokens for sample in rollout.samples)
        if longest > token_budget:
            raise ValueError(f"a sample of {rollout.rollout_id} has {longest} tokens, a row holds {token_budget}")
    if share_prefixes:
        chunks = [chunk for group in by_group(rollouts) for chunk in _split_group(group, token_budget)]
    else:
        chunks = [Chunk([rollout]) for rollout in rollouts]
    rows = _first_fit([chunk.tokens for chunk in chunks], token_budget)
    return [[chunks[index] for index in row] for row in rows]


def lay_out(chunks: Sequence[Chunk], weights: dict[str, float]) -> Row:
    """Make one row. `weights`: the weight of a trained token, by rollout id."""
    segments = _segments(chunks)
    lengths = [segment.stop - segment.start for segment in segments]
    mask = np.concatenate([segment.cut("loss_mask") for segment in segments])
    per_segment = np.array([weights[segment.sample.rollout_id] for segment in segments], dtype=np.float64)
    truncated = any(segment.sample.kept_ids is not None for segment in segments)
    signals = {name for segment in segments for name in segment.sample.signals}
    return Row(
        token_ids=np.concatenate([segment.cut("token_ids") for segment in segments]),
        position_ids=np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in segments]),
        segment_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        segment_prefix=np.array([segment.prefix for segment in segments], dtype=np.int32),
        sequence_ids=np.repeat(np.array([segment.sequence for segment in segments], dtype=np.int64), lengths),
        rollout_ids=[rollout.rollout_id for chunk in chunks for rollout in chunk.rollouts],
        loss_mask=mask,
        sampler_logprobs=np.concatenate([segment.cut("sampler_logprobs") for segment in segments]),
        temperatures=np.concatenate([segment.cut("temperatures") for segment in segments]),
        advantages=np.concatenate([segment.cut("advantages") for segment in segments]),
        weights=np.where(mask, np.repeat(per_segment, lengths), 0.0),
        kept_ids=[kept for segment in segments for kept in segment.kept_ids()] if truncated else None,
        signals={name: np.concatenate([segment.signal(name) for segment in segments]) for name in sorted(signals)},
    )


def _segments(chunks: Sequence[Chunk]) -> list[_Segment]:
    segments: list[_Segment] = []
    sequence = 0
    for chunk in chunks:
        samples = [(sequence + i, sample) for i, rollout in enumerate(chunk.rollouts) for sample in rollout.samples]
        sequence += len(chunk.rollouts)
        shared, prefix = 0, -1
        if chunk.prefix and len(samples) > 1:
            shared, prefix = chunk.prefix, len(segments)
            segments.append(_Segment(samples[0][1], 0, shared, samples[0][0]))
        segments += [_Segment(sample, shared, sample.tokens, owner, prefix) for owner, sample in samples]
    return segments


def by_group(rollouts: Sequence[PackedRollout]) -> list[list[PackedRollout]]:
    groups: dict[str, list[PackedRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return list(groups.values())


def _split_group(group: list[PackedRollout], token_budget: int) -> list[Chunk]:
    """One chunk if the group fits into a row, otherwise several, each with its own copy of the prefix."""
    prefix = _common_prefix([sample for rollout in group for sample in rollout.samples])
    if not prefix:
        return [Chunk([rollout]) for rollout in group]
    parts = _first_fit([_tail_tokens(rollout, prefix) for rollout in group], token_budget - prefix)
    return [Chunk([group[index] for index in part], prefix) for part in parts]


def _common_prefix(samples: Sequence[Sample]) -> int:
    """Number of tokens that all samples start with. Trained tokens are not shared: each sample has its own."""
    shared = samples[0].token_ids[: min(int(sample.loss_mask.argmax()) for sample in samples)]
    for sample in samples[1:]:
        differing = np.flatnonzero(shared != sample.token_ids[: len(shared)])
        shared = shared[: differing[0]] if differing.size else shared
    return len(shared)


def _tail_tokens(rollout: PackedRollout, prefix: int) -> int:
    return sum(sample.tokens - prefix for sample in rollout.samples)


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices per bin: first fit, longest first, ties in the order given. An oversized item has its own bin."""
    bins: list[list[int]] = []
    space: list[int] = []  # left in each bin
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found = next((b for b, free in enumerate(space) if sizes[item] <= free), None)
        if found is None:
            bins.append([item])
            space.append(capacity - sizes[item])
        else:
            bins[found].append(item)
            space[found] -= sizes[item]
    return bins
