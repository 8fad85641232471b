"""Runs code under Triton's interpreter, which must be enabled before Triton is imported.

As a script, this is a Python with the interpreter enabled that has imported the tests' modules and forks one process
per test, because imports take longer than most tests. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from importlib import import_module
from pathlib import Path

PRELUDE = """
    import copy, torch
    from shoal.engine.kv_cache import SlotCache
    from shoal.models.attention import Shape, dense_attention
    torch.manual_seed(0)
"""
HEAVY = (
    "triton", "shoal.engine.engine", "shoal.engine.decode_graphs", "shoal.models.lora", "shoal.trainer.policy",
    "peft", "transformers.models.qwen3.modeling_qwen3", "support.engines", "support.models",
)  # fmt: skip
LIMIT_S = 120


def run_interpreted(code: str) -> None:
    script = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        asked = {"script": script, "errors": str(errors), "cwd": str(Path.cwd())}
        ended = _ask(_warm_python(), json.dumps(asked).encode() + b"\n")
        assert ended == 0, f"ended with {ended}: {errors.read_text()[-2000:]}"


def _ask(python: subprocess.Popen[bytes], line: bytes) -> int:
    """The result of the test. If the Python hangs or ended, this test fails and the next one starts a new Python."""
    assert python.stdin is not None and python.stdout is not None
    try:
        python.stdin.write(line)
        python.stdin.flush()
        ready, _, _ = select.select([python.stdout], [], [], 2 * LIMIT_S)
        answer = python.stdout.readline() if ready else b""
    except BrokenPipeError:
        answer = b""
    if not answer:
        python.kill()
        _warm_python.cache_clear()
        raise AssertionError(f"the interpreter's Python gave no answer and ended with {python.wait()}")
    return json.loads(answer)


@functools.cache
def _warm_python() -> subprocess.Popen[bytes]:
    """It ends when its stdin closes, and so with the tests."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            be_the_test(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps(code).encode() + b"\n")


def be_the_test(asked: dict[str, str]) -> None:
    """Run the test in a separate process until it ends or its time is over."""
    signal.alarm(LIMIT_S)
    os.chdir(asked["cwd"])
    output = os.open(asked["errors"], os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        exec(compile(asked["script"], "test", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for module in HEAVY:
        import_module(module)
    serve()
