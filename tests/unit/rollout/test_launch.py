"""A server process of the run: refused before it starts, and its log shown when it fails."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, DeadlineError, EngineError
from shoal.rollout.remote.process import STOP_S, Launch, ServerProcess, check_interpreter, end_of_log, listens
from shoal.rollout.remote.server_info import RemoteSettings
from shoal.rollout.remote.vllm import VllmRolloutEngine
from support.commands import until
from support.ports import free_port


def launch(folder: Path, script: str, port: int | None = None) -> ServerProcess:
    log = folder / "logs" / "vllm.log"
    return ServerProcess(Launch("vLLM", [sys.executable, "-c", script], "127.0.0.1", port or free_port(), log))


def connect(process: ServerProcess, folder: Path, start_s: float) -> None:
    """As in a run: wait for health, and always end the process."""
    url = f"http://127.0.0.1:{process.launch.port}"
    settings = RemoteSettings(url, "model", 64, 100, (2,), str, folder, start_s=start_s)

    async def main() -> None:
        engine = VllmRolloutEngine(settings, process)
        try:
            await engine.connect()
        finally:
            await engine.close()

    process.start()
    asyncio.run(main())


def test_dead_server_error_quotes_its_log(tmp_path: Path) -> None:
    script = "import sys; print('loading'); sys.exit('RuntimeError: out of luck')"
    with pytest.raises(
        ConfigError, match=r"(?s)vLLM ended with exit code 1. The last errors in .*vllm.log:\n.*out of luck"
    ):
        connect(launch(tmp_path, script), tmp_path, 30)


def test_server_that_stops_listening_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with a failed engine waits forever for the answer of the running call before it ends."""
    monkeypatch.setattr("shoal.rollout.remote.process.NOT_LISTENING_S", 0.3)
    port, deaf = free_port(), tmp_path / "deaf"
    script = (
        "import pathlib, signal, socket, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"with socket.create_server(('127.0.0.1', {port})):\n"
        f"    while not pathlib.Path({str(deaf)!r}).exists(): time.sleep(.01)\n"
        "print('RuntimeError: the engine is dead', flush=True); time.sleep(300)"
    )
    process = launch(tmp_path, script, port)
    process.start()
    try:
        while not listens("127.0.0.1", port):  # a process that does not listen yet has not ended
            assert process.ended() is None
            time.sleep(0.01)
        assert process.ended() is None
        deaf.touch()
        for _ in range(300):
            if (ended := process.ended()) is not None:
                break
            time.sleep(0.05)
        assert ended is not None and ended.startswith("vLLM runs, but no longer listens. The last errors in ")
        assert "the engine is dead" in ended
    finally:
        began = time.monotonic()
        asyncio.run(process.close())
    assert time.monotonic() - began < STOP_S, "a process that ends, or never ends, is not queried for long"


ENDS = {
    "by itself, before it listens": ("raise SystemExit(1)", ConfigError, "vLLM ended with exit code 1"),
    "by a signal": ("import os; os.kill(os.getpid(), 9)", EngineError, "vLLM was ended by SIGKILL"),
    "by itself, after it served": ("serve(); raise SystemExit(1)", EngineError, "vLLM ended with exit code 1"),
    "of an argument": ("raise SystemExit('x: error: unrecognized arguments: --a')", ConfigError, "infer.engine_args"),
}


@pytest.mark.parametrize("how", ENDS)
def test_server_end_is_classified_as_config_or_failure(tmp_path: Path, how: str) -> None:
    """Errors that cannot succeed on this machine differ from failures: only failures are retried."""
    (end, kind, message), port = ENDS[how], free_port()
    serve = (
        "import socket\n"
        f"def serve():\n    with socket.create_server(('127.0.0.1', {port})) as server: server.accept()\n"
    )
    process = launch(tmp_path, serve + end, port)
    process.start()
    try:
        for _ in range(600):
            if (failure := process.failure()) is not None:
                break
            time.sleep(0.05)
        assert type(failure) is kind and str(failure).startswith(message)
    finally:
        asyncio.run(process.close())


def test_log_errors_are_shown_once_without_tracebacks(tmp_path: Path) -> None:
    at = "(APIServer pid=3) {} 11-15 14:26:54 [a.py:5]"
    stack = [f"{at.format('ERROR')} Traceback (most recent call last):", f"{at.format('ERROR')}   File x, in y"]
    caught = [f"{at.format('ERROR')} Exception caught. Request id: tokens-a{i}f" for i in range(40)]
    dead = f"{at.format('ERROR')} EngineDeadError: EngineCore encountered an issue."
    dumped = f"{at.format('ERROR')} Dumping scheduler output: {'x' * 5000}"
    requests = [line for first in caught for line in (first, *stack, dead)]
    lines = [f"{at.format('ERROR')} Worker died: SIGKILL", dumped, *requests, "INFO:     Shutting down"]
    lines.insert(0, f"{at.format('WARNING')} expect `OSError: [Errno 24] Too many open files`.")
    log = tmp_path / "vllm.log"
    log.write_text("\n".join(lines), "utf-8")
    shown = [f"{at.format('ERROR')} Worker died: SIGKILL", f"{dumped[:300]}…", caught[0], dead]
    assert end_of_log(log).splitlines() == [f"The last errors in {log}:", *(f"  {line}" for line in shown)]
    answered = '(APIServer pid=3) INFO:     127.0.0.1:38968 - "POST /pause HTTP/1.1" {}\n'
    log.write_text("loading\n\nready\n" + answered.format("200 OK") * 20, "utf-8")
    assert end_of_log(log) == f"The last lines in {log}:\n  loading\n  ready"


def test_unknown_argument_gives_one_line(tmp_path: Path) -> None:
    script = "import argparse; argparse.ArgumentParser().parse_args(['--max-looras', '3'])"
    with pytest.raises(ConfigError) as caught:
        connect(launch(tmp_path, script), tmp_path, 30)
    assert str(caught.value) == "infer.engine_args: vLLM does not know --max-looras 3; see its --help"


def test_server_that_never_answers_times_out_and_is_ended(tmp_path: Path) -> None:
    process = launch(tmp_path, "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)")
    with pytest.raises(DeadlineError, match=r"vLLM is not ready after 1 s \(infer.start_deadline_s\)"):
        connect(process, tmp_path, 1)
    assert process.pid is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # neither it nor its child


def test_taken_port_is_refused_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"infer.port: {port} on 127.0.0.1 is taken by another process"):
            launch(tmp_path, "", port).start()


TAKEN = {
    "and ended by it": ("print('OSError: [Errno 98] Address already in use'); raise SystemExit(1)", True, True),
    "as uvicorn says it": (
        "print(\"ERROR:    [Errno 98] error while attempting to bind on address ('::', 1): address already in use\");"
        "raise SystemExit(1)",
        True,
        True,
    ),
    "but another port": ("print('OSError: [Errno 98] Address already in use'); raise SystemExit(1)", False, False),
    "and went on": (
        "print('OSError: [Errno 98] Address already in use'); print('MemoryError: no room'); raise SystemExit(1)",
        True,
        False,
    ),
}


@pytest.mark.parametrize("how", TAKEN)
def test_port_is_blamed_only_if_it_ended_the_server(tmp_path: Path, how: str) -> None:
    (script, taken, blamed), port = TAKEN[how], free_port()
    process = launch(tmp_path, script, port)
    process.start()
    with socket.socket() as other:
        if taken:
            other.bind(("127.0.0.1", port))
        until(lambda: process.failure() is not None)
        failure = process.failure()
    asyncio.run(process.close())
    assert isinstance(failure, ConfigError)
    expected = f"infer.port: {port} was taken while vLLM started" if blamed else "vLLM ended with exit code 1. The last"
    assert str(failure).startswith(expected)


def test_address_without_server(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"

    async def main() -> None:
        engine = VllmRolloutEngine(RemoteSettings(url, "model", 64, 100, (2,), str, tmp_path, start_s=0.5))
        try:
            await engine.connect()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=r"waited 0 s for vLLM at http.*orch.client.base_url"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/bin/python", "infer.engine_python: /nowhere/bin/python is not an executable file"),
        (sys.executable, "has no package vllm; name the Python that has vLLM"),
    ],
)
def test_unsuitable_interpreter(python: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_interpreter(python, "vllm", "vLLM")
