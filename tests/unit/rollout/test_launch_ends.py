"""A server process of the run ends with the run for every kind of end, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from shoal.rollout.remote.process import Launch, ServerProcess
from support.commands import children_of, until
from support.ports import free_port


def launch(folder: Path, script: str, port: int | None = None) -> ServerProcess:
    log = folder / "logs" / "vllm.log"
    return ServerProcess(Launch("vLLM", [sys.executable, "-c", script], "127.0.0.1", port or free_port(), log))


def test_suspended_server_is_reported_and_ended(tmp_path: Path) -> None:
    """Its child is suspended, not itself. SIGTERM alone would not reach the child."""
    child = "import pathlib, signal, time; signal.signal(15, lambda *_: pathlib.Path('ended').touch() or exit()); "
    child += "pathlib.Path('up').touch(); time.sleep(300)"
    script = f"import os, subprocess, sys; os.chdir({str(tmp_path)!r}); "
    script += f"sys.exit(subprocess.Popen([sys.executable, '-c', {child!r}]).wait())"
    process = launch(tmp_path, script)
    process.start()
    assert process.pid is not None
    until(lambda: (tmp_path / "up").exists())
    assert process.stopped() is None
    (pid,) = children_of(process.pid)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process.stopped() is not None)
    assert process.stopped() == f"its process {pid} is stopped; continue it with SIGCONT" and process.ended() is None
    asyncio.run(process.close())
    assert (tmp_path / "ended").exists() and not Path(f"/proc/{pid}").exists()


def test_unclosed_server_ends_with_the_process_but_not_with_a_fork(tmp_path: Path) -> None:
    """It ignores SIGTERM, like vLLM while it imports."""
    server = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from shoal.rollout.remote.process import Launch, ServerProcess\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        f"launch = Launch('vLLM', [sys.executable, '-c', {server!r}], '127.0.0.1', {free_port()}, log)\n"
        "process = ServerProcess(launch); process.start()\n"
        "while not log.read_text(): time.sleep(.02)\n"
        "if not os.fork(): sys.exit()\n"
        "os.wait(); print(process.pid, process.ended(), flush=True); sys.exit('ended by a signal')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    pid, ended = done.stdout.split()
    assert ended == "None" and done.stderr == "ended by a signal\n"
    assert not Path(f"/proc/{pid}").exists()


def test_shared_memory_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    share = (
        "import multiprocessing, os, signal, sys, time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "memory, lock = SharedMemory(create=True, size=64), multiprocessing.get_context('spawn').Lock()\n"
        "print(memory.name, 'sem.' + lock._semlock.name[1:], flush=True)\n"
    )
    others = SharedMemory(create=True, size=64)
    try:
        process = launch(tmp_path, share + "time.sleep(300)")
        process.start()
        until(lambda: process.tail(9).count(" ") == 1)
        files = [Path("/dev/shm") / name for name in process.tail(9).split()]
        assert all(file.exists() for file in files) and process.ended() is None, "visible while it lives"
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: process.ended() is not None)
        assert all(file.exists() for file in files)
        asyncio.run(process.close())
        assert not any(file.exists() for file in files) and (Path("/dev/shm") / others.name).exists()
    finally:
        others.close()
        others.unlink()


def test_server_ends_with_its_killed_parent(tmp_path: Path) -> None:
    """SIGKILL: no code of Shoal runs, so Linux ends the server."""
    script = (
        "import time; from pathlib import Path; from shoal.rollout.remote.process import Launch, ServerProcess\n"
        f"import sys; launch = Launch('vLLM', [sys.executable, '-c', 'import time; time.sleep(300)'], '127.0.0.1', "
        f"{free_port()}, Path({str(tmp_path / 'log')!r}))\n"
        "process = ServerProcess(launch); process.start(); print(process.pid, flush=True); time.sleep(300)"
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    server = int(ours.stdout.readline())
    ours.kill()
    ours.wait()
    for _ in range(100):
        if not Path(f"/proc/{server}").exists() or " Z " in Path(f"/proc/{server}/stat").read_text():
            return
        time.sleep(0.1)
    os.kill(server, 9)
    raise AssertionError("the server outlived us")
