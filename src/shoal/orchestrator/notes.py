"""What the loop tells people about a step's rollouts: groups that grew too old, rewards that failed and with what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from shoal.errors import StoppedByPolicy
from shoal.observability.events import EventLog
from shoal.observability.text import count
from shoal.orchestrator.parts import Progress
from shoal.types import Rollout, RolloutGroup

_PLACE = re.compile(r" \(([^()]+:\d+) in [^()]*\)$")  # as the reward worker writes it: (file.py:12 in grade)


def tell_stale(events: EventLog, step: int, dropped: Sequence[RolloutGroup], limit: int) -> None:
    stale = [group.prompt.group_id for group in dropped if group.drop_reason == "stale"]
    if stale:
        said = f"step {step}: {count(len(stale), 'group')} dropped, more than {count(limit, 'version')} old"
        events.emit("stale", said, data={"groups": stale})


class FailureNotes:
    """Failing rewards and environments, told once a kind; and a run in which nothing was ever scored is no success."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._told: set[tuple[str, str]] = set()
        self._looked = False
        self.last = ""  # who failed and how

    def look(self, groups: Sequence[RolloutGroup], progress: Progress) -> None:
        self._looked = True
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        progress.scored |= any(rollout.scored for rollout in rollouts)
        failed = [rollout for rollout in rollouts if rollout.status in ("error", "timeout")]
        counts = Counter(_kind(rollout) for rollout in failed)
        for rollout in failed:
            kind = _kind(rollout)
            self.last = f"{rollout.prompt.env}: {rollout.error or rollout.status}"
            if kind not in self._told:
                self._told.add(kind)
                many = f"{counts[kind]} of {len(rollouts)} rollouts"
                said = f"step {progress.step}: no reward for {many} of {self.last}"
                self._events.warn("reward-failed", said, data={"rollouts": counts[kind], "error": rollout.error})

    def check_scored(self, progress: Progress) -> None:
        """At the end of a run that came through all of its steps."""
        if progress.step and not progress.scored:
            # A run resumed at its last step has looked at nothing, and knows no more why.
            why = f" ({self.last or 'each was None'})" if self._looked else ""
            raise StoppedByPolicy(
                f"not one rollout of {count(progress.step, 'step')} got a reward{why}, so nothing was trained; "
                "fix the reward, then resume with a larger train.max_steps or start in another train.output_dir"
            )


def _kind(rollout: Rollout) -> tuple[str, str]:
    """Environment, exception and the line it was raised in: messages differ by what they quote, places do not."""
    text = rollout.error or rollout.status
    place = _PLACE.search(text)
    return rollout.prompt.env, f"{text.partition(':')[0]} {place.group(1) if place else ''}"
