"""The run's server is suspended, and Ctrl-C while one loads. The server is a test server with SGLang's API.

tests/real_vllm/test_stopped.py suspends a real vLLM, which has several processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import children_of
from support.ports import free_port

from .helpers.processes import LIMIT_S, Command, wait_until
from .helpers.runs import Run, assert_trained_once

TESTS = Path(__file__).parents[1]
# Loads while the file `hold` exists and ignores SIGTERM, like vLLM while it imports.
LOADING = """#!/bin/sh
case $1 in -m) ;; *) exit 0;; esac  # asked whether it has SGLang
if [ -e {hold} ]; then trap '' TERM; echo $$ > {hold}; while :; do sleep 1; done; fi
PYTHONPATH={tests} exec {python} -m support.sglang_server {model} {port}
"""


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    return tmp_path / "hold"


@pytest.fixture
def infer(tmp_path: Path, model: Path, hold: Path) -> dict[str, Any]:
    port, python = free_port(), tmp_path / "python"
    python.write_text(LOADING.format(hold=hold, tests=TESTS, python=sys.executable, model=model, port=port), "utf-8")
    python.chmod(0o755)
    return {"engine": "sglang", "engine_python": str(python), "port": port}


def server_of(run: Run, command: Command, infer: dict[str, Any], steps: int) -> int:
    journal = run.path / "journal.jsonl"
    reached = lambda: journal.exists() and journal.read_bytes().count(b"\n") >= steps  # noqa: E731
    wait_until(lambda: not command.running() or reached(), LIMIT_S, "a step", 0.005)
    assert command.running(), command.text()
    (pid,) = (pid for pid in children_of(command.pid) if f"\0{infer['port']}\0" in command_line(pid))
    return pid


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8")
    except OSError:  # the process ended
        return ""


def stops_told(run: Run, pid: int) -> bool:
    file = run.path / "events.jsonl"
    return file.exists() and f"its process {pid} is stopped; continue it with SIGCONT" in file.read_text("utf-8")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# A tenth of the usual timeout for a server that does not answer.
IMPATIENT = {"shoal.rollout.remote.server_api": {"POLL_EVERY_S": 0.5, "HEALTH_S": 1.0}}


def test_server_suspended_forever(new_run: Callable[..., Run], infer: dict[str, Any]) -> None:
    """The wait is reported. After the deadline the run and its server end, and the run can resume."""
    run = new_run(infer=infer, train={"save_steps": 1, "max_steps": 60}, orch={"client": {"timeout": 12}})
    command = run.start(values=IMPATIENT)
    pid = server_of(run, command, infer, 2)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not command.running() or stops_told(run, pid), LIMIT_S, "the word about it", 0.05)
    assert command.running(), command.text()
    told = lambda: run.status()["reason"].startswith("waiting for SGLang at ")  # noqa: E731 - after the event
    wait_until(lambda: not command.running() or told(), LIMIT_S, "the status", 0.05)
    assert run.status()["state"] == "running", command.text()
    assert command.wait() == 3, command.text()
    said = command.text()
    assert "within 12 s: its process" in said and "Traceback" not in said
    assert gone(pid) and run.status()["resumable"]
    done = len(run.journal())
    assert run.grpo("--resume", f"train.max_steps={done + 2}").wait() == 0
    assert_trained_once(run, done + 2)


@pytest.mark.parametrize("layout", ["colocated", pytest.param("split", marks=pytest.mark.faults)])
def test_ctrl_c_while_it_loads(new_run: Callable[..., Run], infer: dict[str, Any], hold: Path, layout: str) -> None:
    hold.touch()
    run = new_run(infer=infer, train={"max_steps": 2})
    command = run.start("--layout", layout)
    wait_until(lambda: not command.running() or hold.stat().st_size, LIMIT_S, "the server", 0.05)
    assert command.running(), command.text()
    pid = int(hold.read_text())
    command.send(signal.SIGINT)
    assert command.wait() == 130, command.text()
    said = command.text().splitlines()[-1]
    # In the split layout the server may be up before the command has imported all its modules.
    assert said.startswith(("shoal: error: ended by SIGINT", "shoal: error: interrupted")), command.text()
    assert "Traceback" not in command.text()
    assert gone(pid)
    hold.unlink()
    assert run.grpo("--layout", layout, "--resume").wait() == 0
    assert_trained_once(run, 2)


@pytest.mark.faults
def test_stop_and_end_are_reported_in_a_split_run(
    new_run: Callable[..., Run], infer: dict[str, Any], hold: Path
) -> None:
    """grpo-infer reports both to the orchestrator, and reports the end before the remaining server processes are
    ended.
    """
    hold.touch()
    run = new_run(infer=infer, train={"max_steps": 2})
    command = run.start("--layout", "split")
    wait_until(lambda: not command.running() or hold.stat().st_size, LIMIT_S, "the server", 0.05)
    assert command.running(), command.text()
    pid = int(hold.read_text())
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not command.running() or stops_told(run, pid), LIMIT_S, "the word about it", 0.05)
    os.kill(pid, signal.SIGKILL)
    assert command.wait() == 3, command.text()
    said = command.text()
    assert "error: grpo-infer ended the run: SGLang was ended by SIGKILL" in said and "Traceback" not in said
    assert "still loading" not in said[said.index(f"its process {pid} is stopped") :]
