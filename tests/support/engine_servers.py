"""Servers of other projects for the tests: a real vLLM, started once, and a test server with SGLang's API, with their
engines.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from peft import PeftModel
from safetensors.torch import save_file

from shoal.core.errors import EngineError
from shoal.rollout.remote.process import Launch, ServerProcess
from shoal.rollout.remote.server_info import RemoteSettings
from shoal.rollout.remote.sglang import SglangRolloutEngine
from shoal.rollout.remote.vllm import ENVIRONMENT, FLAGS, VllmRolloutEngine
from shoal.runs.weight_files import describe
from support.engines import detokenize
from support.models import EOS, TOKENIZER, VOCABULARY, lora_decoder, small_model
from support.ports import free_port
from support.sglang_double import SglangDouble

CONTEXT_TOKENS = 96  # of the contract suite
SERVER_TOKENS = 160  # of the server, which other tests share
LORA_RANK = 8
START_S = 420.0
# Two cores, no GPU. Used for every vLLM that a test starts.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}


def vllm_python() -> str:
    """The Python that `make test-vllm` installed."""
    folder = os.environ.get("SHOAL_VLLM", "/nonexistent")
    return str(Path(folder) / "env" / "bin" / "python")


@functools.cache
def folder() -> Path:
    """A folder for models and versions that servers read. It is deleted after the tests."""
    kept = tempfile.TemporaryDirectory(prefix="shoal-servers-")
    atexit.register(kept.cleanup)
    return Path(kept.name)


@functools.cache
def contract_model() -> Path:
    """The model of the contract suite as a folder. Its head_dim is 32, the smallest of vLLM's CPU kernels."""
    path = folder() / "model"
    small_model("qwen3", seed=8).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@functools.cache
def shared_vllm() -> str:
    """The address of one real vLLM for all tests of a session, because it takes most of a minute to start.

    The main thread starts it, because it ends with the thread that started it.
    """
    port = free_port()
    own = ["--model", str(contract_model()), "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    size = ["--max-model-len", str(SERVER_TOKENS), "--max-num-seqs", "32"]
    adapters = ["--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", "2"]
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *FLAGS, *own, *size, *adapters]
    log = folder() / "vllm.log"
    process = ServerProcess(Launch("vLLM", command, "127.0.0.1", port, log, {**ENVIRONMENT, **CPU}))
    process.start()
    atexit.register(lambda: asyncio.run(process.close()))
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while process.ended() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return url
        time.sleep(0.5)
    raise AssertionError(process.why("did not come up"))


def settings(url: str, **changes: Any) -> RemoteSettings:
    own = {"url": url, "model": str(contract_model()), "context_tokens": CONTEXT_TOKENS, "vocab_size": VOCABULARY}
    fixed = {"eos_token_ids": (EOS,), "detokenize": detokenize, "scratch": folder() / "scratch"}
    return RemoteSettings(**{**own, **fixed, "timeout_s": 120.0, "start_s": START_S, **changes})


def publish(version: int, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A folder with these weights, as the trainer writes it, and its manifest."""
    path = folder() / f"v{version:06d}"
    path.mkdir(exist_ok=True)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_bytes((contract_model() / "config.json").read_bytes())
    return describe(path, version, "full")


def adapter(folder: Path, seed: int, rank: int) -> tuple[dict[str, Any], Any]:
    """The manifest of an adapter, as the trainer publishes it, and the model with the merged adapter."""
    decoder: Any = lora_decoder("qwen3", seed=8, rank=rank, alpha=2 * rank)
    with torch.no_grad():
        for i, parameter in enumerate(p for p in decoder.model.parameters() if p.requires_grad):
            parameter.copy_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + i))
            )
    decoder.model.save_pretrained(str(folder), selected_adapters=["default"])
    merged = PeftModel.from_pretrained(small_model("qwen3", seed=8), str(folder)).merge_and_unload()  # type: ignore[operator]
    return describe(folder, seed, "lora"), merged


@asynccontextmanager
async def attached_vllm(**changes: Any) -> AsyncIterator[VllmRolloutEngine]:
    """An engine on the shared server. Version 0 is loaded first, because a test may have left other weights."""
    engine = VllmRolloutEngine(settings(shared_vllm(), **changes))
    try:
        await engine.load(0, describe(contract_model(), 0, "full"))
        yield engine
    finally:
        with contextlib.suppress(EngineError):  # an engine that the test closed reports nothing
            await engine.resume()  # a test may have left it paused
        await engine.close()


@asynccontextmanager
async def attached_double(model: Any, **server: Any) -> AsyncIterator[tuple[SglangRolloutEngine, SglangDouble]]:
    double = SglangDouble(model, TOKENIZER, str(contract_model()), CONTEXT_TOKENS, **server)
    runner = web.AppRunner(double.app())
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = SglangRolloutEngine(settings(f"http://127.0.0.1:{port}"))
    try:
        yield engine, double
    finally:
        await engine.close()
        await runner.cleanup()
