"""The admission rule by manual computation and as a property: never too far ahead, no deadlock, every group settled
once.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.admission import Admission


def dispatch_all(admission: Admission, version: int) -> int:
    """Groups that the rule allows now."""
    count = 0
    while admission.allows(version):
        admission.dispatch()
        count += 1
    return count


def settle_all(admission: Admission, accepted: bool = True) -> None:
    while admission.running:
        admission.settle(accepted)


def test_synchronous_by_hand():
    """B = 8, G = 4: two groups per step, and none of the next step before this one is trained."""
    admission = Admission(batch=8, group=4)
    assert admission.synchronous and admission.groups_per_step == 2
    assert dispatch_all(admission, version=0) == 2
    admission.settle(accepted=True)
    assert not admission.allows(0), "an accepted group still counts"
    admission.settle(accepted=False)
    assert dispatch_all(admission, version=0) == 1, "a dropped group is replaced"
    admission.settle(accepted=True)
    assert not admission.allows(0)
    assert dispatch_all(admission, version=1) == 2


@pytest.mark.parametrize(
    ("version", "groups"),
    # N = 3: at version 0 three steps may be sampled at once, and the next three only at version 3.
    [(0, 6), (1, 0), (2, 0), (3, 6), (4, 0), (6, 6)],
)
def test_windows_of_three(version: int, groups: int):
    admission = Admission(batch=8, group=4, interval=3)
    for earlier in range(version):
        dispatch_all(admission, earlier)
        settle_all(admission)
    assert dispatch_all(admission, version) == groups


@pytest.mark.parametrize(
    ("interval", "level", "steps"),
    # Two groups per step: the step that each group at version 0 is dispatched for, then the next.
    [(1, 0, [1, 1, 1]), (3, 0, [1, 1, 2, 2, 3, 3, 3]), (1, 2, [1, 1, 2, 2, 3, 3, 3])],
)
def test_group_belongs_to_its_step(interval: int, level: int, steps: list[int]):
    admission, found = Admission(batch=8, group=4, interval=interval, async_level=level), []
    while admission.allows(0):
        found.append(admission.step_of_next(0))
        admission.dispatch()
    assert [*found, admission.step_of_next(0)] == steps
    settle_all(admission)
    assert admission.step_of_next(4) == 5, "the place of a stale group belongs to the present step"


def test_windows_sync_at_their_start_only():
    admission = Admission(batch=8, group=4, interval=3)
    assert [version for version in range(8) if admission.syncs_at(version)] == [0, 3, 6]
    assert [admission.window_start(version) for version in range(7)] == [0, 0, 0, 3, 3, 3, 6]


def test_never_syncing():
    """N = 0: only version 0 is served, steps are sampled one at a time, and nothing is stale."""
    admission = Admission(batch=8, group=4, interval=0)
    assert not admission.synchronous
    assert [version for version in range(50) if admission.syncs_at(version)] == [0]
    for version in range(3):
        assert dispatch_all(admission, version) == 2
        settle_all(admission)
    assert not admission.is_stale(1000, 0)


def test_async_level_runs_ahead():
    """O = 2: at version v, the steps v, v + 1 and v + 2 may be sampled."""
    admission = Admission(batch=8, group=4, async_level=2)
    assert dispatch_all(admission, 0) == 6
    settle_all(admission)
    assert dispatch_all(admission, 1) == 2
    assert not admission.allows(1)


@pytest.mark.parametrize(
    ("interval", "level", "limit", "oldest_gap"),
    [(1, 0, None, 0), (3, 0, None, 2), (1, 2, None, 2), (4, 1, None, 4), (1, 2, 1, 1), (3, 0, 0, 0)],
)
def test_stale_beyond_the_allowed_gap(interval: int, level: int, limit: int | None, oldest_gap: int):
    admission = Admission(8, 4, interval, level, limit)
    assert not admission.is_stale(10, 10 - oldest_gap)
    assert admission.is_stale(10, 10 - oldest_gap - 1)


def test_returned_groups_free_their_places():
    admission = Admission(batch=8, group=4)
    dispatch_all(admission, 0)
    settle_all(admission)
    admission.release_accepted(1)
    assert dispatch_all(admission, 0) == 1
    settle_all(admission)
    assert not admission.allows(0)


@settings(max_examples=150, deadline=None)
@given(
    groups=st.integers(1, 5),
    size=st.integers(1, 4),
    interval=st.integers(0, 4),
    level=st.integers(0, 3),
    drop=st.floats(0, 0.6),
    seed=st.integers(0, 2**32),
)
def test_asynchronous_admission_is_bounded_and_never_deadlocks(groups, size, interval, level, drop, seed):
    """Groups finish in random order and some are dropped. The rule holds after every event."""
    rng = random.Random(seed)
    admission = Admission(groups * size, size, interval, level)
    version, running, ready, settled, dispatched = 0, [], 0, 0, 0
    while version < 12:
        while admission.allows(version):
            admission.dispatch()
            running.append(dispatched)
            dispatched += 1
        ahead = version * groups + ready + len(running)
        assert ahead <= (admission.window_start(version) + max(interval, 1) + level) * groups
        if ready >= groups:
            ready -= groups
            version += 1
            continue
        assert running, "too few groups are ready and none is running: deadlock"
        running.pop(rng.randrange(len(running)))
        kept = rng.random() >= drop
        admission.settle(accepted=kept)
        settled += 1
        ready += kept
    assert settled + len(running) == dispatched
    assert admission.running == len(running) * size
    assert admission.accepted == (version * groups + ready) * size
