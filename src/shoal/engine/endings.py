"""Where a sequence ends, and what its next token may be: ends of the model, stops of the request, min_tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.engine.scheduler import Sequence as Running
from shoal.types import SamplingParams


class Endings:
    def __init__(self, eos_token_ids: Sequence[int], detokenize: Callable[[list[int]], str]) -> None:
        self._eos = set(eos_token_ids)
        self._detokenize = detokenize

    def of(self, sampling: SamplingParams) -> list[int]:
        return sorted(self._eos | set(sampling.stop_token_ids))

    def allowed(self, sequence: Running, count: int, kept: list[int] | None) -> list[int]:
        """What token number `count` of the sequence is drawn from, as `Completion.kept_ids` spells it."""
        ids = [i for i in kept or () if i >= 0]
        if not ids and count < sequence.request.sampling.min_tokens:
            return [~i for i in self.of(sequence.request.sampling)]
        return ids

    def taken(self, sequence: Running, token_ids: list[int]) -> int:
        """How many of the tokens are taken: up to the first that is, or completes, a stop of this request."""
        sampling, so_far = sequence.request.sampling, sequence.token_ids
        for taken in range(1, len(token_ids) + 1):
            if len(so_far) + taken < sampling.min_tokens:
                continue
            named = token_ids[taken - 1] in sampling.stop_token_ids
            if named or (sampling.stop and self._cut(sequence, so_far + token_ids[:taken])):
                sequence.stopped = True
                return taken
        return len(token_ids)

    def _cut(self, sequence: Running, token_ids: list[int]) -> bool:
        """Whether the newest token completes a stop string; the sequence's text then ends before it."""
        stops = sequence.request.sampling.stop
        # A character takes at most four tokens, so this tail holds every string that ends here.
        tail = self._detokenize(token_ids[-(4 * max(map(len, stops)) + 4) :])
        if not any(stop in tail for stop in stops):
            return False
        text = self._detokenize(token_ids)
        cuts = [text.find(stop) for stop in stops if stop in text]
        if cuts:
            sequence.text = text[: min(cuts)]
        return bool(cuts)
