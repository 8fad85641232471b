"""What changes with the step: temperature, exploration noise, and when to save or evaluate. Pure functions."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TemperatureSchedule:
    start: float = 1.0
    end: float = 1.0
    total_steps: int = 1
    cosine: bool = False

    def __call__(self, step: int) -> float:
        """Temperature of step `step`, counted from 1."""
        if self.start == self.end:
            return self.start
        progress = min(1.0, (step - 1) / max(1, self.total_steps - 1))
        if self.cosine:
            progress = 0.5 * (1 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class NoiseSchedule:
    """QeRL: the run is cut into stages; the first is without noise, the rest fall geometrically from start to end."""

    start: float
    end: float
    stages: int
    total_steps: int

    def __call__(self, step: int) -> float:
        stage = min((step - 1) * self.stages // self.total_steps, self.stages - 1)
        if stage <= 0:
            return 0.0
        if self.stages == 2:
            return self.start
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 2))


@dataclass
class SaveCadence:
    """A checkpoint every so many steps or seconds. Every ten steps if nothing was said; with 0 steps, none."""

    steps: int | None = None
    seconds: float | None = None
    _last: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        if self.seconds is not None:
            return time.monotonic() - self._last >= self.seconds
        every = 10 if self.steps is None else self.steps
        return every > 0 and step % every == 0

    @property
    def off(self) -> bool:
        return self.seconds is None and self.steps == 0

    def saved(self) -> None:
        self._last = time.monotonic()


@dataclass
class EvalCadence:
    """An evaluation every so many steps, or seconds if those are given; the last step always has one."""

    interval: int
    at_start: bool = True
    seconds: float | None = None
    _last: float = field(default_factory=time.monotonic)

    def due(self, step: int, last_step: int) -> bool:
        """After step `step`; step 0 is before the first."""
        if step == 0:
            return self.at_start
        if step == last_step:
            return True
        if self.seconds is None:
            return step % self.interval == 0
        if time.monotonic() - self._last < self.seconds:
            return False
        self._last = time.monotonic()
        return True
