"""Failing rewards are told once a kind with their number, and a run without a single reward does not pass for one."""

from __future__ import annotations

import pytest

from shoal.errors import StoppedByPolicy
from shoal.observability.events import EventLog
from shoal.orchestrator.endings import MAX_FLAT, outcome_of
from shoal.orchestrator.notes import FailureNotes
from shoal.orchestrator.parts import Progress
from shoal.types import RolloutGroup

from .groups import make_group, make_prompt


class Written(list):
    def append_event(self, record) -> None:
        self.append(record)


def failing(*errors: str | None, env: str = "letters") -> RolloutGroup:
    """One rollout an error; None is one that was scored."""
    group = make_group(make_prompt(env=env), [None if error else 1.0 for error in errors])
    for rollout, error in zip(group.rollouts, errors, strict=True):
        rollout.error = error
        rollout.status = "timeout" if error and error.startswith("no answer") else rollout.status
    return group


def test_a_kind_is_an_exception_at_a_place_in_an_environment():
    events = Written()
    notes, progress = FailureNotes(EventLog(events)), Progress(step=3)
    same = [f"KeyError: {word!r} (mine.py:4 in grade)" for word in ("a", "b", "c")]
    notes.look([failing(*same), failing("KeyError: 'a' (mine.py:9 in grade)", "no answer in 10 s")], progress)
    notes.look([failing(*same)], progress)
    notes.look([failing(same[0], env="other")], progress)
    assert [event["message"] for event in events] == [
        "step 3: no reward for 3 of 5 rollouts of letters: KeyError: 'a' (mine.py:4 in grade)",
        "step 3: no reward for 1 of 5 rollouts of letters: KeyError: 'a' (mine.py:9 in grade)",
        "step 3: no reward for 1 of 5 rollouts of letters: no answer in 10 s",
        "step 3: no reward for 1 of 1 rollouts of other: KeyError: 'a' (mine.py:4 in grade)",
    ]
    assert [event["data"]["rollouts"] for event in events] == [3, 1, 1, 1]
    assert {event["level"] for event in events} == {"warning"}


def test_one_reward_in_the_whole_run_is_enough():
    notes, progress = FailureNotes(EventLog(Written())), Progress(step=2)
    notes.look([failing("ValueError: x")], progress)
    with pytest.raises(StoppedByPolicy, match=r"not one rollout of 2 steps got a reward \(letters: ValueError: x\)"):
        notes.check_scored(progress)
    resumed = FailureNotes(EventLog(Written()))  # at its last step: what failed before is not known any more
    with pytest.raises(StoppedByPolicy, match="not one rollout of 1 step got a reward, so nothing was trained"):
        resumed.check_scored(Progress(step=1))
    notes.look([failing("ValueError: x", None)], progress)
    notes.check_scored(progress)
    FailureNotes(EventLog(Written())).check_scored(Progress(step=2, scored=True))  # resumed: known from before


def test_a_run_that_ends_for_want_of_rewards_says_what_failed():
    flat = Progress(step=7, flat=MAX_FLAT, flat_reasons=["too-few-scored"])
    notes, events = FailureNotes(EventLog(Written())), EventLog(Written())
    notes.look([failing("KeyError: 'a' (mine.py:4 in grade)")], flat)
    with pytest.raises(StoppedByPolicy, match=r"for want of rewards \(letters: KeyError: 'a' \(mine.py:4 in grade\)\)"):
        outcome_of(flat, None, events, notes.last)
    flat.flat_reasons.append("uniform-bad")
    with pytest.raises(StoppedByPolicy, match=r"groups were too-few-scored, uniform-bad\); raise the temperature"):
        outcome_of(flat, None, events, notes.last)
