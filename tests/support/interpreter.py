"""Code in a process of its own under Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

PRELUDE = """
    import copy, torch
    from shoal.engine.cache import SlotCache
    from shoal.models.attention import Shape, dense_attention
    torch.manual_seed(0)
"""


def run_interpreted(code: str) -> None:
    script = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    path = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
