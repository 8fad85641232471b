"""The `infer` section: the sampling engine. Used by build/."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from shoal.core.section import Name, NonEmpty, PositiveFloat, PositiveInt, Section


class InferConfig(Section):
    model: NonEmpty | None = Field(default=None, description="Model used for sampling; must equal train.model.")
    output_dir: NonEmpty = Field(
        default="./outputs", description="Directory where the engine reads weights and writes its log."
    )
    engine: Literal["embedded", "vllm", "sglang"] = Field(
        default="embedded",
        description="Sampling engine: embedded uses the trainer's own model; vllm and sglang are servers.",
    )
    engine_python: NonEmpty | None = Field(
        default=None,
        description="Python with vLLM or SGLang, used to start a server. Unset: connect to orch.client.base_url.",
        json_schema_extra={"server_only": "it runs inside the training process"},
    )
    in_process: bool = Field(
        default=False,
        description="Run vLLM inside the training process (vllm.LLM) instead of as a server.",
        json_schema_extra={"server_only": "it always runs in the training process"},
    )
    start_deadline_s: PositiveFloat = Field(
        default=300.0,
        description="Time limit for a vLLM or SGLang server to start.",
        json_schema_extra={"server_only": "no server is started"},
    )
    weights: Literal["auto", "own"] = Field(
        default="auto",
        description="Weights of the embedded engine: auto = the trainer's tensors where possible; own = a copy.",
    )
    host: NonEmpty = Field(
        default="127.0.0.1",
        description="Address the server listens on; any address but loopback requires api_key_var.",
        json_schema_extra={"started_only": True, "remote_only": True},
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65535,
        description="Port the server listens on.",
        json_schema_extra={"started_only": True, "remote_only": True},
    )
    api_key_var: Name | None = Field(
        default=None,
        description="Environment variable that holds the API key of the server.",
        json_schema_extra={"remote_only": True},
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Precision of the engine's weights; auto follows train.recipe.",
        json_schema_extra={"started_only": True},
    )
    chat_template: NonEmpty | None = Field(
        default=None,
        description="Chat template of a server instead of the tokenizer's: chatml, plain or a file, as in orch.",
        json_schema_extra={"split_only": True},
    )
    max_model_len: PositiveInt | None = Field(
        default=None, description="Maximum prompt plus completion tokens. Default: seq_len; with grpo-infer 2048."
    )
    max_num_seqs: PositiveInt | None = Field(
        default=None,
        description="Sequences decoded at once. Default: orch.batch_size as far as memory allows (other engines: at "
        "most 256); with grpo-infer 256.",
        json_schema_extra={"started_only": True},
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of device memory for sampling, excluding weights (vLLM: in total; CPU: of free memory). "
        "Default: measured.",
        json_schema_extra={"started_only": True},
    )
    enable_lora: bool | None = Field(default=None, description="Serve adapters. Default: train.lora.")
    max_lora_rank: PositiveInt | None = Field(
        default=None,
        description="Largest adapter rank served. Default: train.lora_rank.",
        json_schema_extra={"started_only": True},
    )
    max_loras: PositiveInt = Field(
        default=1,
        description="Adapters served at once.",
        json_schema_extra={"server_only": "it serves only the trained adapter", "started_only": True},
    )
    tp: PositiveInt = Field(
        default=1,
        validation_alias=AliasChoices("tp", "tensor_parallel_size"),
        description="Tensor-parallel ranks of a server (also tensor_parallel_size).",
        json_schema_extra={"server_only": "it does not split a model", "started_only": True},
    )
    dp: PositiveInt = Field(
        default=1,
        description="Replicas of the engine.",
        json_schema_extra={
            "server_only": "there is one engine per training process, see train.gpus",
            "started_only": True,
        },
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Compute the prompt of each group once.",
        json_schema_extra={"server_only": "it always computes the prompt of a group once", "started_only": True},
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = Field(
        default="auto",
        description="Precision of the KV cache.",
        json_schema_extra={"server_only": "the KV cache has the precision of train.recipe", "started_only": True},
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments for a vLLM or SGLang server.",
        json_schema_extra={"started_only": True},
    )
    deadline_s: PositiveFloat = Field(
        default=600.0,
        description="Time limit when the server waits for a disconnected orchestrator.",
        json_schema_extra={"split_only": True},
    )
