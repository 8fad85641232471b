"""Collects the groups of a step: dispatches prompts as the admission rule allows, and drops or keeps finished groups.

Every dispatched group is settled exactly once: kept, dropped with a reason, surplus, or dispatched again after a
resume. In synchronous mode a step takes its first useful groups in prompt order, so the result does not depend on the
order of completion. Replacements for zero-variance groups are dispatched before they are needed. Groups after the last
one taken are surplus: they are cancelled and counted, and the stream returns to the first of their prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shoal.core.admission import Admission
from shoal.core.advantages import is_uniform
from shoal.core.deadlines import wait_without_suspension
from shoal.core.errors import DeadlineError
from shoal.core.prompts import PromptStream
from shoal.core.types import ZERO_VARIANCE, Prompt, Rollout, RolloutGroup

RunGroup = Callable[[Prompt], Awaitable[RolloutGroup]]


def zero_variance_kind(group: RolloutGroup) -> str | None:
    """The drop reason of a zero-variance group, also if the group is kept; None for other groups.

    The rewards that are trained (after shaping) decide whether they are all equal. Raw rewards decide whether that is
    good: the highest reward of the environment is good. If that is unknown, 1 and above is good, 0 and below is bad.
    """
    if len(group.rewards) < 2 or not is_uniform(group.rewards):
        return None
    lowest = min((r.raw_reward for r in group.scored if r.raw_reward is not None), default=0.0)
    if group.max_reward is not None:
        return "uniform-good" if lowest >= group.max_reward - 1e-9 else "uniform-bad"
    return "uniform-good" if lowest >= 1 else "uniform-bad" if lowest <= 0 else "uniform"


class StopRequested(Exception):
    """A signal stopped the run while groups were in flight."""


@dataclass(frozen=True)
class GroupRules:
    """Which groups are dropped and replaced."""

    uniform: Literal["refill", "skip", "keep"] = "refill"  # for zero-variance groups
    max_refill: int = 3  # replacements per step, in batches
    keep: Callable[[RolloutGroup], bool] | None = None  # filter written by the user
    deadline_s: float = 600.0
    lockstep: bool = False  # with several ranks: settle whole rounds, so that all ranks decide alike
    # What must be equal in all rollouts for zero variance.
    compares: Callable[[Rollout], Hashable] = lambda rollout: rollout.reward


@dataclass
class CollectedGroups:
    """All groups that finished for a step."""

    kept: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)
    surplus: int = 0  # groups that were dispatched and not needed; their number depends on timing

    @property
    def all(self) -> list[RolloutGroup]:
        return [*self.kept, *self.dropped]


class Collector:
    """Runs groups ahead of training as far as the admission rule allows."""

    def __init__(self, run_group: RunGroup, stream: PromptStream, admission: Admission, rules: GroupRules) -> None:
        self._run_group = run_group
        self._stream = stream
        self._rules = rules
        self.admission = admission
        self._running: dict[asyncio.Task[RolloutGroup], tuple[int, Prompt]] = {}
        self._finished: list[asyncio.Task[RolloutGroup]] = []  # subset of _running, in order of completion
        self._arrival = asyncio.Event()
        self._ready: list[tuple[int, RolloutGroup]] = []  # kept and not yet trained, with the order of dispatch
        self._settled: list[tuple[int, RolloutGroup]] = []  # settled in this step, kept or dropped
        self._again: list[Prompt] = []  # prompts that were in flight when the checkpoint was written
        self._failure: Exception | None = None  # raised by an early dispatch
        self._order = 0  # of dispatch
        self._begun: list[tuple[int, Prompt, dict[str, Any] | None]] = []  # in this step; where the stream stood
        self._surplus: list[asyncio.Task[RolloutGroup]] = []  # cancelled
        self._seen = [0.0, 0.0]  # useful and settled groups; halved at each step, so that recent steps weigh more
        self._refills_left = 0
        self._given_up = 0  # groups dropped in this step and not replaced
        self._zero_variance = 0  # groups of this step whose rewards are all equal

    async def collect(
        self,
        version: int,
        stop: asyncio.Event,
        advance: Callable[[float], None] = lambda _: None,
        refilling: Callable[[int, float], None] = lambda *_: None,
    ) -> CollectedGroups:
        """The groups of one step. There are fewer than a step takes only if all replacements are used up.

        `advance` receives the number of groups that became ready. While zero-variance groups are replaced, `refilling`
        receives the number of groups still needed and the share of zero-variance groups so far.
        """
        if self._failure is not None:
            raise self._failure
        wanted = self.admission.groups_per_step
        self._refills_left, self._given_up = self._rules.max_refill * wanted, 0
        self._seen = [number / 2 for number in self._seen]
        stale = self._drop_stale(version)
        advance(min(len(self._ready), wanted))
        while len(self._ready) < wanted or (self.admission.synchronous and self._running):
            self._dispatch(version, ahead=True)
            if not self._running:
                break
            before = min(len(self._ready), wanted)
            await self._settle_finished(version, stop)
            self._cancel_surplus(wanted)
            advance(min(len(self._ready), wanted) - before)
            needed = wanted - len(self._ready) - self._given_up
            if self._rules.uniform == "refill" and self._zero_variance and needed > 0:
                refilling(needed, self._zero_variance / len(self._settled))
        surplus = await self._return_surplus(wanted) if self.admission.synchronous else 0
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        # A group dropped without a replacement counts as accepted. If 4 groups are wanted, 2 were given up and 3 are
        # ready (one ran ahead), only one place stays empty, so one of the two is uncounted.
        self.admission.release_accepted(self._given_up - (wanted - len(taken)))
        self._dispatch(version)  # groups that may run ahead do so while this step trains
        return CollectedGroups([group for _, group in taken], [*stale, *self._take_dropped()], surplus)

    def _cancel_surplus(self, wanted: int) -> None:
        """Cancel groups after the last one that the step can take. Groups before it may still finish."""
        if not self.admission.synchronous or len(self._ready) < wanted:
            return
        last = sorted(order for order, _ in self._ready)[wanted - 1]
        for task in [task for task, (order, _) in self._running.items() if order > last]:
            task.cancel()
            self._surplus.append(task)
            del self._running[task]
            self.admission.settle(accepted=False)

    async def _return_surplus(self, wanted: int) -> int:
        """Forget the groups after the last one that the step takes, and return their prompts. How many there were."""
        self._ready.sort(key=lambda item: item[0])
        begun, self._begun = self._begun, []
        last = self._ready[wanted - 1][0] if len(self._ready) >= wanted else self._order
        unused = [(prompt, position) for order, prompt, position in begun if order > last]
        kept = [(order, group) for order, group in self._ready if order <= max(last, -1)]
        self.admission.release_accepted(len(self._ready) - len(kept))
        self._ready, self._settled = kept, [(order, group) for order, group in self._settled if order <= last]
        self._again = [prompt for prompt, position in unused if position is None] + self._again
        if position := next((position for _, position in unused if position is not None), None):
            self._stream.rewind(position)
        cancelled, self._surplus = self._surplus, []
        if cancelled:
            _, pending = await wait_without_suspension(cancelled, self._rules.deadline_s)
            if pending:
                raise self._deadline_error("surplus groups did not end")
        return len(unused)

    def _take_dropped(self) -> list[RolloutGroup]:
        """The groups dropped in this step. The prompt buffer observes all settled groups, in the order of dispatch."""
        settled, self._settled = sorted(self._settled, key=lambda item: item[0]), []
        self._zero_variance = 0
        for _, group in settled:
            self._stream.observe(group)
        return [group for _, group in settled if group.drop_reason is not None]

    def _dispatch(self, version: int, ahead: bool = False) -> None:
        """`ahead`: also start replacements for groups that will probably be dropped."""
        useful, settled = self._seen
        share = (useful + 1) / (settled + 1)
        spare = self._refills_left if ahead and self._rules.uniform != "skip" else 0
        while self.admission.allows(version, share, spare):
            position = self._stream.position() if not self._again else None
            step = self.admission.step_of_next(version)
            prompt = self._again.pop(0) if self._again else self._stream.next(step)
            if self.admission.synchronous:
                self._begun.append((self._order, prompt, position))
            task = asyncio.ensure_future(self._run_group(prompt))
            self._running[task] = (self._order, prompt)
            if not self._rules.lockstep:
                task.add_done_callback(self._on_group_done)
            self._order += 1
            self.admission.dispatch()

    def _on_group_done(self, task: asyncio.Task[RolloutGroup]) -> None:
        self._finished.append(task)
        self._arrival.set()

    async def _settle_finished(self, version: int, stop: asyncio.Event) -> None:
        if self._rules.lockstep:
            await self._settle_round(version)
            return
        # Two futures instead of one per group: waiting for thousands of tasks again and again is expensive.
        waiting = [asyncio.ensure_future(self._arrival.wait()), asyncio.ensure_future(stop.wait())]
        try:
            await wait_without_suspension(waiting, self._rules.deadline_s, asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if stop.is_set():
            raise StopRequested
        if not self._finished:
            raise self._deadline_error("none finished")
        finished, self._finished = self._finished, []
        self._arrival.clear()
        for task in finished:
            if task in self._running:
                order, _ = self._running.pop(task)
                self._settle(order, task.result(), version)

    async def _settle_round(self, version: int) -> None:
        _, pending = await wait_without_suspension(list(self._running), self._rules.deadline_s)
        if pending:
            raise self._deadline_error("not all finished")
        for task, (order, _) in sorted(self._running.items(), key=lambda item: item[1][0]):
            self._settle(order, task.result(), version)
        self._running.clear()

    def _deadline_error(self, what: str) -> DeadlineError:
        waiting = ", ".join(prompt.group_id for _, prompt in list(self._running.values())[:3])
        return DeadlineError(
            f"the loop waited {self._rules.deadline_s:.0f} s for {len(self._running)} groups ({waiting}, …) "
            f"and {what}; raise orch.deadline_s if this is expected"
        )

    def _settle(self, order: int, group: RolloutGroup, version: int) -> None:
        group.drop_reason = self._verdict(group, version)
        self._settled.append((order, group))
        self._zero_variance += group.drop_reason in ZERO_VARIANCE
        self._seen = [self._seen[0] + (group.drop_reason is None), self._seen[1] + 1]
        if group.drop_reason is None:
            self.admission.settle(accepted=True)
            self._ready.append((order, group))
            return
        replaced = self._rules.uniform != "skip" and self._refills_left > 0
        self._refills_left -= replaced
        self._given_up += not replaced
        self.admission.settle(accepted=not replaced)

    def _verdict(self, group: RolloutGroup, version: int) -> str | None:
        """The reason to drop the group, or None to keep it."""
        if self._is_stale(group, version):
            return "stale"
        if len(group.rewards) < min(2, self.admission.group):
            return "too-few-scored"
        # Groups of one rollout need batch statistics. They always have zero variance and are kept.
        if self.admission.group > 1 and self._rules.uniform != "keep" and self._has_zero_variance(group):
            return zero_variance_kind(group)
        if self._rules.keep is not None and not self._rules.keep(group):
            return "filtered"
        return None

    def _has_zero_variance(self, group: RolloutGroup) -> bool:
        """Whether the group has zero variance. Its rewards may be equal and its parts or turns not."""
        alike = zero_variance_kind(group) is not None
        return alike and len({self._rules.compares(rollout) for rollout in group.scored}) == 1

    def _is_stale(self, group: RolloutGroup, version: int) -> bool:
        oldest = min((r.oldest_version for r in group.rollouts if r.turns), default=group.version)
        return self.admission.is_stale(version, oldest)

    def _drop_stale(self, version: int) -> list[RolloutGroup]:
        """Drop ready groups that became stale while others were trained. Checked again here, just before training."""
        fresh, stale = [], []
        for order, group in self._ready:
            if self._is_stale(group, version):
                group.drop_reason = "stale"
                stale.append(group)
            else:
                fresh.append((order, group))
        self.admission.release_accepted(len(stale))
        self._ready = fresh
        return stale

    def begin(self, version: int) -> None:
        """Dispatch the first groups of the next step early. An error is raised by the next `collect`.

        Not with several ranks: there, running groups communicates, and all ranks must do so at the same time.
        """
        if not self._rules.lockstep:
            try:
                self._dispatch(version)
            except Exception as error:  # the stream reads environments, which are user code
                self._failure = error

    def run_ahead(self, version: int) -> None:
        """Dispatch groups that the new version allows before the next step, in asynchronous training only."""
        if self.admission.async_level > 0:
            self._dispatch(version)

    async def drain(self) -> None:
        """Wait until no group is in flight, so that the caller has the engine alone. The next step settles them."""
        pending = {task for task in self._running if not task.done()}
        while pending:
            done, pending = await wait_without_suspension(pending, self._rules.deadline_s, asyncio.FIRST_COMPLETED)
            if not done:
                raise self._deadline_error("none finished")

    async def cancel(self) -> None:
        """Cancel all groups in flight. A resumed run dispatches their prompts again."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, *self._surplus, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """Groups that are ready and prompts in flight, oldest first."""
        in_flight = sorted(self._running.values(), key=lambda item: item[0])
        return {
            "accepted": self.admission.accepted,
            "ready": [group for _, group in self._ready],
            "again": [*(prompt for _, prompt in in_flight), *self._again],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.admission.accepted = state["accepted"]
        groups = [msgspec.convert(group, RolloutGroup) for group in state["ready"]]
        self._ready = list(enumerate(groups, start=-len(groups)))
        self._again = [msgspec.convert(prompt, Prompt) for prompt in state["again"]]
