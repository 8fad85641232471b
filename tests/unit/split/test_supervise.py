"""Consequences of the end of a process in the split layout. tests/e2e/test_supervisor.py uses real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.core.errors import EXIT_BUG, EXIT_DONE, EXIT_STOPPED, EXIT_TERMINATED
from shoal.split.supervisor import Child, Supervisor


def test_leader_bug_ends_the_run_with_its_exit_code():
    """It reported the end of the run to the others, so a restarted process would wait forever."""
    told: list[str] = []
    leader = Child("grpo-orch", ["--version"])
    supervisor = Supervisor([leader, Child("grpo-train", ["--version"])], "grpo-orch", told.append)
    assert supervisor._ended(leader, EXIT_BUG) == EXIT_BUG
    assert (leader.restarts, leader.process, told) == (0, None, [])


def supervised(leader_runs: str, told: list[str], code: str = "") -> tuple[Supervisor, Child, Child]:
    leader, server = Child("grpo-orch", []), Child("grpo-infer", ["--version"])
    leader.process = subprocess.Popen([*leader_runs.split(), *(["-c", code] if code else [])])
    return Supervisor([leader, server], "grpo-orch", told.append), leader, server


def test_server_ended_separately_is_restarted():
    """It ends by its signal: exit code 0 would mean the end of the run."""
    told: list[str] = []
    supervisor, leader, server = supervised("sleep 60", told)
    try:
        assert supervisor._ended(server, -15) is None
        assert told == ["grpo-infer ended by signal 15; it is restarted (1 of 3)"]
        assert server.process is not None and server.process.wait(30) == 0
    finally:
        leader.process.kill()  # type: ignore[union-attr]
        leader.process.wait()  # type: ignore[union-attr]


@pytest.mark.parametrize("signals", [[], [15]], ids=["alone", "signalled"])
@pytest.mark.parametrize("code", [0, 3, 143])
def test_leader_decides_how_the_run_ended(code: int, signals: list[int]):
    """The others end with 0 after its report, before it has ended itself."""
    told: list[str] = []
    supervisor, leader, server = supervised(sys.executable, told, f"import time; time.sleep(.2); exit({code})")
    supervisor._signals += signals
    assert supervisor._ended(server, EXIT_DONE) == code == leader.code and not told and server.process is None


def test_killed_leader_reports_no_success():
    supervisor, _, server = supervised(sys.executable, [], "import os; os.kill(os.getpid(), 9)")
    assert supervisor._ended(server, EXIT_DONE) == EXIT_STOPPED


def test_crash_after_a_signal_keeps_the_leader_grace_period():
    told: list[str] = []
    supervisor, leader, server = supervised("sleep 0.2", told)
    supervisor._signals.append(15)
    assert supervisor._ended(server, -15) == EXIT_TERMINATED
    assert leader.code == 0 and server.process is None, "it was awaited"
