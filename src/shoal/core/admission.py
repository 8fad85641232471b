"""The admission rule: how far sampling may run ahead of training. Used by the collector and the loop.

For B rollouts per step, G rollouts per group, window N, async level O and weight version v, a group is admitted if
(v0 + max(N, 1) + O) * B - accepted - running >= G. v0 is the version at the start of the window, `accepted` the number
of rollouts since the start of the run that were kept (or dropped without a replacement), and `running` the number in
flight. N = 1, O = 0 is synchronous training: no group of the next step starts before this step is trained. N > 1 and
O > 0 are windowed and asynchronous training.

In synchronous training more groups may run than there are places, because zero-variance groups will be replaced: for m
places and an expected share p of useful groups, m / p and one standard deviation. Groups that are not needed in the end
are cancelled. An example with B = 8, G = 2 (4 places), p = 1/2: 11 groups start. If the first 7 groups in prompt order
hold 4 useful ones, these 4 are trained, the 3 between them were replaced, and groups 8 to 11 are surplus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Admission:
    batch: int  # B
    group: int  # G
    interval: int = 1  # N; 0 = weights are never synchronised, and no group becomes stale
    async_level: int = 0  # O
    max_off_policy_steps: int | None = None
    last_step: int | None = None  # no group is admitted for a later step; None = no limit
    accepted: int = 0  # rollouts kept for training, and rollouts dropped without a replacement
    running: int = 0  # rollouts dispatched and not yet settled

    @property
    def synchronous(self) -> bool:
        return self.interval == 1 and self.async_level == 0

    @property
    def groups_per_step(self) -> int:
        return self.batch // self.group

    def window_start(self, version: int) -> int:
        return version if self.interval == 0 else self.interval * (version // self.interval)

    def syncs_at(self, version: int) -> bool:
        """Whether this version is published to the sampler. Within a window the sampler keeps the first version."""
        return version == 0 or (self.interval > 0 and version % self.interval == 0)

    def allows(self, version: int, useful_share: float = 1.0, spare: int = 0) -> bool:
        """`useful_share`: expected share of running groups that are kept. `spare`: how many may exceed the places."""
        places, running = self._horizon(version) * self.batch - self.accepted, self.running + self.group
        if running <= places:
            return True
        if not self.synchronous or running > places + spare * self.group or places <= 0:
            return False
        missing = places / self.group  # one standard deviation more, so that the step rarely waits for one more round
        ahead = (missing + math.sqrt(missing * (1 - useful_share))) / useful_share
        return running <= math.ceil(ahead) * self.group

    def _horizon(self, version: int) -> int:
        """The last step that a group may be dispatched for."""
        horizon = self.window_start(version) + max(self.interval, 1) + self.async_level
        return horizon if self.last_step is None else min(horizon, self.last_step)

    def step_of_next(self, version: int) -> int:
        """The step that the next group is for."""
        return min(max((self.accepted + self.running) // self.batch, version) + 1, self._horizon(version))

    def is_stale(self, version: int, oldest: int) -> bool:
        if self.interval == 0:
            return False
        return version - oldest > self.oldest_allowed

    @property
    def oldest_allowed(self) -> int:
        """How many versions old a rollout may be when it is trained."""
        if self.max_off_policy_steps is not None:
            return self.max_off_policy_steps
        return self.async_level + max(self.interval, 1) - 1

    def dispatch(self) -> None:
        self.running += self.group

    def settle(self, accepted: bool) -> None:
        """Count a finished group. A group that is not accepted frees its place for another one."""
        self.running -= self.group
        if accepted:
            self.accepted += self.group

    def release_accepted(self, groups: int) -> None:
        """Free the places of accepted groups that are not trained after all (stale), or that others replaced."""
        self.accepted -= groups * self.group
