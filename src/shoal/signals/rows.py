"""Further inputs of the loss, written into the rows of a step before its first optimizer step.

Each class implements `core.learn.RowSignal`. The learner calls them; `make_row_signals` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from shoal.core.learn import StepRows
from shoal.core.metrics import Tally
from shoal.core.protocols import PendingResults, Ranks
from shoal.core.terms import EntropyBonus
from shoal.core.types import Row


class HasSignalState(Protocol):
    """The policy: what it has in `signal_state` is part of every checkpoint."""

    signal_state: dict[str, float]

    def entropies(self, rows: Sequence[Row]) -> PendingResults: ...


class EntropyCoefficient:
    """The weight of the entropy bonus: fixed, or adapted to a target after every step (Skywork-OR1, TRL), with `gain`
    as a controller with proportional, integral and derivative terms (PID Lagrangian)."""

    def __init__(self, bonus: EntropyBonus, policy: HasSignalState) -> None:
        self._bonus = bonus
        self._state = policy

    @property
    def coef(self) -> float:
        return self._state.signal_state.get("entropy_coef", self._bonus.coef)

    @property
    def applied(self) -> float:
        """The weight in this step. Without `gain`, it is 0 if the entropy of the last step was above the target."""
        bonus, state = self._bonus, self._state.signal_state
        if bonus.target is None:
            return bonus.coef
        last = state.get("entropy")
        if last is None:
            return 0.0
        if bonus.gain == 0:
            return self.coef if last <= bonus.target else 0.0
        predicted = last + (last - state.get("entropy_before", last))
        return min(max(self.coef + bonus.gain * (bonus.target - predicted), 0.0), bonus.coef_max)

    async def annotate(self, step: StepRows) -> None:
        self._now = self.applied
        if self._now == 0:
            return
        for row in (row for batch in step.batches for row in batch.rows):
            row.signals["entropy_coef"] = np.full(row.tokens, self._now, dtype=np.float32)

    def observe(self, tally: Tally) -> None:
        tally.value("policy/entropy_coef", self._now)
        bonus, entropy = self._bonus, tally.reduce().get("policy/entropy")
        if bonus.target is None or entropy is None:
            return
        change = bonus.delta if entropy <= bonus.target else -bonus.delta
        coef = min(max(self.coef + change, bonus.coef_min), bonus.coef_max)
        before = self._state.signal_state.get("entropy", entropy)
        self._state.signal_state.update(entropy_coef=coef, entropy=entropy, entropy_before=before)


class TopEntropy:
    """Keeps the policy loss of the tokens with the highest entropy, chosen over each optimizer step (all ranks)."""

    def __init__(self, fraction: float, policy: HasSignalState, ranks: Ranks) -> None:
        self._fraction = fraction
        self._policy = policy
        self._ranks = ranks

    async def annotate(self, step: StepRows) -> None:
        found = {id(row): values for row, values in await step.score(self._policy.entropies)}
        for batch in step.batches:
            rows = [(row, found[id(row)]) for row in batch.rows if id(row) in found]
            mine = [values[trained_by_policy(row)] for row, values in rows]
            local = np.concatenate([np.zeros(0, dtype=np.float32), *mine]).astype(np.float32)
            parts = await self._ranks.exchange(local.tobytes())
            threshold = entropy_threshold(np.concatenate([np.frombuffer(p, np.float32) for p in parts]), self._fraction)
            for row, values in rows:
                row.signals["top_entropy"] = (values >= threshold).astype(np.float32)

    def observe(self, tally: Tally) -> None: ...


def entropy_threshold(entropies: np.ndarray, fraction: float) -> float:
    """The smallest entropy at or above the (1 - fraction) quantile of N tokens. The tokens at or above it are the
    floor(fraction · (N - 1)) + 1 largest ones, and ties."""
    if not len(entropies):
        return 0.0
    count = 1 + int(np.floor(fraction * (len(entropies) - 1) + 1e-9))
    return float(np.sort(entropies)[-count])


def trained_by_policy(row: Row) -> np.ndarray:
    """[T] bool, tokens under the policy loss."""
    kind = row.signals.get("cross_entropy")
    return row.loss_mask if kind is None else row.loss_mask & (kind == 0)


def make_row_signals(loss: Any, policy: HasSignalState, ranks: Ranks) -> list[Any]:
    """The signals that `train.loss.entropy` asks for."""
    bonus: EntropyBonus = loss.entropy
    signals: list[Any] = [EntropyCoefficient(bonus, policy)] if bonus.on else []
    return [*signals, TopEntropy(bonus.top_fraction, policy, ranks)] if bonus.top_fraction < 1 else signals
