"""The processes of a run's vLLM are suspended: while it loads, during an update, and while it samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.vllm_runs import (
    OWN_STEPS,
    engine_of,
    lines,
    own_server,
    own_server_run,
    pids,
    server_of,
    start_grpo,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SHARED = Path("/dev/shm")


def test_vllm_suspended_at_every_stage(tmp_path: Path) -> None:
    """The run names the process that it waits for, and its weights equal those of an undisturbed run bit for bit. vLLM
    reports that it is healthy while its engine is suspended.
    """
    undisturbed = [record["weights"] for record in lines(own_server_run() / "out" / "journal.jsonl")]
    infer, out = own_server(), tmp_path / "out"
    log, journal, events = out / "logs" / "vllm.log", out / "journal.jsonl", out / "events.jsonl"
    shared = set(SHARED.iterdir())
    run = start_grpo(tmp_path, infer=infer, train={"max_steps": OWN_STEPS})

    def ran_on(reached: object) -> bool:
        return bool(reached) or run.poll() is not None

    def stop_and_continue(pid: int) -> None:
        word = f"its process {pid} is stopped"
        before = events.read_text("utf-8").count(word)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: ran_on(events.read_text("utf-8").count(word) > before), 120)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert run.poll() is None

    try:
        wait_until(lambda: ran_on(log.exists() and server_of(infer["port"])), 120)
        server = server_of(infer["port"])
        assert server is not None
        stop_and_continue(server)
        wait_until(lambda: ran_on("/health HTTP/1.1" in log.read_text("utf-8", "replace")), 300)
        engine = engine_of(infer["port"])
        wait_until(lambda: ran_on("POST /pause" in log.read_text("utf-8", "replace")), 120)
        stop_and_continue(engine)
        wait_until(lambda: ran_on(journal.exists() and journal.stat().st_size), 120)
        stop_and_continue(server)
        said, errors = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 0, said[-3000:] + errors[-3000:]
    assert [record["weights"] for record in lines(journal)] == undisturbed
    assert "the inference server responds" in said
    assert not pids("-f", f"port {infer['port']}"), "no process or file remains"
    left = {file.name for file in set(SHARED.iterdir()) - shared}
    assert not any(name.startswith("psm_") for name in left), left
