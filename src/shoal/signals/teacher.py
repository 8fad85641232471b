"""Teachers: log-probs of the sampled tokens under another model, or under the policy with a richer prompt.

Each class implements `core.learn.RowSignal` and fills in `Row.signals["teacher_logprobs"]` and ["teacher_baseline"].
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.core.batching import rollout_samples
from shoal.core.collect import StopRequested
from shoal.core.learn import StepRows
from shoal.core.metrics import Tally
from shoal.core.protocols import PendingResults, Ranks
from shoal.core.ranks import any_rank, deal
from shoal.core.terms import LOG_RATIO_CAP
from shoal.core.types import Rollout, Row
from shoal.signals.rows import trained_by_policy

TEACHER = "teacher_logprobs"
BASELINE = "teacher_baseline"
TICK_S = 1.0
STOP_GRACE_S = 5.0


class ScoringPolicy(Protocol):
    def logprobs(self, rows: Sequence[Row]) -> PendingResults: ...

    def teacher_logprobs(self, rows: Sequence[Row]) -> PendingResults: ...


class Teacher:
    """Base class: measures the time of `_fill`, and computes the baseline of the teacher's signal."""

    _seconds = 0.0

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    async def annotate(self, step: StepRows) -> None:
        began = time.perf_counter()
        missing = await self._fill(step)
        await self._add_baselines([row for batch in step.batches for row in deal(batch.rows, self._ranks)], missing)
        self._seconds = time.perf_counter() - began

    async def _fill(self, step: StepRows) -> frozenset[str]:
        """Write the log-probs into the rows of this rank. Returns the rollouts without a signal."""
        raise NotImplementedError

    async def _add_baselines(self, rows: Sequence[Row], missing: frozenset[str]) -> None:
        """A token's baseline is the weighted mean of teacher - old over the other rollouts of the step, on all ranks.

        It does not depend on the tokens of its own rollout, so the expected gradient stays the same.
        """
        mine = {name: sums for row in rows for name, sums in _gap_sums(row).items() if name not in missing}
        found: dict[str, tuple[float, float]] = {}
        for part in await self._ranks.exchange(msgspec.msgpack.encode(mine)):
            found |= msgspec.msgpack.decode(part, type=dict[str, tuple[float, float]])
        baselines = leave_one_out(found)
        for row in rows:
            of_rollout = np.array([baselines.get(name, 0.0) for name in row.rollout_ids], dtype=np.float32)
            row.signals[BASELINE] = np.where(row.loss_mask, of_rollout[row.sequence_ids], np.float32(0))

    def observe(self, tally: Tally) -> None:
        tally.value("time/teacher", self._seconds)


class LocalTeacher(Teacher):
    """A frozen model on the trainer's device, which scores the packed rows like a reference model."""

    def __init__(self, policy: ScoringPolicy, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._policy = policy

    async def _fill(self, step: StepRows) -> frozenset[str]:
        for row, values in await step.score(self._policy.teacher_logprobs):
            row.signals[TEACHER] = values
        return frozenset()


# Token ids of sequences → log-probs, one per token (the first has no meaning).
AskTeacher = Callable[[list[list[int]]], Awaitable[list[list[float]]]]


class RemoteTeacher(Teacher):
    """A server that returns the log-probs of prompt tokens. Each rank asks for its own rows."""

    def __init__(self, ask: AskTeacher, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._ask = ask

    async def _fill(self, step: StepRows) -> frozenset[str]:
        rows = [row for batch in step.batches for row in deal(batch.rows, self._ranks)]
        places = [(row, at, ids) for row in rows for at, ids in _sequences(row)]
        answers = await self._answers([ids for _, _, ids in places], step.stop)
        for row in rows:
            row.signals[TEACHER] = np.zeros(row.tokens, dtype=np.float32)
        for (row, at, _), logprobs in zip(places, answers, strict=True):
            row.signals[TEACHER][at] = np.array(logprobs, dtype=np.float32)[row.position_ids[at]]
        return frozenset()

    async def _answers(self, sequences: list[list[int]], stop: asyncio.Event) -> list[list[float]]:
        """Raises StopRequested on all ranks if an answer is still missing STOP_GRACE_S after a signal to one of them.

        A server that works answers within that time, and the step is trained.
        """
        asking, stopped = asyncio.ensure_future(self._ask(sequences)), None
        try:
            while True:
                await asyncio.wait({asking}, timeout=TICK_S)
                answers = asking.result() if asking.done() else None
                if not await any_rank(self._ranks, answers is None) and answers is not None:
                    return answers
                if stopped is None and await any_rank(self._ranks, stop.is_set()):
                    stopped = time.monotonic()
                late = stopped is not None and time.monotonic() - stopped >= STOP_GRACE_S
                if await any_rank(self._ranks, late):
                    raise StopRequested
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


def _sequences(row: Row) -> list[tuple[np.ndarray, list[int]]]:
    """For each segment with tokens in the loss: where these are in the row, and the ids of its whole sequence."""
    found = []
    for segment, prefix in enumerate(row.segment_prefix.tolist()):
        start, stop = row.segment_starts[segment : segment + 2].tolist()
        at = start + np.flatnonzero(row.loss_mask[start:stop])
        if len(at):
            first, last = row.segment_starts[prefix : prefix + 2].tolist() if prefix >= 0 else (0, 0)
            found.append((at, [*row.token_ids[first:last].tolist(), *row.token_ids[start:stop].tolist()]))
    return found


class SelfTeacher(Teacher):
    """The policy itself under a richer prompt: the first prompt with the hint of the reward (SDPO, SDFT).

    A rollout without a hint, or whose hint does not fit into a row, has no signal from the teacher: its teacher
    log-probs are its old ones.
    """

    def __init__(self, policy: ScoringPolicy, ranks: Ranks, token_budget: int, context_weight: float = 0.0) -> None:
        super().__init__(ranks)
        self._policy = policy
        self._budget = token_budget
        self._context_weight = context_weight
        self._missing = (0, 0)

    async def _fill(self, step: StepRows) -> frozenset[str]:
        rollouts = [rollout for group in step.groups for rollout in group.scored]
        samples = [
            rollout_samples(hinted, context_weight=self._context_weight)
            for hinted in map(_with_hint, rollouts)
            if hinted is not None
        ]
        samples = [of_rollout for of_rollout in samples if max(s.tokens for s in of_rollout) <= self._budget]
        mine: dict[str, bytes] = {}
        for row, values in await step.score(self._policy.logprobs, step.pack(samples)):
            for index, name in enumerate(row.rollout_ids):
                mine[name] = values[row.loss_mask & (row.sequence_ids == index)].astype(np.float32).tobytes()
        found: dict[str, bytes] = {}
        for part in await self._ranks.exchange(msgspec.msgpack.encode(mine)):
            found |= msgspec.msgpack.decode(part, type=dict[str, bytes])
        for row in (row for batch in step.batches for row in batch.rows):
            row.signals[TEACHER] = self._values_of(row, found)
        self._missing = (len(rollouts) - len(found), len(rollouts))
        return frozenset(rollout.rollout_id for rollout in rollouts if rollout.rollout_id not in found)

    def _values_of(self, row: Row, found: Mapping[str, bytes]) -> np.ndarray:
        values = (row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs).astype(np.float32)
        for index, name in enumerate(row.rollout_ids):
            at = row.loss_mask & (row.sequence_ids == index)
            if name in found:
                values[at] = np.frombuffer(found[name], dtype=np.float32)
        return values

    def observe(self, tally: Tally) -> None:
        super().observe(tally)
        tally.add("teacher/missing_frac", *self._missing)


def _gap_sums(row: Row) -> dict[str, tuple[float, float]]:
    """For each rollout: Σ w·clamp(teacher - old, ±20) over its policy tokens, and Σ w, with w = 1 - exp(old)."""
    old = row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs
    gaps = np.clip(row.signals[TEACHER].astype(np.float64) - old, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    weights = -np.expm1(np.minimum(old.astype(np.float64), 0))
    trained = trained_by_policy(row)
    found = {}
    for index, name in enumerate(row.rollout_ids):
        at = trained & (row.sequence_ids == index)
        found[name] = (float(np.sum(weights[at] * gaps[at])), float(np.sum(weights[at])))
    return found


def leave_one_out(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """For each rollout: the weighted mean over all others; 0 if these have no weight."""
    gaps, weights = (math.fsum(pair[k] for pair in sums.values()) for k in (0, 1))
    return {
        name: (gaps - gap) / (weights - weight) if weights - weight > 1e-9 else 0.0
        for name, (gap, weight) in sums.items()
    }


def _with_hint(rollout: Rollout) -> Rollout | None:
    """The same tokens after another first prompt. None without a hint, or if the prompts do not continue each other."""
    if rollout.hint_ids is None or not rollout.turns:
        return None
    first = rollout.turns[0].prompt_ids
    if any(turn.prompt_ids[: len(first)] != first for turn in rollout.turns):
        return None
    turns = [replace(turn, prompt_ids=[*rollout.hint_ids, *turn.prompt_ids[len(first) :]]) for turn in rollout.turns]
    hinted = replace(rollout, turns=turns)
    return hinted if len(rollout_samples(hinted)) == len(rollout_samples(rollout)) else None


def make_teacher(
    teacher: Any, policy: ScoringPolicy, ranks: Ranks, token_budget: int, context_weight: float, ask: AskTeacher | None
) -> list[Teacher]:
    """The signal that `train.teacher` asks for, if any."""
    if teacher is None:
        return []
    if teacher.itself:
        return [SelfTeacher(policy, ranks, token_budget, context_weight)]
    return [RemoteTeacher(ask, ranks)] if ask is not None else [LocalTeacher(policy, ranks)]
