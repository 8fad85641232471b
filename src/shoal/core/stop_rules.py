"""The rules that end a run before its last step, and the warnings about failed, stale and zero-variance groups.

The loop calls `observe` once per step and then `outcome`.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.core.collect import CollectedGroups, zero_variance_kind
from shoal.core.errors import StoppedByPolicy
from shoal.core.learn import StepResult
from shoal.core.protocols import Events
from shoal.core.state import Progress
from shoal.core.types import DROP_REASONS, Rollout, RolloutGroup

MAX_NON_FINITE = 3  # steps in a row with non-finite gradients
MAX_FLAT = 5  # steps in a row that train nothing

_LOCATION = re.compile(r" \(([^()]+:\d+) in [^()]*\)$")  # as reward workers write it: (file.py:12 in grade)


class StopRules:
    """Counts steps without progress in `Progress`; raises StoppedByPolicy where the run cannot continue usefully."""

    def __init__(self, events: Events, stop_after: int | None = None) -> None:
        self._events = events
        self._stop_after = stop_after  # evaluations without an improvement
        self._reported: set[tuple[str, str]] = set()
        self._observed = False
        self._last_failure = ""  # environment and error of the last rollout that failed

    def observe(self, progress: Progress, collected: CollectedGroups, result: StepResult, max_age: int) -> None:
        """Count and report problems of a step. `max_age`: how many versions old a rollout may be."""
        step, events = progress.step, self._events
        self.note_failures(collected.all, progress)
        stale = [group.prompt.group_id for group in collected.dropped if group.drop_reason == "stale"]
        if stale:
            message = f"step {step}: dropped {_count(len(stale), 'stale group')}, "
            events.emit("stale", message + f"more than {_count(max_age, 'version')} old", data={"groups": stale})
        progress.non_finite = progress.non_finite + 1 if result.skipped else 0
        if result.skipped:
            events.warn("non-finite", f"step {step}: the gradient is not finite; the optimizer step is skipped")
        if result.trained_rollouts and result.moved:
            progress.flat, progress.flat_reasons = 0, []
            return
        reasons = {group.drop_reason or zero_variance_kind(group) or "nothing to train" for group in collected.all}
        events.warn("flat", f"step {step} trained nothing; all groups: {_as_text_list(reasons)}")
        progress.flat += 1
        progress.flat_reasons = sorted(reasons.union(progress.flat_reasons))

    def note_failures(self, groups: Sequence[RolloutGroup], progress: Progress) -> None:
        """Report failed rewards and environments, each kind once per run."""
        self._observed = True
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        progress.scored |= any(rollout.scored for rollout in rollouts)
        failed = [rollout for rollout in rollouts if rollout.status in ("error", "timeout")]
        counts = Counter(_kind(rollout) for rollout in failed)
        for rollout in failed:
            kind = _kind(rollout)
            self._last_failure = f"{rollout.prompt.env}: {rollout.error or rollout.status}"
            if kind not in self._reported:
                self._reported.add(kind)
                share = f"{counts[kind]} of {len(rollouts)} rollouts"
                message = f"step {progress.step}: no reward for {share} of {self._last_failure}"
                self._events.warn("reward-failed", message, data={"rollouts": counts[kind], "error": rollout.error})

    def first_step_failed(self, rollouts: Sequence[Rollout]) -> StoppedByPolicy:
        """The error for a first step in which every rollout failed."""
        first = next((rollout for rollout in rollouts if rollout.traceback), None) or next(iter(rollouts), None)
        shown = "\n" + textwrap.indent(first.traceback, "  ") if first is not None and first.traceback else ""
        return StoppedByPolicy(
            f"the reward failed on every rollout of step 1 ({self._last_failure or 'on all processes'}), so nothing "
            f"was trained; fix the reward, then resume, or start in another train.output_dir{shown}"
        )

    @staticmethod
    def stops_all_ranks(progress: Progress) -> bool:
        """Whether the run ends by a rule that every rank evaluates to the same result."""
        return progress.non_finite >= MAX_NON_FINITE or progress.flat >= MAX_FLAT

    def ends(self, progress: Progress) -> bool:
        return self.stops_all_ranks(progress) or self._has_stalled(progress)

    def _has_stalled(self, progress: Progress) -> bool:
        return self._stop_after is not None and progress.since_best >= self._stop_after

    def outcome(self, progress: Progress) -> str | None:
        """`solved`, `finished`, or None if the run continues. Raises StoppedByPolicy if a rule ends it as a failure."""
        if progress.non_finite >= MAX_NON_FINITE:
            raise StoppedByPolicy(
                f"stopped after {MAX_NON_FINITE} steps in a row with non-finite gradients; "
                "lower train.learning_rate or check the rewards, then resume from the last checkpoint"
            )
        if progress.flat >= MAX_FLAT:
            if progress.flat_reasons == ["uniform-good"]:
                return "solved"
            stopped = f"stopped after {MAX_FLAT} steps in a row that trained nothing"
            if self._last_failure and progress.flat_reasons == ["too-few-scored"]:
                raise StoppedByPolicy(f"{stopped}: rewards failed ({self._last_failure}); fix the reward, then resume")
            raise StoppedByPolicy(
                f"{stopped} (all groups: {_as_text_list(progress.flat_reasons)}); raise the temperature or the group "
                "size, choose easier prompts, or check the reward errors"
            )
        if self._has_stalled(progress):
            self._events.emit("early-stop", f"no better evaluation since step {progress.best_step}")
            return "finished"
        return None

    def require_some_reward(self, progress: Progress) -> None:
        """Raise StoppedByPolicy if the run finished all steps and no rollout ever had a reward."""
        if progress.step and not progress.scored:
            # A run resumed at its last step has observed no rollouts, so it does not know the reason.
            reason = f" ({self._last_failure or 'each was None'})" if self._observed else ""
            raise StoppedByPolicy(
                f"no rollout of {_count(progress.step, 'step')} had a reward{reason}, so nothing was trained; "
                "fix the reward, then resume with a larger train.max_steps or start in another train.output_dir"
            )


def _as_text_list(reasons: Iterable[str]) -> str:
    return ", ".join(DROP_REASONS.get(reason, reason) for reason in sorted(reasons))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind(rollout: Rollout) -> tuple[str, str]:
    """Environment, exception and line. Errors from the same line are one kind, even if their messages differ."""
    text = rollout.error or rollout.status
    location = _LOCATION.search(text)
    return rollout.prompt.env, f"{text.partition(':')[0]} {location.group(1) if location else ''}"
