"""A weight of a part that no reward has is reported, with the nearest name."""

import pytest

from shoal.core.errors import ConfigError
from shoal.rewards.outcome import ENOUGH, PartCheck


def test_misspelled_part_is_refused_after_a_few_scores():
    check = PartCheck(["shrot", "correct"], ["env"])
    for _ in range(ENOUGH - 1):
        check.note("env", {"correct": 1.0, "short": 0.2})
    with pytest.raises(
        ConfigError, match=r"orch\.reward\.parts\.shrot: .*there are correct, short; did you mean `short`"
    ):
        check.note("env", {"correct": 1.0, "short": 0.2})


def test_occasional_part_is_accepted():
    check = PartCheck(["bonus"], ["env"])
    for number in range(3 * ENOUGH):
        check.note("env", {"bonus": 1.0} if number == 3 else {"base": 1.0})


def test_every_environment_is_drawn():
    check = PartCheck(["second"], ["a", "b"])
    for _ in range(3 * ENOUGH):
        check.note("a", {"first": 1.0})
    check.note("b", {"second": 1.0})
    for _ in range(3 * ENOUGH):
        check.note("b", {})


def test_rewards_without_parts():
    check = PartCheck(["style"], ["env"])
    with pytest.raises(ConfigError, match="the rewards have no parts"):
        for _ in range(ENOUGH):
            check.note("env", {})
