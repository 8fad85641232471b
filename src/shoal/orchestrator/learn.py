"""One training step from kept groups: advantages, samples, rows, forward and backward, optimizer.

Torch runs behind `Policy` on the device's thread; here are only arrays and the order of things.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from shoal.algorithms.advantages import reward_kl
from shoal.batching.micro import micro_batches, smaller
from shoal.batching.pack import Packing, make_batches
from shoal.batching.samples import rollout_samples
from shoal.errors import MemoryStop
from shoal.observability.metrics import Tally
from shoal.orchestrator.ranks import Alone, gather_results, share
from shoal.protocols import PendingResults, Policy, Ranks
from shoal.types import Batch, Rollout, RolloutGroup, Row, Sample

log = logging.getLogger(__name__)
OnDevice = Callable[..., Awaitable[Any]]
Score = Callable[[Sequence[Row]], PendingResults]
Split = Callable[[], list[list[Row]]]  # rows into passes, as many as there is memory for
Launched = TypeVar("Launched")
MAX_LOG_RATIO = 20.0  # as in the losses: its exponential is finite and far beyond any use


class Advantages(Protocol):
    def estimate(self, groups_rewards: list[list[float]]) -> list[list[float]]: ...


@dataclass(frozen=True)
class LearnSettings:
    token_budget: int
    aggregation: str
    max_tokens: int
    minibatches: int = 1
    ppo_epochs: int = 1
    rows_per_micro_batch: int | None = 1  # at most; None = as many as the tokens allow
    micro_batch_tokens: int | None = None  # at most, gathered keys counted in, unless one row alone is larger
    keys_for_token: int = 1  # as many keys, gathered for the answers to a shared prompt, take the memory of a token
    recompute_old: bool = False
    needs_reference: bool = False  # the loss has a KL term
    reward_kl_beta: float = 0.0  # KL folded into the reward instead
    trains: Callable[[Rollout], bool] = lambda _: True  # false: the rollout's tokens stay out of the loss


@dataclass
class Learned:
    """What a step trained. `sample_tokens` counts a shared prompt in every sample that has it. `moved`: some gradient
    was not zero, which it is where all groups are kept and no reward differs from another.

    `policy_logprobs`: rollout id → log-probs under the weights before this step, at the trained tokens, in order.
    """

    trained_rollouts: list[str] = field(default_factory=list)
    trained_tokens: int = 0
    sample_tokens: int = 0
    skipped: bool = False
    moved: bool = False
    policy_logprobs: dict[str, np.ndarray] = field(default_factory=dict)


class Learner:
    def __init__(
        self,
        policy: Policy,
        advantages: Advantages,
        objective: Any,
        settings: LearnSettings,
        on_device: OnDevice,
        ranks: Ranks | None = None,
    ) -> None:
        self._policy = policy
        self._advantages = advantages
        self._objective = objective
        self._settings = settings
        self._on_device = on_device
        self._ranks = ranks or Alone()
        self._most_tokens = settings.micro_batch_tokens  # fewer once memory did not suffice

    async def learn(self, groups: Sequence[RolloutGroup], tally: Tally) -> Learned:
        settings = self._settings
        if settings.reward_kl_beta > 0:
            await self._fold_kl(groups)
        self._assign_advantages(groups)
        samples = [
            rollout_samples(rollout, train=settings.trains(rollout))
            for group in groups
            for rollout in group.rollouts
            if rollout.scored
        ]
        batches = self._batches(samples, settings.minibatches)
        if not batches:
            return Learned()
        await self._annotate(batches)
        return await self._optimise(batches, tally)

    def _assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        estimates = self._advantages.estimate([group.rewards for group in groups])
        for group, advantages in zip(groups, estimates, strict=True):
            scored = [rollout for rollout in group.rollouts if rollout.scored]
            for rollout, advantage in zip(scored, advantages, strict=True):
                rollout.advantage = advantage

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

    async def _fold_kl(self, groups: Sequence[RolloutGroup]) -> None:
        """r -= beta · Σ k1, from the sampler's log-probs and the reference's, before advantages are estimated."""
        rollouts = {r.rollout_id: r for group in groups for r in group.rollouts if r.scored}
        batches = self._batches([rollout_samples(r, advantage=0.0) for r in rollouts.values()], 1)
        rows = [row for batch in batches for row in batch.rows]
        (references,) = await self._scored([self._policy.reference_logprobs], lambda: self._micro_batches(rows))
        for row, reference in zip(rows, references, strict=True):
            for index, rollout_id in enumerate(row.rollout_ids):
                mine = row.loss_mask & (row.sequence_ids == index)
                rollout = rollouts[rollout_id]
                assert rollout.reward is not None
                rollout.reward -= reward_kl(row.sampler_logprobs, reference, mine, self._settings.reward_kl_beta)

    async def _annotate(self, batches: Sequence[Batch]) -> None:
        """Old and reference log-probs, taken once, before the first optimizer step moves the weights."""
        scores: dict[str, Score] = {}
        if self._settings.recompute_old:
            scores["old_logprobs"] = self._policy.logprobs
        if self._settings.needs_reference:
            scores["reference_logprobs"] = self._policy.reference_logprobs
        if not scores:
            return
        rows = [row for micro in self._passes(batches) for row in micro]
        found = await self._scored(list(scores.values()), lambda: self._passes(batches))
        for name, logprobs in zip(scores, found, strict=True):
            for row, values in zip(rows, logprobs, strict=True):
                setattr(row, name, values)

    async def _scored(self, scores: Sequence[Score], split: Split) -> list[list[np.ndarray]]:
        """Log-probs of all rows by each, read when the last pass is under way: the device waits for none of it."""

        async def launch(passes: Sequence[Sequence[Row]]) -> list[list[PendingResults]]:
            return [[await self._on_device(score, micro) for micro in passes] for score in scores]

        found = [await self._on_device(_read_all, of_one) for of_one in await self._fitting(split, launch)]
        return [[values for _, logprobs in of_one for values in logprobs] for of_one in found]

    async def _optimise(self, batches: Sequence[Batch], tally: Tally) -> Learned:
        learned = Learned(sample_tokens=sum(batch.sample_tokens for batch in batches))
        tally.value("tokens/computed", sum(batch.tokens for batch in batches))
        for epoch in range(self._settings.ppo_epochs):
            for number, batch in enumerate(batches):
                # Where old = sampler, the mismatch can only be seen before the first optimizer step of this step.
                source = "old" if epoch == 0 and (self._settings.recompute_old or number == 0) else "none"
                pending = await self._gradient(batch, source)
                outcome = await self._on_device(self._policy.optim_step)
                # Read on the device's thread: a copy from another one would break a graph being captured there.
                mine = await self._on_device(_read_all, pending)
                metrics, logprobs = await gather_results(self._ranks, mine)
                self._report(metrics, outcome, tally, learned)
                _tally_ratios(tally, batch.rows, logprobs, source)
                if epoch == 0:
                    for row, values in zip(batch.rows, logprobs, strict=True):
                        _note_rows(learned, row, values)
        return learned

    async def _gradient(self, batch: Batch, source: str) -> list[PendingResults]:
        """Of one optimizer step."""

        async def launch(passes: Sequence[Sequence[Row]]) -> list[PendingResults]:
            return [await self._forward_backward(micro, source) for micro in passes]

        return await self._fitting(lambda: self._passes([batch]), launch)

    async def _fitting(
        self, split: Split, launch: Callable[[Sequence[Sequence[Row]]], Awaitable[Launched]]
    ) -> Launched:
        """What the plan did not foresee is computed again in smaller micro-batches."""
        while True:
            passes = split()
            try:
                return await launch(passes)
            except MemoryStop:
                if not self._shrink(passes):
                    raise
            # Not before the error is gone: it holds what the pass that failed had made.
            await self._on_device(self._policy.drop_gradient)

    def _shrink(self, passes: Sequence[Sequence[Row]]) -> bool:
        """Half of the largest from now on; false where each is a row already, or where others pass with this rank."""
        fewer = smaller([[self._size(row) for row in rows] for rows in passes])
        if self._policy.passes_together or fewer is None:
            return False
        self._most_tokens = fewer
        log.warning("memory did not suffice: micro-batches have at most %d tokens from now on", self._most_tokens)
        return True

    async def _forward_backward(self, micro: Sequence[Row], source: str) -> Any:
        return await self._on_device(self._policy.forward_backward, micro, self._objective, source)

    def _report(self, metrics: Sequence[Any], outcome: Any, tally: Tally, learned: Learned) -> None:
        for of_micro_batch in metrics:
            tally.add_all(of_micro_batch)
        tally.value("optim/lr", outcome["optim/lr"])
        tally.add("optim/skipped", outcome["optim/skipped"], 0)
        if "optim/grad_norm" in outcome:
            tally.add("optim/grad_norm", outcome["optim/grad_norm"], 1)
        learned.skipped |= bool(outcome["optim/skipped"])
        learned.moved |= outcome.get("optim/grad_norm") != 0

    def _passes(self, batches: Sequence[Batch]) -> list[list[Row]]:
        """This rank's micro-batches. Where ranks pass together all make as many, the last of them perhaps empty."""

        def dealt_to(rank: int) -> list[list[Row]]:
            return self._micro_batches([row for batch in batches for row in share(batch.rows, self._ranks, rank)])

        mine = dealt_to(self._ranks.rank)
        if not self._policy.passes_together:
            return mine
        most = max(len(dealt_to(rank)) for rank in range(self._ranks.world))
        return [*mine, *([] for _ in range(most - len(mine)))]

    def _micro_batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        parts = micro_batches([self._size(row) for row in rows], self._most_tokens, self._settings.rows_per_micro_batch)
        return [list(rows[part.start : part.stop]) for part in parts]

    def _size(self, row: Row) -> int:
        """In tokens. Where a prompt is computed once, attention gathers its keys for every answer still."""
        return row.tokens + -(-row.gathered_keys // self._settings.keys_for_token)


def _read_all(pending: Sequence[PendingResults]) -> list[Any]:
    return [result.read() for result in pending]


def _tally_ratios(tally: Tally, rows: Sequence[Row], policy: Sequence[np.ndarray], source: str) -> None:
    """Largest ratios: sums over rows cannot tell them, and one token far out is what breaks a run."""
    for row, logprobs in zip(rows, policy, strict=True):
        at = row.loss_mask
        old = row.sampler_logprobs if row.old_logprobs is None else row.old_logprobs
        _tally_largest(tally, "policy/ratio_max", logprobs[at] - old[at])
        if source != "none":
            ours = logprobs if row.old_logprobs is None else row.old_logprobs
            _tally_largest(tally, "mismatch/ratio_max", ours[at] - row.sampler_logprobs[at])


def _tally_largest(tally: Tally, name: str, gaps: np.ndarray) -> None:
    if gaps.size and np.isfinite(gaps).all():  # what is not finite is counted as a skipped step
        tally.max(name, float(np.exp(min(float(gaps.max()), MAX_LOG_RATIO))))


def _note_rows(learned: Learned, row: Row, logprobs: np.ndarray) -> None:
    for index, rollout_id in enumerate(row.rollout_ids):
        mine = row.loss_mask & (row.sequence_ids == index)
        learned.trained_rollouts.append(rollout_id)
        learned.trained_tokens += int(mine.sum())
        learned.policy_logprobs[rollout_id] = logprobs[mine]
