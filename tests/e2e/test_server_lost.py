"""The sampling server is killed during a run: a server that someone restarts, and a server of the run.

The server is a test server with SGLang's API, in its own process. The tested code is common to SGLang and vLLM
(remote.py).
"""

from __future__ import annotations

import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port

from .helpers.processes import Command, WarmPython, children_of, environment, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, fingerprint

TESTS = Path(__file__).parents[1]
DEATHS = ["/server_info:1", "/update_weights_from_disk:1", "/generate:9", "/continue_generation:2"]


@contextmanager
def server(warm: WarmPython, folder: Path, model: Path, port: int, *deaths: str) -> Iterator[Command]:
    words = ["-m", "support.sglang_server", str(model), str(port), *deaths]
    process = warm.start(words, folder, env=environment(PYTHONPATH=str(TESTS)), python=True)
    try:
        wait_until(lambda: answers(port) or not process.running(), 60, "the server", 0.02)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "deaths", [DEATHS[1:2], pytest.param(DEATHS, marks=pytest.mark.faults)], ids=["one", "every-stage"]
)
def test_killed_server_is_restarted_elsewhere(new_run: Callable[..., Run], model: Path, deaths: list[str]) -> None:
    """The run waits, names the server and the duration, loads the weights again, and has the same results."""
    runs = []
    for name, own in (("undisturbed", []), ("disturbed", deaths)):
        port = free_port()
        client: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}/v1"}
        run = new_run(name, infer={"engine": "sglang"}, orch={"client": client})
        with server(run.warm, run.folder, model, port, *own) as process:
            command = run.grpo()
            assert command.wait() == 0, command.text()
            assert process.text().splitlines()[: len(own)] == own
        runs.append(run)
    undisturbed, disturbed = runs
    said, told = command.text(), [event["message"] for event in disturbed.events("waiting")]
    assert "Traceback" not in said and "the inference server responds" in said
    assert any(line.startswith(f"waiting for SGLang at http://127.0.0.1:{port} since ") for line in told)
    assert_trained_once(disturbed, 4)
    assert_same_run(disturbed, fingerprint(undisturbed))


def test_own_server_ends_the_run_which_then_resumes(new_run: Callable[..., Run], model: Path, tmp_path: Path) -> None:
    port, python = free_port(), tmp_path / "python"
    serve = f"PYTHONPATH={TESTS} exec {sys.executable} -m support.sglang_server {model} {port}"
    python.write_text(f"#!/bin/sh\ncase $1 in -m) {serve};; esac\n", "utf-8")  # -c: the check whether it has SGLang
    python.chmod(0o755)
    infer = {"engine": "sglang", "engine_python": str(python), "port": port}
    run = new_run(infer=infer, train={"save_steps": 1, "max_steps": 12})
    command, journal = run.start(), run.path / "journal.jsonl"
    wait_until(lambda: not command.running() or (journal.exists() and journal.stat().st_size), 60, "a step", 0.01)
    assert command.running(), command.text()
    (pid,) = (pid for pid in children_of(command.pid) if "sglang_server" in command_line(pid))
    os.kill(pid, signal.SIGKILL)
    assert command.wait() == 3, command.text()
    said = command.text()
    assert "shoal: error: SGLang was ended by SIGKILL. The last lines in out/logs/sglang.log:" in said
    assert "Traceback" not in said and "Unclosed" not in said and not answers(port)
    assert run.status()["resumable"]
    command = run.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 12)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8")
    except OSError:  # the process ended
        return ""
