"""Replay: useful groups of earlier steps are trained again, with the log-probs and rewards that they were sampled with.

The loss weighs their tokens by the ratio of the present policy to the policy that sampled them, as for any rollout that
is older than the weights. A replayed group is not sampled again: no prompt, reward or token of it is counted twice.
Implements `core.protocols.Replay`; the loop calls it, and stores its state in every checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.core.types import Prompt, Rollout, RolloutGroup


@dataclass(frozen=True)
class ReplaySettings:
    """Which groups are replayed, and how often."""

    groups: int  # per step, at most
    max_age: int  # weight versions since the oldest token of a group was sampled
    times: int = 1  # per group, at most
    seed: int = 0


class GroupReplay:
    """Stores the useful groups of the last `max_age` steps, and draws some of them in every step.

    `attempt` of a stored group is the number of its replays, so that the rollouts of each replay have ids of their own.
    """

    def __init__(self, settings: ReplaySettings, compares: Callable[[Rollout], Hashable]) -> None:
        self._settings = settings
        self._compares = compares  # what differs between the rollouts of a useful group
        self._stored: list[RolloutGroup] = []
        self.metrics: Mapping[str, float] = {}

    def mix(self, kept: Sequence[RolloutGroup], version: int) -> list[RolloutGroup]:
        """All groups to train in a step with the weights of `version`: `kept`, and among them the replayed ones.

        Stores copies of `kept` for later steps. A step that has nothing to train replays nothing.
        """
        replayed = self._draw(version) if kept else []
        self._stored += [_copy(group, group.prompt) for group in kept if self._is_useful(group)]
        self.metrics = _metrics(kept, replayed, version)
        return _spread(kept, replayed)

    def _draw(self, version: int) -> list[RolloutGroup]:
        settings = self._settings
        stored = [group for group in self._stored if version - _oldest(group) <= settings.max_age]
        order = sorted(stored, key=lambda group: self._rank(group, version))
        chosen = {id(group) for group in order[: settings.groups]}
        self._stored, replayed = [], []
        for group in stored:
            if id(group) in chosen:
                group = _copy(group, replace(group.prompt, attempt=group.prompt.attempt + 1))
                replayed.append(_copy(group, group.prompt))
            if group.prompt.attempt < settings.times:
                self._stored.append(group)
        return replayed

    def _is_useful(self, group: RolloutGroup) -> bool:
        return len({self._compares(rollout) for rollout in group.scored}) > 1

    def _rank(self, group: RolloutGroup, version: int) -> bytes:
        """Groups with the lowest ranks are replayed: a random choice that depends on the seed and the step only."""
        text = f"{self._settings.seed}/replay/{version}/{group.prompt.group_id}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def state(self) -> list[RolloutGroup]:
        return list(self._stored)  # stored groups never change

    def load_state(self, state: Sequence[Any]) -> None:
        self._stored = [msgspec.convert(group, RolloutGroup) for group in state]


def _oldest(group: RolloutGroup) -> int:
    return min(rollout.oldest_version for rollout in group.rollouts)


def _copy(group: RolloutGroup, prompt: Prompt) -> RolloutGroup:
    """The scored rollouts as they were before learning. Turns are shared: nothing changes them."""
    rollouts = [replace(r, prompt=prompt, advantage=None, token_advantages=None) for r in group.scored]
    return replace(group, prompt=prompt, rollouts=rollouts)


def _spread(kept: Sequence[RolloutGroup], replayed: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Both in their order, evenly mixed, so that each minibatch has its share of both."""
    places = [((at + 0.5) / len(groups), group) for groups in (kept, replayed) for at, group in enumerate(groups)]
    return [group for _, group in sorted(places, key=lambda place: place[0])]


def _metrics(kept: Sequence[RolloutGroup], replayed: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    ages = [version - rollout.oldest_version for group in replayed for rollout in group.rollouts]
    trained = sum(len(group.scored) for group in kept) + len(ages)
    found = {"replay/frac": len(ages) / trained} if trained else {}
    return {**found, "replay/age": sum(ages) / len(ages)} if ages else found
