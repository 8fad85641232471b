"""Assign requests to slots, and detect where sequences end. Host bookkeeping only: no tensors, no model.

Slots 0..rows-1 are the decode batch. A slot without a sequence decodes padding until it is refilled or the batch
shrinks. `StopChecker` applies EOS ids, stop ids, stop strings and min_tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass, field

from shoal.core.types import Completion, FinishReason, Request, SamplingParams, Span


class StopChecker:
    def __init__(self, eos_token_ids: AnySequence[int], detokenize: Callable[[list[int]], str]) -> None:
        self._eos = set(eos_token_ids)
        self._detokenize = detokenize

    def of(self, sampling: SamplingParams) -> list[int]:
        return sorted(self._eos | set(sampling.stop_token_ids))

    def allowed(self, sequence: Sequence, count: int, kept: list[int] | None) -> list[int]:
        """The ids that token `count` of the sequence may be drawn from, in the format of `Completion.kept_ids`."""
        ids = [i for i in kept or () if i >= 0]
        if not ids and count < sequence.request.sampling.min_tokens:
            return [~i for i in self.of(sequence.request.sampling)]
        return ids

    def taken(self, sequence: Sequence, token_ids: list[int]) -> int:
        """The number of tokens up to and including the first that is a stop id or completes a stop string."""
        sampling, so_far = sequence.request.sampling, sequence.token_ids
        for taken in range(1, len(token_ids) + 1):
            if len(so_far) + taken < sampling.min_tokens:
                continue
            named = token_ids[taken - 1] in sampling.stop_token_ids
            if named or (sampling.stop and self._cut(sequence, so_far + token_ids[:taken])):
                sequence.stopped = True
                return taken
        return len(token_ids)

    def _cut(self, sequence: Sequence, token_ids: list[int]) -> bool:
        """Whether the newest token completes a stop string; if so, the text is cut before the stop string."""
        stops = sequence.request.sampling.stop
        # A character takes at most four tokens, so this tail contains any stop string that ends here.
        tail = self._detokenize(token_ids[-(4 * max(map(len, stops)) + 4) :])
        if not any(stop in tail for stop in stops):
            return False
        text = self._detokenize(token_ids)
        cuts = [text.find(stop) for stop in stops if stop in text]
        if cuts:
            sequence.text = text[: min(cuts)]
        return bool(cuts)


SMALLEST_BATCH = 8
# Sequences are admitted in groups: every prefill delays the running sequences.
SHARE_TO_ADMIT = 16


def bucket(count: int) -> int:
    """Rows of a decode batch for `count` slots: powers of two, with steps of 1/4 of them above 64, 1/8 above 128 and
    1/16 above 512. Each size needs a CUDA graph, and unused rows cost more in large batches."""
    rows = SMALLEST_BATCH
    while rows < count:
        rows *= 2
    step = rows if rows <= 64 else rows // 4 if rows <= 128 else rows // 8 if rows <= 512 else rows // 16
    return -(-max(count, 1) // step) * step


@dataclass
class Sequence:
    """A request in the engine, waiting or running."""

    request: Request
    limit: int  # most completion tokens, also limited by the context length
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)  # (first token, version) of each span
    stopped: bool = False  # by a stop id or stop string of the request
    finished: bool = False
    in_flight: int = 0  # launched decode steps whose results are not read yet
    text: str | None = None  # set when a stop string ended it

    def __post_init__(self) -> None:
        self.stops = bool(self.request.sampling.stop or self.request.sampling.stop_token_ids)

    @property
    def length(self) -> int:
        """Tokens of the sequence; the newest one is not in the cache yet."""
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
        """Rows of the next decode batch: the bucket that covers all occupied slots."""
        return min(bucket(max(self.running, default=-1) + 1), self.slots)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, up to the prefill budget; consecutive equal prompts count once."""
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
        """Remove requests, waiting or running."""
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        for sequence in [s for s in self.running.values() if s.request.request_id in request_ids]:
            self.retire(sequence)

    def compaction(self) -> list[tuple[int, int]]:
        """Slot moves (source, target) that shrink the batch to a smaller bucket; none while requests wait."""
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
