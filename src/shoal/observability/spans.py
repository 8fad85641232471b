"""Where the time of a step goes: named phases that may nest, overlap and run in several threads or tasks at once.

Used by the orchestrator. The time of a phase is the wall time during which at least one block of that name was open, so
sixty-four rollouts running together count once; different phases may overlap, and then add up to more than the step.
Idle is the wall time during which no phase was open at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "reward", "train", "sync", "eval", "save")


class Phases:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._guard = threading.Lock()
        self._open: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._idle = 0.0
        self._window_start = self._last = now()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise ValueError(f"unknown phase {phase!r}; one of {', '.join(PHASES)}")
        with self._guard:
            self._advance()
            self._open[phase] = self._open.get(phase, 0) + 1
            self._seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            with self._guard:
                self._advance()
                self._open[phase] -= 1
                if not self._open[phase]:
                    del self._open[phase]

    def take(self) -> dict[str, float]:
        """The time/* metrics since the last take. Phases still open go on into the next window."""
        with self._guard:
            self._advance()
            taken = {"time/step": self._last - self._window_start}
            taken |= {f"time/{phase}": self._seconds[phase] for phase in PHASES if phase in self._seconds}
            taken["time/idle"] = self._idle
            self._seconds = dict.fromkeys(self._open, 0.0)
            self._idle = 0.0
            self._window_start = self._last
            return taken

    def _advance(self) -> None:
        now = self._now()
        elapsed = max(0.0, now - self._last)
        self._last = now
        for phase in self._open:
            self._seconds[phase] += elapsed
        if not self._open:
            self._idle += elapsed


def throughput(metrics: dict[str, float], trained_tokens: float | None = None) -> dict[str, float]:
    """throughput/* from the tokens and times of a step; absent where no time was spent.

    `trained_tokens` are those of the samples, prompts included, as if nothing were shared: what was learned from in
    that time. What it cost to compute them is `tokens/computed`.
    """
    rates = {}
    if metrics.get("time/rollout") and "tokens/completion" in metrics:
        rates["throughput/rollout_tok_s"] = metrics["tokens/completion"] / metrics["time/rollout"]
    if metrics.get("time/train") and trained_tokens is not None:
        rates["throughput/train_tok_s"] = trained_tokens / metrics["time/train"]
    return rates
