"""The admission rule: how far sampling may run ahead of training. One rule for synchronous, windowed and asynchronous.

With B rollouts a step, G a group, window N, async level O and weight version v, a whole group is admitted iff
(v0 + max(N, 1) + O) * B - accepted - running >= G, where v0 is the version at the start of the window. O = 0, N = 1 is
exactly synchronous: nothing of the next step starts before this one is trained. Nothing starts for a step that never
comes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    batch: int  # B
    group: int  # G
    interval: int = 1  # N; 0 = weights are never synced, so nothing goes stale
    async_level: int = 0  # O
    max_off_policy_steps: int | None = None
    last_step: int | None = None  # None = there is no end to run up against
    accepted: int = 0  # rollouts kept for training so far, and those dropped without a replacement
    running: int = 0  # rollouts dispatched and not settled

    @property
    def synchronous(self) -> bool:
        return self.interval == 1 and self.async_level == 0

    @property
    def groups_per_step(self) -> int:
        return self.batch // self.group

    def window_start(self, version: int) -> int:
        return version if self.interval == 0 else self.interval * (version // self.interval)

    def syncs_at(self, version: int) -> bool:
        """Whether the sampler gets this version. Within a window it keeps the one it started with."""
        return version == 0 or (self.interval > 0 and version % self.interval == 0)

    def allows(self, version: int) -> bool:
        horizon = self.window_start(version) + max(self.interval, 1) + self.async_level
        if self.last_step is not None:
            horizon = min(horizon, self.last_step)
        return horizon * self.batch - self.accepted - self.running >= self.group

    def is_stale(self, version: int, oldest: int) -> bool:
        if self.interval == 0:
            return False
        return version - oldest > self.oldest_allowed

    @property
    def oldest_allowed(self) -> int:
        """Versions a rollout may be behind where it is trained."""
        if self.max_off_policy_steps is not None:
            return self.max_off_policy_steps
        return self.async_level + max(self.interval, 1) - 1

    def dispatch(self) -> None:
        self.running += self.group

    def settle(self, accepted: bool) -> None:
        """A dispatched group came back. Dropped groups leave room for another."""
        self.running -= self.group
        if accepted:
            self.accepted += self.group

    def unaccept(self, groups: int) -> None:
        """Room handed back: groups kept and dropped after all (stale), or given up and made up for by others."""
        self.accepted -= groups * self.group
