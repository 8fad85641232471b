"""What follows from the end of a process of the split layout; with real processes in tests/e2e/test_supervisor.py."""

from __future__ import annotations

from shoal.errors import EXIT_BUG
from shoal.orchestrator.supervise import Child, Supervisor


def test_a_leader_that_met_a_bug_ends_the_run_with_its_code():
    """It told the others that the run is over, so one that is started again would wait for nobody."""
    told: list[str] = []
    leader = Child("grpo-orch", ["--version"])
    supervisor = Supervisor([leader, Child("grpo-train", ["--version"])], "grpo-orch", told.append)
    assert supervisor._ended(leader, EXIT_BUG) == EXIT_BUG
    assert (leader.restarts, leader.process, told) == (0, None, [])
