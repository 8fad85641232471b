"""One training step over the kept groups: advantages, samples, rows, forward and backward passes, optimizer.

Called by the loop. The arrays here are NumPy; `Policy` runs torch in the device thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from shoal.core.advantages import reward_kl
from shoal.core.batching import Packing, make_batches, micro_batches, rollout_samples, smaller
from shoal.core.collect import StopRequested
from shoal.core.errors import MemoryStop
from shoal.core.metrics import Tally
from shoal.core.protocols import PendingResults, Policy, Ranks
from shoal.core.ranks import SingleProcess, deal, gather_results
from shoal.core.terms import LOG_RATIO_CAP
from shoal.core.types import Batch, Rollout, RolloutGroup, Row, Sample

log = logging.getLogger(__name__)
OnDevice = Callable[..., Awaitable[Any]]
LogprobPass = Callable[[Sequence[Row]], PendingResults]
Split = Callable[[], list[list[Row]]]  # splits rows into micro-batches that fit into memory
Launched = TypeVar("Launched")
Launch = Callable[[Sequence[Sequence[Row]]], Awaitable[Launched]]


class Advantages(Protocol):
    def assign(self, groups: Sequence[RolloutGroup]) -> None:
        """Set `advantage`, and `token_advantages` if they differ within a rollout, of every scored rollout."""


@dataclass
class StepRows:
    """What a signal can see of a step, and how it computes."""

    groups: Sequence[RolloutGroup]
    batches: Sequence[Batch]
    pack: Callable[[Sequence[Sequence[Sample]]], list[Batch]]  # into one batch; [] if nothing is trained
    _score: Callable[[LogprobPass, Sequence[Batch]], Awaitable[list[tuple[Row, np.ndarray]]]]
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set when a signal asks the run to stop

    async def score(
        self, function: LogprobPass, batches: Sequence[Batch] | None = None
    ) -> list[tuple[Row, np.ndarray]]:
        """A forward pass over this rank's rows of the step, or of other batches. All ranks call it together."""
        return await self._score(function, self.batches if batches is None else batches)


class RowSignal(Protocol):
    """A further input of the loss: it writes `Row.signals` before the first optimizer step changes the weights."""

    async def annotate(self, step: StepRows) -> None:
        """Every rank annotates at least its own rows. A wait for a server ends with StopRequested, on all ranks."""

    def observe(self, tally: Tally) -> None:
        """Called at the end of the step, with the same metrics on all ranks."""


@dataclass(frozen=True)
class LearnSettings:
    """How a step is split into batches and micro-batches, and which log-probs it needs."""

    token_budget: int  # tokens per row
    aggregation: str
    max_tokens: int  # sampling.max_tokens
    minibatches: int = 1  # optimizer steps per epoch
    ppo_epochs: int = 1
    rows_per_micro_batch: int | None = 1  # maximum; None = limited by tokens only
    micro_batch_tokens: int | None = None  # maximum, including gathered keys; a larger row has its own micro-batch
    keys_for_token: int = 1  # gathered keys (Row.gathered_keys) that need the memory of one token
    recompute_old: bool = False  # compute old_logprobs with a forward pass instead of using the sampler's
    needs_reference: bool = False  # the loss has a KL term
    reward_kl_beta: float = 0.0  # weight of a KL that is subtracted from the reward
    trains: Callable[[Rollout], bool] = lambda _: True  # false = no token of the rollout is in the loss
    context_cross_entropy: float = 0.0  # weight of the environment's tokens after the first prompt


@dataclass
class StepResult:
    """What one step trained."""

    trained_rollouts: list[str] = field(default_factory=list)
    trained_tokens: int = 0
    sample_tokens: int = 0  # counts a shared prompt once per sample
    skipped: bool = False  # an optimizer step was skipped because the gradient was not finite
    moved: bool = False  # some gradient was not zero; all are zero if only zero-variance groups were kept
    # By rollout id: log-probs of the trained tokens, in order, under the weights before this step.
    policy_logprobs: dict[str, np.ndarray] = field(default_factory=dict)


class Learner:
    """Turns kept groups into optimizer steps."""

    def __init__(
        self,
        policy: Policy,
        advantages: Advantages,
        objective: Any,
        settings: LearnSettings,
        on_device: OnDevice,
        ranks: Ranks | None = None,
        signals: Sequence[RowSignal] = (),
    ) -> None:
        self._policy = policy
        self._signals = signals
        self._advantages = advantages
        self._objective = objective
        self._settings = settings
        self._on_device = on_device
        self._ranks = ranks or SingleProcess()
        self._max_tokens = settings.micro_batch_tokens  # reduced when the device runs out of memory

    async def learn(
        self, groups: Sequence[RolloutGroup], tally: Tally, stop: asyncio.Event | None = None
    ) -> StepResult:
        """`stop` ends waits for a server: StopRequested then, with groups and weights unchanged."""
        settings = self._settings
        before = [(r, r.reward, r.advantage, r.token_advantages) for group in groups for r in group.rollouts]
        if settings.reward_kl_beta > 0:
            await self._subtract_kl(groups)
        self._advantages.assign(groups)
        samples = [
            rollout_samples(rollout, train=settings.trains(rollout), context_weight=settings.context_cross_entropy)
            for group in groups
            for rollout in group.scored
        ]
        batches = self._batches(samples, settings.minibatches)
        if not batches:
            return StepResult()
        try:
            await self._annotate(groups, batches, stop or asyncio.Event())
        except StopRequested:
            for rollout, reward, advantage, per_token in before:  # the checkpoint may contain the group
                rollout.reward, rollout.advantage, rollout.token_advantages = reward, advantage, per_token
            raise
        result = await self._optimise(batches, tally)
        for signal in self._signals:
            signal.observe(tally)
        return result

    def _batches(self, samples: Sequence[Sequence[Sample]], minibatches: int) -> list[Batch]:
        settings = self._settings
        packing = Packing(
            token_budget=settings.token_budget,
            aggregation=settings.aggregation,
            max_tokens=settings.max_tokens,
            minibatches=minibatches,
            share_prefixes=self._policy.shares_prefixes,
        )
        return make_batches(samples, packing)

    async def _subtract_kl(self, groups: Sequence[RolloutGroup]) -> None:
        """reward -= beta · Σ k1 between sampler and reference, before advantages are estimated."""
        rollouts = {r.rollout_id: r for group in groups for r in group.rollouts if r.scored}
        batches = self._batches([rollout_samples(r, advantage=0.0) for r in rollouts.values()], 1)
        rows = [row for batch in batches for row in batch.rows]
        (references,) = await self._all_logprobs([self._policy.reference_logprobs], lambda: self._micro_batches(rows))
        for row, reference in zip(rows, references, strict=True):
            for index, rollout_id in enumerate(row.rollout_ids):
                mine = row.loss_mask & (row.sequence_ids == index)
                rollout = rollouts[rollout_id]
                assert rollout.reward is not None
                rollout.reward -= reward_kl(row.sampler_logprobs, reference, mine, self._settings.reward_kl_beta)

    async def _annotate(self, groups: Sequence[RolloutGroup], batches: Sequence[Batch], stop: asyncio.Event) -> None:
        """Compute old and reference log-probs once, before the first optimizer step changes the weights."""
        passes: dict[str, LogprobPass] = {}
        if self._settings.recompute_old:
            passes["old_logprobs"] = self._policy.logprobs
        if self._settings.needs_reference:
            passes["reference_logprobs"] = self._policy.reference_logprobs
        rows = [row for micro in self._passes(batches) for row in micro]
        if passes:
            found = await self._all_logprobs(list(passes.values()), lambda: self._passes(batches))
            for name, logprobs in zip(passes, found, strict=True):
                for row, values in zip(rows, logprobs, strict=True):
                    setattr(row, name, values)

        async def score(function: LogprobPass, batches: Sequence[Batch]) -> list[tuple[Row, np.ndarray]]:
            mine = [row for micro in self._passes(batches) for row in micro]
            (values,) = await self._all_logprobs([function], lambda: self._passes(batches))
            return list(zip(mine, values, strict=True))

        for signal in self._signals:
            await signal.annotate(StepRows(groups, batches, lambda samples: self._batches(samples, 1), score, stop))

    async def _all_logprobs(self, functions: Sequence[LogprobPass], split: Split) -> list[list[np.ndarray]]:
        """Log-probs of all rows by each function. They are read after the last pass, so that the device never waits."""

        async def launch(passes: Sequence[Sequence[Row]]) -> list[list[PendingResults]]:
            return [[await self._on_device(function, micro) for micro in passes] for function in functions]

        found = [await self._on_device(_read_all, pending) for pending in await self._fit_memory(split, launch)]
        return [[values for _, logprobs in results for values in logprobs] for results in found]

    async def _optimise(self, batches: Sequence[Batch], tally: Tally) -> StepResult:
        result = StepResult(sample_tokens=sum(batch.sample_tokens for batch in batches))
        tally.value("tokens/computed", sum(batch.tokens for batch in batches))
        for epoch in range(self._settings.ppo_epochs):
            for number, batch in enumerate(batches):
                # If the sampler's log-probs stand for the old ones, only the first optimizer step sees the mismatch.
                source = "old" if epoch == 0 and (self._settings.recompute_old or number == 0) else "none"
                pending = await self._gradient(batch, source)
                outcome = await self._on_device(self._policy.optim_step)
                # Read in the device thread: a copy by another thread would break a CUDA graph capture.
                mine = await self._on_device(_read_all, pending)
                metrics, logprobs = await gather_results(self._ranks, mine)
                self._report(metrics, outcome, tally, result)
                _tally_ratios(tally, batch.rows, logprobs, source)
                if epoch == 0:
                    for row, values in zip(batch.rows, logprobs, strict=True):
                        _record_row(result, row, values)
        return result

    async def _gradient(self, batch: Batch, source: str) -> list[PendingResults]:
        """Accumulate the gradient of one optimizer step."""

        async def launch(passes: Sequence[Sequence[Row]]) -> list[PendingResults]:
            accumulate = self._policy.forward_backward
            return [await self._on_device(accumulate, micro, self._objective, source) for micro in passes]

        return await self._fit_memory(lambda: self._passes([batch]), launch)

    async def _fit_memory(self, split: Split, launch: Launch[Launched]) -> Launched:
        """Run all passes. If the device runs out of memory, compute them again in smaller micro-batches."""
        while True:
            passes = split()
            try:
                return await launch(passes)
            except MemoryStop:
                if not self._shrink(passes):
                    raise
            # After the `except` block: the error keeps the tensors of the failed pass alive.
            await self._on_device(self._policy.discard_gradient)

    def _shrink(self, passes: Sequence[Sequence[Row]]) -> bool:
        """Halve the limit. False if every micro-batch is one row, or if other ranks must make the same passes."""
        fewer = smaller([[self._size(row) for row in rows] for rows in passes])
        if self._policy.passes_together or fewer is None:
            return False
        self._max_tokens = fewer
        log.warning("out of memory: micro-batches now have at most %d tokens", self._max_tokens)
        return True

    def _report(self, metrics: Sequence[Any], outcome: Any, tally: Tally, result: StepResult) -> None:
        for pairs in metrics:
            tally.add_all(pairs)
        tally.value("optim/lr", outcome["optim/lr"])
        tally.add("optim/skipped", outcome["optim/skipped"], 0)
        if "optim/grad_norm" in outcome:
            tally.add("optim/grad_norm", outcome["optim/grad_norm"], 1)
        result.skipped |= bool(outcome["optim/skipped"])
        result.moved |= outcome.get("optim/grad_norm") != 0

    def _passes(self, batches: Sequence[Batch]) -> list[list[Row]]:
        """This rank's micro-batches. With sharded weights, ranks that have fewer append empty ones."""

        def dealt_to(rank: int) -> list[list[Row]]:
            return self._micro_batches([row for batch in batches for row in deal(batch.rows, self._ranks, rank)])

        mine = dealt_to(self._ranks.rank)
        if not self._policy.passes_together:
            return mine
        most = max(len(dealt_to(rank)) for rank in range(self._ranks.world))
        return [*mine, *([] for _ in range(most - len(mine)))]

    def _micro_batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        parts = micro_batches([self._size(row) for row in rows], self._max_tokens, self._settings.rows_per_micro_batch)
        return [list(rows[part.start : part.stop]) for part in parts]

    def _size(self, row: Row) -> int:
        """Memory of a row, in tokens. Attention gathers the keys of a shared prompt once per completion."""
        return row.tokens + -(-row.gathered_keys // self._settings.keys_for_token)


def _read_all(pending: Sequence[PendingResults]) -> list[Any]:
    return [result.read() for result in pending]


def _tally_ratios(tally: Tally, rows: Sequence[Row], policy: Sequence[np.ndarray], source: str) -> None:
    """The largest ratios. A mean hides them, and one extreme token can destabilise a run."""
    for row, logprobs in zip(rows, policy, strict=True):
        at = row.loss_mask & (row.signals["cross_entropy"] == 0) if "cross_entropy" in row.signals else row.loss_mask
        old = row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs
        _tally_largest(tally, "policy/ratio_max", logprobs[at] - old[at])
        if source != "none":
            ours = logprobs if row.old_logprobs is None else row.old_logprobs
            _tally_largest(tally, "mismatch/ratio_max", ours[at] - row.sampler_logprobs[at])


def _tally_largest(tally: Tally, name: str, gaps: np.ndarray) -> None:
    if gaps.size and np.isfinite(gaps).all():  # a non-finite value is counted as a skipped step
        tally.max(name, float(np.exp(min(float(gaps.max()), LOG_RATIO_CAP))))


def _record_row(result: StepResult, row: Row, logprobs: np.ndarray) -> None:
    for index, rollout_id in enumerate(row.rollout_ids):
        mine = row.loss_mask & (row.sequence_ids == index)
        result.trained_rollouts.append(rollout_id)
        result.trained_tokens += int(mine.sum())
        result.policy_logprobs[rollout_id] = logprobs[mine]
