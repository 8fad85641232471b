"""vLLM in the training process, from a configuration: `infer.in_process`, which `GRPOTrainer(use_vllm=True)` sets."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.build.model import Model
from shoal.build.remote import CPU_CACHE_GIB, WHOLE_PROMPTS, lora_rank
from shoal.config.base import IN_MEMORY
from shoal.config.schema import RunConfig
from shoal.errors import ConfigError
from shoal.rollout.facts import TIED_ON_CPU

# Not to be had otherwise: training needs the log-probs of the distribution that was drawn from, and explicit sampling.
FIXED = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
INITIAL = "initial-model"


def make_in_process(config: RunConfig, model: Model, device: ThreadPoolExecutor) -> Any:
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
            "train.noise_scheduler: vLLM in the training process takes noise with tensor_parallel_size 1 alone"
        )
    arguments = llm_arguments(config, model)
    from shoal.rollout.answers import Reading
    from shoal.rollout.vllm_inprocess import InProcessSettings, InProcessVllm

    assert config.infer.max_model_len is not None
    settings = InProcessSettings(
        Reading(model.decoder.vocab_size, model.eos_token_ids, model.chat.text),
        config.infer.max_model_len,
        config.train.seed,
        sleeps=bool(config.infer.engine_args.get("enable_sleep_mode")),
    )
    return InProcessVllm(arguments, device, lambda: file_tensors(model), settings)


def llm_arguments(config: RunConfig, model: Model) -> dict[str, Any]:
    """What `vllm.LLM` is called with; engine_args (`vllm_args`) come last and so win."""
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
    if model.decoder.device.type == "cpu":
        arguments |= WHOLE_PROMPTS
    if infer.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = infer.gpu_memory_utilization
    if train.lora:
        arguments |= {"enable_lora": True, "max_lora_rank": lora_rank(infer), "max_loras": 2}
    arguments |= infer.engine_args
    if model.decoder.device.type == "cpu":
        # vLLM has no such mode on a CPU, where sleep and wake_up are calls without effect.
        arguments.pop("enable_sleep_mode", None)
    return arguments


def file_tensors(model: Model) -> Iterator[tuple[str, Any]]:
    """The base model's tensors under the names they have in its files, adapters left out."""
    for name, tensor in model.decoder.model.named_parameters():
        if "lora_" not in name:
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), tensor.detach()


def _written(config: RunConfig, model: Model) -> str:
    """A model object as a folder, for vLLM to start from."""
    from safetensors.torch import save_file

    folder = Path(config.train.output_dir) / INITIAL
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in file_tensors(model)}, folder / "model.safetensors")
    decoder: Any = model.decoder.model
    decoder.config.save_pretrained(folder)
    model.chat.tokenizer.save_pretrained(folder)
    return str(folder.resolve())
