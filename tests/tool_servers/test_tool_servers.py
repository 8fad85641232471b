"""Servers of the packages openenv and mcp, each in its own Python, as stateful environments.

`make test-tool-servers` installs the packages and runs these tests.
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.envs import ask
from shoal.envs.mcp import McpServer
from shoal.envs.openenv import OpenEnv
from support.ports import free_port
from support.stateful import play, results

pytestmark = [pytest.mark.tool_servers, pytest.mark.timeout(180)]
FOLDER = Path(os.environ.get("SHOAL_TOOL_SERVERS", "/nonexistent"))
HERE = Path(__file__).parent


class Notes(McpServer):
    command = (str(FOLDER / "mcp/bin/python"), str(HERE / "notes_server.py"))

    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Write the note a.")]

    def get_reward(self) -> float:
        return float(self.call_tool("read", {"name": "a"}) == "b")


class Counting(OpenEnv):
    @staticmethod
    def tasks(split: str) -> list[Any]:
        return [ask("Play. ", target=3)]


@contextmanager
def openenv_server(kind: str) -> Iterator[str]:
    port = free_port()
    command = [str(FOLDER / "openenv/bin/python"), str(HERE / "openenv_server.py"), str(port), kind]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while not _is_healthy(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["actions", "mcp"])
def test_openenv(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"actions": "step", "mcp": "add"}[kind]
    calls = [(tool, {"amount": 1}), (tool, {"amount": "x"}), (tool, {"amount": 2})]
    with openenv_server(kind) as url:
        monkeypatch.setattr(Counting, "url", url)
        for rollout in [*play(Counting, calls, size=4), *play(Counting, calls, size=8)]:  # sessions are freed
            assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
            first, invalid, last = results(rollout)
            assert (first, last) == ("now 1", "now 3") and invalid.startswith("error: ")
            assert len(rollout.turns) == 3  # the server reported that it is done


def test_mcp() -> None:
    calls = [("write", {"name": "a", "text": "b"}), ("read", {"name": "z"}), ("read", {"name": "a"})]
    for rollout in play(Notes, calls, size=2):
        assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
        written, missing, note = results(rollout)
        assert (written, note) == ("written", "b") and missing.startswith("error: ")
