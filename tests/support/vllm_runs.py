"""Runs with a real vLLM, their own or the shared one, and queries of its processes. For tests with the marker vllm."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from shoal.core.types import Completion
from shoal.rollout.remote.vllm import VllmRolloutEngine
from support import engine_servers
from support.engine_servers import CPU, contract_model, vllm_python
from support.models import EOS, random_prompts
from support.ports import free_port

(PROMPT,) = random_prompts(5, 12)
ROOT = Path(__file__).parents[2]
OWN_STEPS = 4


def on_shared_vllm(test: Callable[[VllmRolloutEngine], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        async with engine_servers.attached_vllm(**changes) as engine:
            await test(engine)

    asyncio.run(main())


@torch.no_grad()
def logprobs(model: Any, completion: Completion, *, ended_late: bool = False) -> np.ndarray:
    """`ended_late`: min_tokens excluded the end token, so the others are renormalised."""
    rows = model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1].double()
    if ended_late:
        rows[:, EOS] = -torch.inf
    return rows.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0].numpy()


def grpo(
    folder: Path, *arguments: str, infer: dict[str, Any], **sections: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    process = start_grpo(folder, *arguments, infer=infer, **sections)
    try:
        out, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def start_grpo(
    folder: Path, *arguments: str, infer: dict[str, Any], **sections: dict[str, Any]
) -> subprocess.Popen[str]:
    """`shoal grpo` with a short run on the model of the shared server."""
    reverse = {"system_prompt": "Reverse.", "min_len": 3, "max_len": 6, "num_train": 200, "num_eval": 20}
    config = {
        "train": {
            "model": str(contract_model()), "output_dir": "out", "max_steps": 3, "learning_rate": 5e-3,
            "sequence_len": 128, "device": "cpu", "loss": {"type": "grpo"}, **sections.get("train", {}),
        },
        "infer": {"engine": "vllm", **infer},
        "orch": {
            "env": [{"id": "reverse-text", "args": reverse}], "batch_size": 16, "rollouts_per_example": 4,
            "sampling": {"max_tokens": 10}, "reward": "rewards_of_vllm:letters", **sections.get("orch", {}),
        },
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config), "utf-8")
    # A reward that random weights sometimes earn.
    (folder / "rewards_of_vllm.py").write_text(
        "def letters(task, messages):\n    text = messages[-1]['content']\n"
        "    return sum(c.isalpha() for c in text) / 10\n",
        "utf-8",
    )
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    env = {**os.environ, **CPU, "PYTHONPATH": path}
    command = [sys.executable, "-m", "shoal", "grpo", "run.yaml", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def own_server() -> dict[str, Any]:
    """The infer section of a run that starts a vLLM. Passes have so few tokens that the prompts of a step do not fit
    into one, and would be split if vLLM could split them.
    """
    arguments = {"enforce_eager": True, "max_num_batched_tokens": 128}
    return {"engine_python": vllm_python(), "port": free_port(), "engine_args": arguments}


@functools.cache
def own_server_run() -> Path:
    """The folder of an undisturbed run with its own vLLM, made once for all tests."""
    folder, infer = engine_servers.folder() / "own-server-run", own_server()
    folder.mkdir()
    done = grpo(folder, infer=infer, train={"max_steps": OWN_STEPS})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not pids("-f", f"port {infer['port']}"), "the server ends with the run"
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def wait_until(true: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def server_of(port: int) -> int | None:
    """The first process of the server that listens, or will listen, on this port."""
    return min(pids("-f", f"api_server.*--port {port}"), default=None)


def engine_of(port: int) -> int:
    """The engine process of the server that listens on this port."""
    return pids("-P", str(min(pids("-f", f"port {port}"))), "-f", "EngineCore")[0]


def pids(*arguments: str) -> list[int]:
    done = subprocess.run(["pgrep", *arguments], stdout=subprocess.PIPE, check=False)
    return [int(pid) for pid in done.stdout.split()]
