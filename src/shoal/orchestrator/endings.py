"""Rules by which a run ends before its last step: gradients that are no numbers, nothing to train on, no progress."""

from __future__ import annotations

from shoal.errors import StoppedByPolicy
from shoal.observability.events import EventLog
from shoal.orchestrator.parts import Progress

MAX_NON_FINITE = 3  # steps in a row
MAX_FLAT = 5  # steps in a row


def ends_badly_or_solved(progress: Progress) -> bool:
    """By a rule that all ranks come to at once."""
    return progress.non_finite >= MAX_NON_FINITE or progress.flat >= MAX_FLAT


def ends(progress: Progress, stop_after: int | None) -> bool:
    return ends_badly_or_solved(progress) or _has_stalled(progress, stop_after)


def outcome_of(progress: Progress, stop_after: int | None, events: EventLog, failed: str = "") -> str | None:
    """`solved` or `finished`, None if the run goes on; raises where it ends for a reason that is no success.

    `failed`: the last reward or environment that failed, and how.
    """
    if progress.non_finite >= MAX_NON_FINITE:
        raise StoppedByPolicy(
            f"stopped after {MAX_NON_FINITE} steps in a row with non-finite gradients; "
            "lower train.learning_rate or look at the rewards, then resume from the last checkpoint"
        )
    if progress.flat >= MAX_FLAT:
        if progress.flat_reasons == ["uniform-good"]:
            return "solved"
        if failed and progress.flat_reasons == ["too-few-scored"]:
            raise StoppedByPolicy(
                f"stopped after {MAX_FLAT} steps in a row that trained nothing, for want of rewards ({failed}); "
                "fix the reward, then resume"
            )
        raise StoppedByPolicy(
            f"stopped after {MAX_FLAT} steps in a row that trained nothing (groups were "
            f"{', '.join(progress.flat_reasons)}); raise the temperature or the group size, choose easier prompts, "
            "or look at the reward errors"
        )
    if _has_stalled(progress, stop_after):
        events.emit("early-stop", f"no better evaluation since step {progress.best_step}")
        return "finished"
    return None


def _has_stalled(progress: Progress, stop_after: int | None) -> bool:
    return stop_after is not None and progress.since_best >= stop_after
