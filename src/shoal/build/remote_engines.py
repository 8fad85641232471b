"""Engines with their own weights: a vLLM or SGLang server, started here or attached to, or vLLM in this process
(`infer.in_process`, which `GRPOTrainer(use_vllm=True)` sets)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shoal.build.model import LoadedModel
from shoal.config.infer import InferConfig
from shoal.config.schema import RunConfig
from shoal.config.section_rules import port_of
from shoal.core.errors import ConfigError
from shoal.core.section import IN_MEMORY
from shoal.rollout.remote.client import Waiting
from shoal.rollout.remote.engine import RemoteEngine
from shoal.rollout.remote.process import Launch, ServerProcess, check_interpreter
from shoal.rollout.remote.server_info import TIED_ON_CPU, RemoteSettings, model_folder, tied
from shoal.rollout.remote.sglang import FLAGS as SGLANG_FLAGS
from shoal.rollout.remote.sglang import SglangRolloutEngine
from shoal.rollout.remote.vllm import ENVIRONMENT as VLLM_ENVIRONMENT
from shoal.rollout.remote.vllm import FLAGS as VLLM_FLAGS
from shoal.rollout.remote.vllm import LORA_RANKS, VllmRolloutEngine
from shoal.watch.machine import has_gpu

if TYPE_CHECKING:
    from shoal.models.chat import Chat


# Training needs the log-probs of the distribution that was sampled from, and no sampling defaults of the model.
FIXED = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
INITIAL = "initial-model"


def make_in_process(config: RunConfig, model: LoadedModel, device: ThreadPoolExecutor) -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "infer.in_process: the package vllm is not installed here; `pip install vllm`, or use infer.engine embedded"
        )
    # Before the first import of vLLM: one process, so that the trainer's tensors can be read.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if model.decoder.device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's too
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
        if not config.train.lora and getattr(model.decoder.model.config, "tie_word_embeddings", False):
            raise ConfigError(TIED_ON_CPU)
    if config.infer.tp > 1 and config.train.noise_scheduler.enabled:
        raise ConfigError(
            "train.noise_scheduler: vLLM in the training process supports noise only with tensor_parallel_size 1"
        )
    arguments = llm_arguments(config, model)
    from shoal.rollout.remote.server_info import CompletionReader
    from shoal.rollout.vllm_inprocess import InProcessSettings, InProcessVllm

    assert config.infer.max_model_len is not None
    settings = InProcessSettings(
        CompletionReader(model.decoder.vocab_size, model.eos_token_ids, model.chat.text),
        config.infer.max_model_len,
        config.train.seed,
        sleeps=bool(config.infer.engine_args.get("enable_sleep_mode")),
        adapter_name=config.orch.model.lora_adapter or "",
    )
    return InProcessVllm(arguments, device, lambda: file_tensors(model), settings)


def llm_arguments(config: RunConfig, model: LoadedModel) -> dict[str, Any]:
    """The arguments of `vllm.LLM`. engine_args (`vllm_args`) override the others."""
    infer, train = config.infer, config.train
    for name, value in FIXED.items():
        if infer.engine_args.get(name, value) != value:
            raise ConfigError(f"infer.engine_args.{name}: must be {value!r} for training; leave it out of vllm_args")
    dtype = infer.dtype if infer.dtype != "auto" else str(model.decoder.dtype).removeprefix("torch.")
    arguments: dict[str, Any] = {
        "model": str(train.model) if train.model != IN_MEMORY else _written(config, model),
        "dtype": dtype,
        "max_model_len": infer.max_model_len,
        "max_num_seqs": infer.max_num_seqs,
        "tensor_parallel_size": infer.tp,
        "enable_prefix_caching": infer.enable_prefix_caching,
        "kv_cache_dtype": infer.kv_cache_dtype,
        "seed": train.seed,
        **FIXED,
    }
    if infer.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = infer.gpu_memory_utilization
    if train.lora:
        arguments |= {"enable_lora": True, "max_lora_rank": lora_rank(infer), "max_loras": 2}
    on_cpu = model.decoder.device.type == "cpu"
    if on_cpu:
        arguments |= whole_prompts(infer.max_model_len)
    arguments |= infer.engine_args
    if on_cpu:
        # vLLM has no sleep mode on a CPU: sleep and wake_up do nothing there.
        arguments.pop("enable_sleep_mode", None)
    return arguments


def file_tensors(model: LoadedModel) -> Iterator[tuple[str, Any]]:
    """The tensors of the base model, without adapters, under the names in its files."""
    for name, tensor in model.decoder.model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor.detach()


def _written(config: RunConfig, model: LoadedModel) -> str:
    """Write a model object into a folder that vLLM can load."""
    from safetensors.torch import save_file

    folder = Path(config.train.output_dir) / INITIAL
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in file_tensors(model)}, folder / "model.safetensors")
    decoder: Any = model.decoder.model
    decoder.config.save_pretrained(folder)
    model.chat.tokenizer.save_pretrained(folder)
    return str(folder.resolve())


ENGINES: dict[str, type[RemoteEngine]] = {"vllm": VllmRolloutEngine, "sglang": SglangRolloutEngine}
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
CPU_CACHE_GIB = "1"  # KV cache of vLLM on a CPU, unless VLLM_CPU_KVCACHE_SPACE is set
WEIGHTS = "weights"


@dataclass(frozen=True)
class ModelFacts:
    """Facts that come from the trainer's model, not from the server."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]
    dtype: str = "auto"  # as torch names it
    on_cpu: bool = False


@dataclass(frozen=True)
class ExternalServer:
    """A server that another process of the run starts, with functions that report its state."""

    whereabouts: Callable[[], tuple[str, str] | None]  # why nothing answers, and what to do about it
    trouble: Callable[[], str | None]  # a problem that the server cannot report itself


def check_engine(config: RunConfig, processes: int, *, starts: bool = True) -> None:
    """Check before anything loads what a remote engine needs here. `starts`: it is started on this machine."""
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
    """Raise now what would stop vLLM after its start (rollout/remote/server_info.py)."""
    if config.infer.engine != "vllm" or config.train.lora or has_gpu():
        return
    try:
        folder = model_folder(str(config.train.model))
    except (OSError, ValueError):  # not on this machine: the server checks it
        return
    if tied(folder):
        raise ConfigError(TIED_ON_CPU)


def absent_server(config: RunConfig) -> str | None:
    """A notice before anything loads if the server does not answer yet. It may still start."""
    infer, url = config.infer, urlsplit(config.orch.client.base_url)
    port = port_of(config.orch.client.base_url)
    if infer.engine == "embedded" or infer.in_process or infer.engine_python is not None or port is None:
        return None
    with contextlib.suppress(OSError), socket.create_connection((url.hostname, port), timeout=2.0):
        return None
    name = ENGINES[infer.engine].name
    return (
        f"infer.engine_python: is not given and nothing answers at {url.scheme}://{url.netloc} yet; start {name} "
        f"there (the run waits for it), or set infer.engine_python to the Python that has {name}, and Shoal starts it"
    )


def check_key(section: str, name: str | None) -> None:
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"{section}.api_key_var: the environment variable {name} is not set")


def facts_of_files(name: str, chat: Chat) -> ModelFacts:
    """The facts from the files of a model that is not loaded."""
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
    attach: ExternalServer | None = None,
) -> RemoteEngine:
    """`folder` is the run directory, for the log of the server and the weights that it reads. `connect` starts a server
    of this process. `attach`: another process starts it.
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
        return_s=min(client.timeout, shorten_deadline(min(config.orch.deadline_s, config.orch.sync_deadline_s))),
        start_s=infer.start_deadline_s if attach is None else config.orch.deadline_s,
        lora_rank=config.train.lora_rank if config.train.lora else None,
        adapter_name=config.orch.model.lora_adapter or "",
        noise_seed=config.train.seed,
        log=log_of(infer, folder) if process is not None or attach is not None else None,
        **({} if attach is None else {"whereabouts": attach.whereabouts, "trouble": attach.trouble}),
    )
    return ENGINES[infer.engine](settings, process, waiting)


def shorten_deadline(deadline_s: float) -> float:
    """Waiting for the server ends before waiting for its result, so that the error names the cause."""
    return max(deadline_s / 2, deadline_s - 30)


def launch_of(infer: InferConfig, folder: Path, dtype: str = "auto", *, on_cpu: bool = False) -> Launch:
    """The command that starts the server. `dtype` replaces infer.dtype=auto."""
    name = infer.engine
    dtype = infer.dtype if infer.dtype != "auto" else dtype
    flags = _vllm_flags(infer, dtype, on_cpu) if name == "vllm" else _sglang_flags(infer, dtype)
    environment = dict(VLLM_ENVIRONMENT) if name == "vllm" else {}
    if name == "vllm" and on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    if name == "vllm" and infer.api_key_var is not None:
        environment["VLLM_API_KEY"] = os.environ[infer.api_key_var]  # not on the command line, which all users can read
    command = [str(Path(str(infer.engine_python)).expanduser()), "-m", MODULES[name], *flags]
    return Launch(ENGINES[name].name, command, infer.host, infer.port, log_of(infer, folder), environment)


def log_of(infer: InferConfig, folder: Path) -> Path:
    """The log of a server that Shoal starts, from any process of the run."""
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
        # One more adapter than is served, because the previous one still finishes its requests.
        values |= {"enable-lora": True, "max-loras": infer.max_loras + 1, "max-lora-rank": lora_rank(infer)}
    return [*VLLM_FLAGS, *as_flags({**values, **infer.engine_args})]


def whole_prompts(longest: int | None) -> dict[str, Any]:
    """Disable chunked prefill: after a chunk vLLM resets the generator of a request, which fails on a CPU (0.32)."""
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
    """The next rank for which vLLM has kernels."""
    wanted = infer.max_lora_rank or LORA_RANKS[1]
    return next((known for known in LORA_RANKS if known >= wanted), wanted)


def as_flags(values: dict[str, Any]) -> Iterator[str]:
    """Command-line flags. If a key occurs in two spellings, the later one wins."""
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
