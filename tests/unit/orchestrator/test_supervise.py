"""What follows from the end of a process of the split layout; with real processes in tests/e2e/test_supervisor.py."""

from __future__ import annotations

import subprocess

import pytest

from shoal.errors import EXIT_BUG, EXIT_DONE, EXIT_TERMINATED
from shoal.orchestrator import supervise
from shoal.orchestrator.supervise import Child, Supervisor


def test_a_leader_that_met_a_bug_ends_the_run_with_its_code():
    """It told the others that the run is over, so one that is started again would wait for nobody."""
    told: list[str] = []
    leader = Child("grpo-orch", ["--version"])
    supervisor = Supervisor([leader, Child("grpo-train", ["--version"])], "grpo-orch", told.append)
    assert supervisor._ended(leader, EXIT_BUG) == EXIT_BUG
    assert (leader.restarts, leader.process, told) == (0, None, [])


def supervised(leader_runs: str, told: list[str]) -> tuple[Supervisor, Child, Child]:
    leader, server = Child("grpo-orch", []), Child("grpo-infer", ["--version"])
    leader.process = subprocess.Popen(leader_runs.split())
    return Supervisor([leader, server], "grpo-orch", told.append), leader, server


def test_a_server_that_was_ended_alone_is_started_again(monkeypatch: pytest.MonkeyPatch):
    """A server ends with 0 when it is sent SIGTERM, and the run was ended with it, unfinished and with exit code 0."""
    monkeypatch.setattr(supervise, "HEARD_S", 0.2)
    told: list[str] = []
    supervisor, leader, server = supervised("sleep 60", told)
    try:
        assert supervisor._ended(server, EXIT_DONE) is None
        assert told == ["grpo-infer ended by exit code 0; it is started again (1 of 3)"]
        assert server.process is not None and server.process.wait(30) == 0
    finally:
        leader.process.kill()  # type: ignore[union-attr]
        leader.process.wait()  # type: ignore[union-attr]


def test_a_server_that_ends_with_the_run_is_not_started_again():
    told: list[str] = []
    supervisor, _, server = supervised("sleep 0.2", told)
    assert supervisor._ended(server, EXIT_DONE) == EXIT_DONE and not told and server.process is None


def test_a_crash_after_a_signal_leaves_the_leader_its_time():
    told: list[str] = []
    supervisor, leader, server = supervised("sleep 0.2", told)
    supervisor._signals.append(15)
    assert supervisor._ended(server, -15) == EXIT_TERMINATED
    assert leader.code == 0 and server.process is None, "it was waited for"
