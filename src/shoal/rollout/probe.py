"""Log-probs after a fixed prompt, as a proof that a server serves the weights it was given."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import EngineError

PROBE_TOKENS = 16
# Other requests in the batch change the rounding; bf16 moves a log-prob by this much and other weights by more.
TOLERANCE = 0.1
# In bf16 a small update may leave sixteen log-probs as they were, once; a path that carries nothing leaves them always.
MAX_UNCHANGED = 2


class Probes:
    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[str, list[float]] = {}  # content of the weights → its log-probs; the last two
        self._last: tuple[str, list[float]] | None = None
        self._unchanged = 0

    def judge(self, content: str, values: Sequence[float], version: int) -> None:
        """Raise if the same content answers differently than before, or if new content changes nothing."""
        numbers = [float(value) for value in values]
        known = self._seen.get(content)
        if known is not None:
            apart = max((abs(a - b) for a, b in zip(known, numbers, strict=True)), default=0.0)
            if apart > TOLERANCE:
                raise EngineError(
                    f"{self._name} was given weights it has served before as version {version}, but log-probs after a "
                    f"fixed prompt differ by {apart:.3g}: it does not serve what it was given"
                )
        elif self._last is not None and self._last[1] == numbers:
            self._unchanged += 1
        else:
            self._unchanged = 0
        if self._unchanged >= MAX_UNCHANGED:
            raise EngineError(
                f"{self._name} was given {MAX_UNCHANGED} new weight versions (the last is {version}) and the log-probs "
                "after a fixed prompt have not moved: it does not serve what it was given"
            )
        self._last = (content, numbers)
        self._seen[content] = numbers
        while len(self._seen) > 2:
            self._seen.pop(next(iter(self._seen)))
