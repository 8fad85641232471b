"""Gathers the groups of a step: dispatches prompts the admission rule allows, judges what comes back, refills.

Every dispatched group is settled exactly once: kept, dropped with a reason, or handed back as a prompt to dispatch
again. In synchronous mode groups enter training in prompt order, so nothing depends on which finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from shoal.algorithms.advantages import judge_group
from shoal.errors import DeadlineError
from shoal.observability.watchdog import wait_awake
from shoal.orchestrator.admission import Admission
from shoal.orchestrator.prompts import PromptStream
from shoal.types import Prompt, RolloutGroup

RunGroup = Callable[[Prompt], Awaitable[RolloutGroup]]
GOOD_REWARD = 1.0  # a uniform group whose raw reward reaches this is solved, below it is failed


def uniform_kind(group: RolloutGroup) -> Literal["uniform-good", "uniform-bad"] | None:
    """What kind of group it is that has nothing to compare within it, whether or not it is kept."""
    if judge_group(group.rewards) not in ("uniform-good", "uniform-bad"):
        return None
    raw = [r.raw_reward for r in group.rollouts if r.scored and r.raw_reward is not None]
    return "uniform-good" if min(raw) >= GOOD_REWARD else "uniform-bad"


class Interruption(Exception):
    """The run was asked to stop while groups were out."""


@dataclass(frozen=True)
class GroupRules:
    uniform: Literal["refill", "skip", "keep"] = "refill"
    max_refill: int = 3  # batches
    keep: Callable[[RolloutGroup], bool] | None = None  # the user's own filter
    deadline_s: float = 600.0
    lockstep: bool = False  # several processes: whole rounds are settled, so that all of them do the same


@dataclass
class Collected:
    kept: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)

    @property
    def all(self) -> list[RolloutGroup]:
        return [*self.kept, *self.dropped]


class Collector:
    def __init__(self, run_group: RunGroup, stream: PromptStream, admission: Admission, rules: GroupRules) -> None:
        self._run_group = run_group
        self._stream = stream
        self._rules = rules
        self.admission = admission
        self._running: dict[asyncio.Task[RolloutGroup], tuple[int, Prompt]] = {}
        self._finished: list[asyncio.Task[RolloutGroup]] = []  # of those running, in the order they ended
        self._arrival = asyncio.Event()
        self._ready: list[tuple[int, RolloutGroup]] = []
        self._settled: list[tuple[int, RolloutGroup]] = []  # in this step, kept or not
        self._again: list[Prompt] = []  # prompts a checkpoint found in flight
        self._failure: Exception | None = None  # of what was dispatched early
        self._order = 0
        self._refills_left = 0
        self._given_up = 0  # groups dropped in this step and not replaced

    async def collect(
        self, version: int, stop: asyncio.Event, advance: Callable[[float], None] = lambda _: None
    ) -> Collected:
        """The groups of one step: as many as a step takes, fewer only if the refills are spent.

        `advance` is told how many more of them are ready.
        """
        if self._failure is not None:
            raise self._failure
        wanted = self.admission.groups_per_step
        self._refills_left, self._given_up = self._rules.max_refill * wanted, 0
        stale = self._drop_stale(version)
        advance(min(len(self._ready), wanted))
        while len(self._ready) < wanted:
            self._dispatch(version)
            if not self._running:
                break
            before = len(self._ready)
            await self._settle_some(version, stop)
            advance(len(self._ready) - before)
        if self.admission.synchronous:
            self._ready.sort(key=lambda item: item[0])
        taken, self._ready = self._ready[:wanted], self._ready[wanted:]
        # A group given up used up its room; where one that ran ahead took its place, a later step gets that room.
        self.admission.unaccept(self._given_up - (wanted - len(taken)))
        self._dispatch(version)  # whatever may run ahead runs ahead while this step trains
        return Collected([group for _, group in taken], [*stale, *self._take_dropped()])

    def _take_dropped(self) -> list[RolloutGroup]:
        """What this step dropped, and the buffer's lesson of all it saw, in the order of dispatch."""
        settled, self._settled = sorted(self._settled, key=lambda item: item[0]), []
        for _, group in settled:
            self._stream.observe(group)
        return [group for _, group in settled if group.drop_reason is not None]

    def _dispatch(self, version: int) -> None:
        while self.admission.allows(version):
            prompt = self._again.pop(0) if self._again else self._stream.next()
            task = asyncio.ensure_future(self._run_group(prompt))
            self._running[task] = (self._order, prompt)
            if not self._rules.lockstep:
                task.add_done_callback(self._arrive)
            self._order += 1
            self.admission.dispatch()

    def _arrive(self, task: asyncio.Task[RolloutGroup]) -> None:
        self._finished.append(task)
        self._arrival.set()

    async def _settle_some(self, version: int, stop: asyncio.Event) -> None:
        if self._rules.lockstep:
            await self._settle_round(version)
            return
        # Two futures however many groups are out: waiting for each of thousands anew would cost more than they do.
        waiting = [asyncio.ensure_future(self._arrival.wait()), asyncio.ensure_future(stop.wait())]
        try:
            await wait_awake(waiting, self._rules.deadline_s, asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        if stop.is_set():
            raise Interruption
        if not self._finished:
            raise self._too_late("none finished")
        for task in self._take_finished():
            order, _ = self._running.pop(task)
            self._settle(order, task.result(), version)

    def _take_finished(self) -> list[asyncio.Task[RolloutGroup]]:
        finished, self._finished = self._finished, []
        self._arrival.clear()
        return finished

    async def _settle_round(self, version: int) -> None:
        _, pending = await wait_awake(list(self._running), self._rules.deadline_s)
        if pending:
            raise self._too_late("not all finished")
        for task, (order, _) in sorted(self._running.items(), key=lambda item: item[1][0]):
            self._settle(order, task.result(), version)
        self._running.clear()

    def _too_late(self, what: str) -> DeadlineError:
        waiting = ", ".join(prompt.group_id for _, prompt in list(self._running.values())[:3])
        return DeadlineError(
            f"the loop waited {self._rules.deadline_s:.0f} s for {len(self._running)} groups ({waiting}, …) "
            f"and {what}; raise orch.deadline_s if this is expected"
        )

    def _settle(self, order: int, group: RolloutGroup, version: int) -> None:
        group.drop_reason = self._verdict(group, version)
        self._settled.append((order, group))
        if group.drop_reason is None:
            self.admission.settle(accepted=True)
            self._ready.append((order, group))
            return
        replaced = self._rules.uniform != "skip" and self._refills_left > 0
        self._refills_left -= replaced
        self._given_up += not replaced
        self.admission.settle(accepted=not replaced)

    def _verdict(self, group: RolloutGroup, version: int) -> str | None:
        """Why the group teaches nothing, or None if it is kept."""
        if self._is_stale(group, version):
            return "stale"
        verdict = judge_group(group.rewards)
        if verdict == "too-few-scored" and (self.admission.group > 1 or not group.rewards):
            return verdict
        # A group of one, which only batch statistics allow, is kept as it is: there is nothing to compare within it.
        if self.admission.group > 1 and self._rules.uniform != "keep" and (uniform := uniform_kind(group)):
            return uniform
        if self._rules.keep is not None and not self._rules.keep(group):
            return "filtered"
        return None

    def _is_stale(self, group: RolloutGroup, version: int) -> bool:
        oldest = min((r.oldest_version for r in group.rollouts if r.turns), default=group.version)
        return self.admission.is_stale(version, oldest)

    def _drop_stale(self, version: int) -> list[RolloutGroup]:
        """Ready groups that grew too old while others were trained; checked where they are shipped."""
        fresh, stale = [], []
        for order, group in self._ready:
            if self._is_stale(group, version):
                group.drop_reason = "stale"
                stale.append(group)
            else:
                fresh.append((order, group))
        self.admission.unaccept(len(stale))
        self._ready = fresh
        return stale

    def begin(self, version: int) -> None:
        """Dispatch what the next step asks for first anyway; what fails in doing so is that step's affair.

        Ranks speak about their groups, so there it waits.
        """
        if not self._rules.lockstep:
            try:
                self._dispatch(version)
            except Exception as error:  # of an environment, or of what is installed with it
                self._failure = error

    def run_ahead(self, version: int) -> None:
        """Dispatch what a new version allows before the next step asks for it, where sampling may run ahead at all."""
        if self.admission.async_level > 0:
            self._dispatch(version)

    async def drain(self) -> None:
        """Wait until nothing is in flight, for whoever wants the sampler alone. The next step settles what finished."""
        pending = {task for task in self._running if not task.done()}
        while pending:
            done, pending = await wait_awake(pending, self._rules.deadline_s, asyncio.FIRST_COMPLETED)
            if not done:
                raise self._too_late("none finished")

    async def cancel(self) -> None:
        """Take back everything in flight; the prompts are dispatched again when the run continues."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """Groups that are finished and not trained, and prompts that are out, oldest first."""
        out = sorted(self._running.values(), key=lambda item: item[0])
        return {
            "accepted": self.admission.accepted,
            "ready": [group for _, group in self._ready],
            "again": [*(prompt for _, prompt in out), *self._again],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.admission.accepted = state["accepted"]
        groups = [msgspec.convert(group, RolloutGroup) for group in state["ready"]]
        self._ready = list(enumerate(groups, start=-len(groups)))
        self._again = [msgspec.convert(prompt, Prompt) for prompt in state["again"]]
