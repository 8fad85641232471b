"""The `infer` section: the engine that samples. Read by build.py; it never mentions training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from shoal.config.base import Name, NonEmpty, PositiveFloat, PositiveInt, Section


class InferConfig(Section):
    model: NonEmpty | None = Field(default=None, description="The model that samples; equal to train.model.")
    output_dir: NonEmpty = Field(default="./outputs", description="Where the engine finds weights and writes its log.")
    engine: Literal["embedded", "vllm", "sglang"] = Field(
        default="embedded", description="What samples: the trainer's own model, or a server."
    )
    engine_python: NonEmpty | None = Field(
        default=None,
        description="Python that has vLLM or SGLang, to start a server with; without it orch.client.base_url is asked.",
    )
    in_process: bool = Field(default=False, description="vLLM inside the training process (vllm.LLM), not a server.")
    start_deadline_s: PositiveFloat = Field(
        default=300.0, description="A vLLM or SGLang server answers within this, or the run ends."
    )
    weights: Literal["auto", "own"] = Field(
        default="auto",
        description="What the embedded engine reads: the trainer's tensors if in step, or its own copy.",
    )
    host: NonEmpty = Field(
        default="127.0.0.1", description="Address the server listens on; other than loopback needs a key."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port the server listens on.")
    api_key_var: Name | None = Field(default=None, description="Environment variable that holds the server's key.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Precision of the engine's weights; auto follows train.recipe."
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Longest prompt plus completion (seq_len unless given; with grpo-infer 2048)."
    )
    max_num_seqs: PositiveInt | None = Field(
        default=None,
        description="Sequences decoded at once (a step's rollouts, at most 256, unless given; with grpo-infer 256).",
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the device's memory for sampling, weights aside (vLLM: all it uses), on a CPU of what is "
        "free; measured unless given.",
    )
    enable_lora: bool | None = Field(
        default=None, description="Whether adapters are served (as train.lora unless given)."
    )
    max_lora_rank: PositiveInt | None = Field(
        default=None, description="Largest adapter rank served (train.lora_rank unless given)."
    )
    max_loras: PositiveInt = Field(default=1, description="Adapters served at once.")
    tp: PositiveInt = Field(
        default=1,
        validation_alias=AliasChoices("tp", "tensor_parallel_size"),
        description="Tensor-parallel ranks of a server (also tensor_parallel_size).",
    )
    dp: PositiveInt = Field(default=1, description="Replicas of the engine.")
    enable_prefix_caching: bool = Field(default=True, description="Compute the prompt of a group once.")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = Field(
        default="auto", description="Precision of the key-value cache."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments for a vLLM or SGLang server."
    )
    deadline_s: PositiveFloat = Field(
        default=600.0, description="The server waits no longer than this for an orchestrator that left (split layout)."
    )
