"""Tools of MCP servers and OpenEnv environments, and programs in the sandbox, in a stateful environment."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.envs import ask
from shoal.envs.code_tools import CodeTools
from shoal.envs.mcp import McpServer
from shoal.envs.openenv import OpenEnv
from shoal.envs.stateful import StatefulEnvironment
from shoal.rewards.isolation import why_not
from support import mcp_notes
from support.openenv_double import openenv_double
from support.stateful import play, results


class Notes(McpServer):
    """The reward asks the server for the note."""

    command = (sys.executable, mcp_notes.__file__)

    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Write the note a.")]

    def get_reward(self) -> float:
        return float(self.call_tool("read", {"name": "a"}).startswith("b"))


class Counting(OpenEnv):
    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Play. ", target=3)]


class Programs(CodeTools):
    call_timeout_s = 1.0

    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Compute 6 times 7.")]

    def get_reward(self) -> float:
        return 1.0


def test_tools_of_an_mcp_server() -> None:
    calls = [("write", {"name": "a", "text": "b"}), ("read", {"name": "z"}), ("read", {"name": "a"})]
    for rollout in play(Notes, calls, size=2):
        assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
        assert results(rollout) == ["b\n[image]", "error: no such note\n[image]", "b\n[image]"]


def test_lost_mcp_server_excludes_the_rollout() -> None:
    (rollout,) = play(Notes, [("die", {})])
    assert rollout.status == "error" and "the notes burned" in (rollout.error or "")


def test_schemas_of_an_mcp_server_come_in_pages() -> None:
    server = Notes()
    try:
        server.reset()
        tools = [tool["function"] for tool in server.list_tools()]
    finally:
        server.close()
    assert [tool["name"] for tool in tools] == ["write", "read", "die"]
    assert tools[0] == {"name": "write", "description": "Write a note.", "parameters": mcp_notes.NAME}


@pytest.mark.parametrize("mcp", [False, True], ids=["actions", "mcp"])
def test_openenv_server(mcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout has its own session, which the end of the episode closes."""
    tool = "add" if mcp else "step"
    calls = [(tool, {"amount": 1}), (tool, {"amount": "x"}), ("jump", {}), (tool, {"amount": 2})]
    with openenv_double(mcp) as (url, double):
        monkeypatch.setattr(Counting, "url", url)
        for rollout in play(Counting, calls, size=2):
            assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
            assert rollout.prompt.messages == [{"role": "user", "content": "Play. Reach 3."}]
            first, invalid, unknown, last = results(rollout)
            assert (first, last) == ("now 1", "now 3") and len(rollout.turns) == 4
            assert invalid == "error: ValueError: Invalid message: ['amount']" and "no tool 'jump'" in unknown
        assert double.closed == ["closed", "closed"]


def test_openenv_servers_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with openenv_double() as (url, double):
        monkeypatch.setattr(Counting, "url", url)
        (lost,) = play(Counting, [("step", {"amount": -1})])
        assert lost.status == "error" and "closed the session" in (lost.error or "")
        double.most = 0
        (full,) = play(Counting, [])
        assert full.status == "error" and "CAPACITY_REACHED: full" in (full.error or "")
    (gone,) = play(Counting, [])
    assert gone.status == "error" and "Cannot connect" in (gone.error or "")


@pytest.mark.parametrize("kind, words", [(OpenEnv, "must start with http"), (McpServer, "command: is missing")])
def test_missing_arguments(kind: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind()


@pytest.mark.skipif(why_not() is not None, reason=f"no namespaces here: {why_not()}")
def test_programs_run_in_the_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    calls = [
        ("python", {"code": "print(6 * 7)"}),
        ("python", {"code": "1 / 0"}),
        ("python", {"code": "while True: pass"}),
        ("shell", {"command": f"touch {secret}; echo made"}),
        ("shell", {"command": "exit 3"}),
    ]
    began = time.monotonic()
    (rollout,) = play(Programs, calls, isolated=True)
    assert rollout.status == "ok" and time.monotonic() - began < 8, rollout.error
    good, raised, long, shell, code = results(rollout)
    assert good == "42" and "ZeroDivisionError" in raised and long.startswith("killed") and "made" in shell
    assert code == "exit code 3" and not secret.exists()
    assert StatefulEnvironment(Programs).needs_isolation
