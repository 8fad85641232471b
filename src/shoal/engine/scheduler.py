"""Which request runs in which slot. Host bookkeeping only: no tensors, no model.

Slots 0..rows-1 are the decode batch; a slot without a sequence is a hole that decodes padding until it is refilled or
the batch shrinks over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from shoal.types import Completion, FinishReason, Request, Span

SMALLEST_BATCH = 8
# Sequences are let in a few at a time, not one by one: every prefill holds up whoever decodes.
SHARE_TO_ADMIT = 16


def bucket(count: int) -> int:
    """The rows of a decode batch for `count` slots: powers of two; above 64 their quarters, above 128 their eighths and
    above 512 their sixteenths too. Every size has a graph of its own, and rows that nobody needs cost more the more
    there are."""
    rows = SMALLEST_BATCH
    while rows < count:
        rows *= 2
    step = rows if rows <= 64 else rows // 4 if rows <= 128 else rows // 8 if rows <= 512 else rows // 16
    return -(-max(count, 1) // step) * step


@dataclass
class Sequence:
    """A request being answered."""

    request: Request
    limit: int  # completion tokens at most, after the context was taken into account
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)  # (first token, version): where a span begins
    stopped: bool = False  # by a stop of its own request
    finished: bool = False
    in_flight: int = 0  # decode steps launched whose results are not in yet
    text: str | None = None  # set when a stop string ended it

    def __post_init__(self) -> None:
        self.stops = bool(self.request.sampling.stop or self.request.sampling.stop_token_ids)

    @property
    def length(self) -> int:
        """Tokens of the sequence, the newest of which is not in the cache yet."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    def extend(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((len(self.token_ids), version))
        self.token_ids += token_ids
        self.logprobs += logprobs

    def completion(self, reason: FinishReason, text: str) -> Completion:
        ends = [start for start, _ in self.marks[1:]] + [len(self.token_ids)]
        spans = [Span(start, end, version) for (start, version), end in zip(self.marks, ends, strict=False)]
        return Completion(self.request.request_id, self.token_ids, self.logprobs, spans, reason, text, self.kept_ids)


class Scheduler:
    def __init__(self, slots: int, prefill_tokens: int) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}

    @property
    def rows(self) -> int:
        """Rows of the next decode batch: a bucket that covers every occupied slot."""
        return min(bucket(max(self.running, default=-1) + 1), self.slots)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, as many as the prefill budget takes; equal neighbours count once."""
        admitted: list[Sequence] = []
        if self.running and self.slots - len(self.running) < min(len(self.waiting), self.slots // SHARE_TO_ADMIT):
            return admitted
        free = (slot for slot in range(self.slots) if slot not in self.running)
        tokens, previous = 0, None
        while self.waiting:
            prompt = self.waiting[0].request.prompt_ids
            cost = 0 if prompt == previous else len(prompt)
            slot = next(free, None) if not admitted or tokens + cost <= self.prefill_tokens else None
            if slot is None:
                break
            sequence = self.waiting.popleft()
            sequence.slot = slot
            self.running[slot] = sequence
            admitted.append(sequence)
            tokens, previous = tokens + cost, prompt
        return admitted

    def retire(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self.running[sequence.slot]

    def drop(self, request_ids: Set[str]) -> None:
        """Take requests out, wherever they stand."""
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        for sequence in [s for s in self.running.values() if s.request.request_id in request_ids]:
            self.retire(sequence)

    def compaction(self) -> list[tuple[int, int]]:
        """Moves (source, target) that let the batch shrink to the next bucket; none while requests wait."""
        if self.waiting or not self.running:
            return []
        smaller = min(bucket(len(self.running)), self.slots)
        if smaller >= self.rows:
            return []
        holes = [slot for slot in range(smaller) if slot not in self.running]
        sources = sorted(slot for slot in self.running if slot >= smaller)
        moves = list(zip(sources, holes, strict=False))
        for source, target in moves:
            sequence = self.running.pop(source)
            sequence.slot = target
            self.running[target] = sequence
        return moves
