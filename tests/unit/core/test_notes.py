"""Failed rewards are reported once per kind with their number, and a run without any reward does not succeed."""

from __future__ import annotations

import pytest

from shoal.core.errors import StoppedByPolicy
from shoal.core.state import Progress
from shoal.core.stop_rules import MAX_FLAT, StopRules
from shoal.core.types import RolloutGroup
from shoal.runs.events import EventLog

from .groups import make_group, make_prompt


class Written(list):
    def append_event(self, record) -> None:
        self.append(record)


def failing(*errors: str | None, env: str = "letters") -> RolloutGroup:
    """One rollout per error; None is a scored rollout."""
    group = make_group(make_prompt(env=env), [None if error else 1.0 for error in errors])
    for rollout, error in zip(group.rollouts, errors, strict=True):
        rollout.error = error
        rollout.status = "timeout" if error and error.startswith("no answer") else rollout.status
    return group


def test_error_kind_is_exception_and_location():
    events = Written()
    rules, progress = StopRules(EventLog(events)), Progress(step=3)
    same = [f"KeyError: {word!r} (mine.py:4 in grade)" for word in ("a", "b", "c")]
    rules.note_failures([failing(*same), failing("KeyError: 'a' (mine.py:9 in grade)", "no answer in 10 s")], progress)
    rules.note_failures([failing(*same)], progress)
    rules.note_failures([failing(same[0], env="other")], progress)
    assert [event["message"] for event in events] == [
        "step 3: no reward for 3 of 5 rollouts of letters: KeyError: 'a' (mine.py:4 in grade)",
        "step 3: no reward for 1 of 5 rollouts of letters: KeyError: 'a' (mine.py:9 in grade)",
        "step 3: no reward for 1 of 5 rollouts of letters: no answer in 10 s",
        "step 3: no reward for 1 of 1 rollouts of other: KeyError: 'a' (mine.py:4 in grade)",
    ]
    assert [event["data"]["rollouts"] for event in events] == [3, 1, 1, 1]
    assert {event["level"] for event in events} == {"warning"}


def test_one_reward_in_the_run_is_sufficient():
    rules, progress = StopRules(EventLog(Written())), Progress(step=2)
    rules.note_failures([failing("ValueError: x")], progress)
    with pytest.raises(StoppedByPolicy, match=r"2 steps had a reward \(letters: ValueError: x\)"):
        rules.require_some_reward(progress)
    resumed = StopRules(EventLog(Written()))  # resumed at its last step: earlier failures are not known
    with pytest.raises(StoppedByPolicy, match="1 step had a reward, so"):
        resumed.require_some_reward(Progress(step=1))
    rules.note_failures([failing("ValueError: x", None)], progress)
    rules.require_some_reward(progress)
    StopRules(EventLog(Written())).require_some_reward(Progress(step=2, scored=True))  # resumed


def test_run_without_rewards_names_the_failure():
    flat = Progress(step=7, flat=MAX_FLAT, flat_reasons=["too-few-scored"])
    rules = StopRules(EventLog(Written()))
    rules.note_failures([failing("KeyError: 'a' (mine.py:4 in grade)")], flat)
    with pytest.raises(StoppedByPolicy, match=r"rewards failed \(letters: KeyError: 'a' \(mine.py:4 in grade\)\)"):
        rules.outcome(flat)
    flat.flat_reasons.append("uniform-bad")
    with pytest.raises(StoppedByPolicy, match=r"fewer than two rewards, zero-variance group \(all bad\)"):
        rules.outcome(flat)
