"""A server that samples is killed in the middle of a run, by each thing it is asked, and somebody starts it again.

The server is the double of SGLang's, as a process; what is tested is what vLLM has in common with it (remote.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.engine_servers import free_port

from .helpers.processes import environment, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, fingerprint

TESTS = Path(__file__).parents[1]
DEATHS = ["/server_info:1", "/update_weights_from_disk:1", "/generate:9", "/continue_generation:2"]


@contextmanager
def server(model: Path, port: int, *deaths: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "support.sglang_server", str(model), str(port), *deaths]
    env = environment(PYTHONPATH=str(TESTS))
    process = subprocess.Popen(
        command, cwd=TESTS, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        wait_until(lambda: answers(port) or process.poll() is not None, 60, "the server", 0.1)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def test_one_that_is_killed_at_every_stage_and_started_again(new_run: Callable[..., Run], model: Path) -> None:
    """The run waits, says for whom and since when, gives it the weights again, and comes to the same results."""
    runs = []
    for name, deaths in (("undisturbed", []), ("disturbed", DEATHS)):
        port = free_port()
        client: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}/v1"}
        run = new_run(name, infer={"engine": "sglang"}, orch={"client": client})
        with server(model, port, *deaths) as process:
            command = run.grpo()
            assert command.wait() == 0, command.text()
            assert process.stdout is not None
            assert [process.stdout.readline().strip() for _ in deaths] == deaths
        runs.append(run)
    undisturbed, disturbed = runs
    said, told = command.text(), [event["message"] for event in disturbed.events("waiting")]
    assert "Traceback" not in said and said.count("the inference server is there") == len(DEATHS)
    assert any(line.startswith(f"waiting for SGLang at http://127.0.0.1:{port} since ") for line in told)
    assert_trained_once(disturbed, 4)
    assert_same_run(disturbed, fingerprint(undisturbed))
