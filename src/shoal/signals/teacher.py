"""Teachers: log-probs of the sampled tokens under another model, or under the policy with a richer prompt.

Each class implements `core.learn.RowSignal` and fills in `Row.signals["teacher_logprobs"]`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.core.batching import rollout_samples
from shoal.core.collect import StopRequested
from shoal.core.deadlines import unless_stopped
from shoal.core.learn import StepRows
from shoal.core.metrics import Tally
from shoal.core.protocols import PendingResults, Ranks
from shoal.core.ranks import any_rank, deal
from shoal.core.types import Rollout, Row

TEACHER = "teacher_logprobs"


class ScoringPolicy(Protocol):
    def logprobs(self, rows: Sequence[Row]) -> PendingResults: ...

    def teacher_logprobs(self, rows: Sequence[Row]) -> PendingResults: ...


class Teacher:
    """Base class: measures the time of `_fill`."""

    _seconds = 0.0

    async def annotate(self, step: StepRows) -> None:
        began = time.perf_counter()
        await self._fill(step)
        self._seconds = time.perf_counter() - began

    async def _fill(self, step: StepRows) -> None:
        raise NotImplementedError

    def observe(self, tally: Tally) -> None:
        tally.value("time/teacher", self._seconds)


class LocalTeacher(Teacher):
    """A frozen model on the trainer's device, which scores the packed rows like a reference model."""

    def __init__(self, policy: ScoringPolicy) -> None:
        self._policy = policy

    async def _fill(self, step: StepRows) -> None:
        for row, values in await step.score(self._policy.teacher_logprobs):
            row.signals[TEACHER] = values


# Token ids of sequences → log-probs, one per token (the first has no meaning).
AskTeacher = Callable[[list[list[int]]], Awaitable[list[list[float]]]]


class RemoteTeacher(Teacher):
    """A server that returns the log-probs of prompt tokens. Each rank asks for its own rows."""

    def __init__(self, ask: AskTeacher, ranks: Ranks) -> None:
        self._ask = ask
        self._ranks = ranks

    async def _fill(self, step: StepRows) -> None:
        rows = [row for batch in step.batches for row in deal(batch.rows, self._ranks)]
        places = [(row, at, ids) for row in rows for at, ids in _sequences(row)]
        answers = await unless_stopped(self._ask([ids for _, _, ids in places]), step.stop)
        if await any_rank(self._ranks, answers is None) or answers is None:
            raise StopRequested
        for row in rows:
            row.signals[TEACHER] = np.zeros(row.tokens, dtype=np.float32)
        for (row, at, _), logprobs in zip(places, answers, strict=True):
            row.signals[TEACHER][at] = np.array(logprobs, dtype=np.float32)[row.position_ids[at]]


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
        self._policy = policy
        self._ranks = ranks
        self._budget = token_budget
        self._context_weight = context_weight
        self._missing = (0, 0)

    async def _fill(self, step: StepRows) -> None:
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
    return [RemoteTeacher(ask, ranks)] if ask is not None else [LocalTeacher(policy)]
