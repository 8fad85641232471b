"""Learning-rate schedules as one pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear", "cosine", "wsd"]
# The decay phase of warm-up–stable–decay is the last fifth of the run.
WSD_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class Schedule:
    peak: float
    total_steps: int
    kind: Kind = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.total_steps - math.ceil(WSD_DECAY_FRACTION * self.total_steps))
            if step <= start:
                return self.peak
        progress = min(1.0, (step - start) / max(1, self.total_steps - start))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * shape)
