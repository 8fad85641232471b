"""An engine outside the trainer's tensors: a vLLM or SGLang server, started or attached to, or vLLM in this process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.config.check_orch import port_of
from shoal.config.infer import InferConfig
from shoal.config.schema import RunConfig
from shoal.errors import ConfigError
from shoal.observability.machine import has_gpu
from shoal.rollout.facts import TIED_ON_CPU, RemoteSettings, model_folder, tied
from shoal.rollout.launch import Launch, ServerProcess, check_interpreter
from shoal.rollout.link import Waiting
from shoal.rollout.remote import RemoteEngine
from shoal.rollout.sglang import FLAGS as SGLANG_FLAGS
from shoal.rollout.sglang import SglangRolloutEngine
from shoal.rollout.vllm import ENVIRONMENT as VLLM_ENVIRONMENT
from shoal.rollout.vllm import FLAGS as VLLM_FLAGS
from shoal.rollout.vllm import LORA_RANKS, VllmRolloutEngine

if TYPE_CHECKING:
    from shoal.models.chat import Chat

ENGINES: dict[str, type[RemoteEngine]] = {"vllm": VllmRolloutEngine, "sglang": SglangRolloutEngine}
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
CPU_CACHE_GIB = "1"  # of a vLLM without a GPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise
WEIGHTS = "weights"


@dataclass(frozen=True)
class ModelFacts:
    """What a server is not asked for: ids, ends, text and precision are the trainer's."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]
    dtype: str = "auto"  # as torch names it
    on_cpu: bool = False


@dataclass(frozen=True)
class Attached:
    """Another process of the run starts the server, and this is how it is known how that is."""

    whereabouts: Callable[[], tuple[str, str] | None]  # while nothing answers, and what to do about it
    trouble: Callable[[], str | None]  # what it cannot say itself


def check_engine(config: RunConfig, processes: int, *, starts: bool = True) -> None:
    """Before anything loads: what a remote engine needs on this machine, which may be another than it `starts` on."""
    infer = config.infer
    if infer.engine == "embedded":
        return
    if processes > 1:
        raise ConfigError(
            f"infer.engine: {infer.engine} beside several training processes needs the split layout; use infer.engine "
            "embedded, or one process"
        )
    keys = {"orch.client": config.orch.client.api_key_var}
    if starts and infer.engine_python is not None:
        check_interpreter(infer.engine_python, infer.engine, ENGINES[infer.engine].name)
        keys["infer"] = infer.api_key_var
        check_tied(config)
    for section, name in keys.items():
        check_key(section, name)


def check_tied(config: RunConfig) -> None:
    """What a vLLM that is still to be started would be refused for once it runs (facts.py)."""
    if config.infer.engine != "vllm" or config.train.lora or has_gpu():
        return
    try:
        folder = model_folder(str(config.train.model))
    except (OSError, ValueError):  # not on this machine; the server says what it is
        return
    if tied(folder):
        raise ConfigError(TIED_ON_CPU)


def absent_server(config: RunConfig) -> str | None:
    """Said before anything loads, of a server that is to be there and is not. It may still come."""
    infer, url = config.infer, urlsplit(config.orch.client.base_url)
    port = port_of(config.orch.client.base_url)
    if infer.engine == "embedded" or infer.in_process or infer.engine_python is not None or port is None:
        return None
    with contextlib.suppress(OSError), socket.create_connection((url.hostname, port), timeout=2.0):
        return None
    name = ENGINES[infer.engine].name
    return (
        f"infer.engine_python: is not given and nothing answers at {url.scheme}://{url.netloc} yet; start {name} "
        f"there, where it is waited for, or set infer.engine_python to the Python that has {name} and Shoal starts it"
    )


def check_key(section: str, name: str | None) -> None:
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"{section}.api_key_var: the environment variable {name} is not set")


def facts_of_files(name: str, chat: Chat) -> ModelFacts:
    """The same from the model's files, where no model is loaded."""
    from shoal.models.tokenizer import eos_token_ids

    folder, read = model_folder(name), {}
    for file in ("config.json", "generation_config.json"):
        path = folder / file
        read[file] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    config = read["config.json"].get("text_config") or read["config.json"]
    ends = [SimpleNamespace(eos_token_id=read[file].get("eos_token_id")) for file in read]
    model = SimpleNamespace(config=ends[0], generation_config=ends[1])
    return ModelFacts(int(config["vocab_size"]), eos_token_ids(model, chat.tokenizer), chat.text)


def make_remote(
    config: RunConfig,
    model: ModelFacts,
    folder: Path,
    waiting: Waiting = lambda _: None,
    attach: Attached | None = None,
) -> RemoteEngine:
    """`folder` is the run's: the server's log goes there, and what it reads. A server of ours starts when it is
    connected to.

    `attach`: whoever starts it, it is not this process.
    """
    infer, client = config.infer, config.orch.client
    assert infer.max_model_len is not None
    process = None
    url, key = client.base_url, client.api_key_var
    if infer.engine_python is not None and attach is None:
        process = ServerProcess(launch_of(infer, folder, model.dtype, on_cpu=model.on_cpu))
        host = f"[{infer.host}]" if ":" in infer.host else infer.host
        url, key = f"http://{host}:{infer.port}", infer.api_key_var
    settings = RemoteSettings(
        url=url,
        model=str(config.train.model),
        context_tokens=config.orch.seq_len or infer.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        detokenize=model.detokenize,
        scratch=folder / WEIGHTS,
        api_key=os.environ.get(key) if key is not None else None,
        timeout_s=client.timeout,
        return_s=min(client.timeout, before(min(config.orch.deadline_s, config.orch.sync_deadline_s))),
        start_s=infer.start_deadline_s if attach is None else config.orch.deadline_s,
        lora_rank=config.train.lora_rank if config.train.lora else None,
        noise_seed=config.train.seed,
        log=log_of(infer, folder) if process is not None or attach is not None else None,
        **({} if attach is None else {"whereabouts": attach.whereabouts, "trouble": attach.trouble}),
    )
    return ENGINES[infer.engine](settings, process, waiting)


def before(deadline_s: float) -> float:
    """A wait for the server ends before the wait for what it should have done: the reason names the cause."""
    return max(deadline_s / 2, deadline_s - 30)


def launch_of(infer: InferConfig, folder: Path, dtype: str = "auto", *, on_cpu: bool = False) -> Launch:
    """The command that serves what `infer` says; `dtype` is what its auto stands for."""
    name = infer.engine
    dtype = infer.dtype if infer.dtype != "auto" else dtype
    flags = _vllm_flags(infer, dtype, on_cpu) if name == "vllm" else _sglang_flags(infer, dtype)
    environment = dict(VLLM_ENVIRONMENT) if name == "vllm" else {}
    if name == "vllm" and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    if name == "vllm" and infer.api_key_var is not None:
        environment["VLLM_API_KEY"] = os.environ[infer.api_key_var]  # not on the command line, which anyone can read
    command = [str(Path(str(infer.engine_python)).expanduser()), "-m", MODULES[name], *flags]
    return Launch(ENGINES[name].name, command, infer.host, infer.port, log_of(infer, folder), environment)


def log_of(infer: InferConfig, folder: Path) -> Path:
    """Of a server that Shoal starts, whichever process of the run does."""
    return folder / "logs" / f"{infer.engine}.log"


def _vllm_flags(infer: InferConfig, dtype: str, on_cpu: bool) -> list[str]:
    values: dict[str, Any] = {
        "model": infer.model,
        "host": infer.host,
        "port": infer.port,
        "dtype": dtype,
        "max-model-len": infer.max_model_len,
        "max-num-seqs": infer.max_num_seqs,
        "tensor-parallel-size": infer.tp,
        "data-parallel-size": infer.dp,
        "enable-prefix-caching": infer.enable_prefix_caching,
        "kv-cache-dtype": infer.kv_cache_dtype,
        "gpu-memory-utilization": infer.gpu_memory_utilization,
    }
    if on_cpu:
        values |= whole_prompts(infer.max_model_len)
    if infer.enable_lora:
        # One more adapter than is served: the one before finishes its requests.
        values |= {"enable-lora": True, "max-loras": infer.max_loras + 1, "max-lora-rank": lora_rank(infer)}
    return [*VLLM_FLAGS, *as_flags({**values, **infer.engine_args})]


def whole_prompts(longest: int | None) -> dict[str, Any]:
    """vLLM sets a request's generator back after a part of its prompt, and a CPU's has no offset to set (0.32)."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest or 0)}


def _sglang_flags(infer: InferConfig, dtype: str) -> list[str]:
    values: dict[str, Any] = {
        "model-path": infer.model,
        "host": infer.host,
        "port": infer.port,
        "dtype": dtype,
        "context-length": infer.max_model_len,
        "max-running-requests": infer.max_num_seqs,
        "tp-size": infer.tp,
        "dp-size": infer.dp,
        "kv-cache-dtype": infer.kv_cache_dtype,
        "mem-fraction-static": infer.gpu_memory_utilization,
    }
    if not infer.enable_prefix_caching:
        values["disable-radix-cache"] = True
    if infer.enable_lora:
        values |= {
            "enable-lora": True,
            "max-lora-rank": infer.max_lora_rank,
            "max-loras-per-batch": infer.max_loras + 1,
        }
        values["lora-target-modules"] = "all"
    flags = list(as_flags({**values, **infer.engine_args}))
    return flags if "enable_deterministic_inference" in infer.engine_args else [*SGLANG_FLAGS, *flags]


def lora_rank(infer: InferConfig) -> int:
    """The next rank vLLM has kernels for."""
    wanted = infer.max_lora_rank or LORA_RANKS[1]
    return next((known for known in LORA_RANKS if known >= wanted), wanted)


def as_flags(values: dict[str, Any]) -> Iterator[str]:
    """Keys as a command line writes them; a later spelling of the same key replaces the earlier."""
    named = {name.replace("_", "-"): value for name, value in values.items()}
    for name, value in named.items():
        if value is True or value is False:
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            yield f"--{name}"
            yield from (str(item) for item in value)
        elif value is not None:
            yield f"--{name}"
            yield json.dumps(value) if isinstance(value, dict | list) else str(value)
