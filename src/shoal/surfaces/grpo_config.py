"""`GRPOConfig`: TRL's configuration of GRPO, with TRL's names and defaults (TRL 1.16 on transformers 5).

The annotation of a field is its documentation: the schema keys that it sets, `refused` where Shoal does not support it,
or only a note where it has no effect. trl.py translates them. The tests compare the defaults with a table.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from shoal.surfaces.names import Key, keys_of, named_arguments, names_by_key
from shoal.surfaces.trainer import OPTIMIZER_KEYS


@dataclass
class GRPOConfig:
    """The `args` of `GRPOTrainer(model, args=GRPOConfig(…), …)`: TRL's names and defaults."""

    output_dir: Annotated[Any, Key("train.output_dir", "the default is trainer_output", composed=True)] = None
    learning_rate: Annotated[float, Key("train.learning_rate")] = 1e-06
    model_init_kwargs: Annotated[
        dict[str, Any] | None,
        Key("train.recipe", "dtype may be float32 or bfloat16; for other options pass a model object", composed=True),
    ] = None
    trust_remote_code: Annotated[bool, Key(note="Shoal does not run code from model repositories", refused=True)] = (
        False
    )
    router_aux_loss_coef: Annotated[float | None, Key(note="there is no router auxiliary loss", refused=True)] = None
    disable_dropout: Annotated[bool, Key(note="dropout of adapters is set by peft_config")] = False
    cast_lm_head_to_fp32: Annotated[bool, Key(note="log-probs are always computed in fp32")] = False
    remove_unused_columns: Annotated[bool | None, Key(note="reward functions always get all columns")] = False
    num_generations: Annotated[int | None, Key("orch.rollouts_per_example")] = 8
    num_generations_eval: Annotated[
        int | None, Key("orch.eval.rollouts_per_example", "the default is num_generations", composed=True)
    ] = None
    max_completion_length: Annotated[int | None, Key("orch.sampling.max_tokens")] = 512
    ds3_gather_for_generation: Annotated[bool, Key(note="the trained weights are used for sampling")] = True
    shuffle_dataset: Annotated[bool | None, Key(note="prompts are always shuffled with the seed", refused=True)] = True
    pad_to_multiple_of: Annotated[Any, Key(note="sequences are packed, not padded")] = "auto"
    generation_batch_size: Annotated[
        int | None, Key("orch.batch_size", "counts the rollouts of a step", composed=True)
    ] = None
    steps_per_generation: Annotated[
        int | None, Key("train.minibatches", "the value is divided by gradient_accumulation_steps", composed=True)
    ] = None
    temperature: Annotated[float, Key("orch.sampling.temperature")] = 1.0
    top_p: Annotated[float, Key("orch.sampling.top_p")] = 1.0
    top_k: Annotated[int, Key("orch.sampling.top_k", "0 in TRL is -1 in Shoal", composed=True)] = 0
    min_p: Annotated[float | None, Key("orch.sampling.min_p")] = None
    generation_kwargs: Annotated[
        dict[str, Any] | None,
        Key(
            ("orch.sampling.min_tokens", "orch.sampling.stop"),
            "the other keys of `orch.sampling` are allowed too",
            composed=True,
        ),
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Key("orch.sampling.chat_template_kwargs")] = None
    repetition_penalty: Annotated[float, Key(note="it would bias the ratios", refused=True)] = 1.0
    cache_implementation: Annotated[str | None, Key(note="the engine has one cache")] = None
    use_vllm: Annotated[bool, Key(("infer.engine", "infer.in_process"), composed=True)] = False
    vllm_mode: Annotated[
        str,
        Key(
            "infer.in_process",
            "use colocate; for a server, start the run with `shoal grpo --layout split`",
            composed=True,
        ),
    ] = "colocate"
    vllm_model_impl: Annotated[str, Key("infer.engine_args", "sets `model_impl`", composed=True)] = "vllm"
    vllm_enable_sleep_mode: Annotated[bool, Key("infer.engine_args", "sets `enable_sleep_mode`", composed=True)] = False
    vllm_structured_outputs_regex: Annotated[
        str | None, Key(note="guided decoding would bias the ratios", refused=True)
    ] = None
    vllm_server_base_url: Annotated[str | None, Key(note="only for vllm_mode server", refused=True)] = None
    vllm_server_host: Annotated[str, Key(note="only for vllm_mode server")] = "0.0.0.0"
    vllm_server_port: Annotated[int, Key(note="only for vllm_mode server")] = 8000
    vllm_server_timeout: Annotated[float, Key(note="only for vllm_mode server")] = 240.0
    vllm_group_port: Annotated[int, Key(note="only for vllm_mode server")] = 51216
    vllm_gpu_memory_utilization: Annotated[
        float, Key("infer.gpu_memory_utilization", "only with use_vllm", composed=True)
    ] = 0.3
    vllm_max_model_length: Annotated[
        int | None,
        Key("train.sequence_len", "the default is 2048, or twice max_completion_length if that is more", composed=True),
    ] = None
    vllm_tensor_parallel_size: Annotated[int, Key("infer.tp", "only with use_vllm", composed=True)] = 1
    beta: Annotated[
        float,
        Key(
            ("train.loss.kl.beta", "train.loss.kl.estimator"),
            "the estimator is k3-unbiased, or k3 with use_bias_correction_kl=False",
            composed=True,
        ),
    ] = 0.0
    num_iterations: Annotated[int, Key("train.ppo_epochs")] = 1
    epsilon: Annotated[float, Key("train.loss.clip_low", composed=True)] = 0.2
    delta: Annotated[
        float | None,
        Key(
            "train.loss.dual_clip",
            "must be at least 1 + epsilon_high; not supported with importance_sampling_level sequence",
            composed=True,
        ),
    ] = None
    epsilon_high: Annotated[
        float | None,
        Key(
            ("train.loss.clip_high", "train.loss.ratio_high"),
            "the default is epsilon. With cispo, epsilon_high is the largest ratio (`ratio_high`) and must be at least "
            "1, because TRL's default of .2 would scale every token by at most .2",
            composed=True,
        ),
    ] = None
    sapo_temperature_neg: Annotated[float, Key("train.loss.tau_neg", "only for loss_type sapo", composed=True)] = 1.05
    sapo_temperature_pos: Annotated[float, Key("train.loss.tau_pos", "only for loss_type sapo", composed=True)] = 1.0
    vespo_k_pos: Annotated[float, Key("train.loss.k_pos", "only for loss_type vespo", composed=True)] = 2.0
    vespo_lambda_pos: Annotated[float, Key("train.loss.rate_pos", "only for loss_type vespo", composed=True)] = 3.0
    vespo_k_neg: Annotated[float, Key("train.loss.k_neg", "only for loss_type vespo", composed=True)] = 3.0
    vespo_lambda_neg: Annotated[float, Key("train.loss.rate_neg", "only for loss_type vespo", composed=True)] = 2.0
    importance_sampling_level: Annotated[
        str,
        Key(
            "train.loss.type",
            "sequence selects the loss `gspo` with epsilon and the aggregation of loss_type. Value and gradient equal "
            "TRL's for grpo, bnpo, dr_grpo and dapo. It is not supported with cispo, sapo, vespo, delta, or beta with "
            "use_bias_correction_kl",
            composed=True,
        ),
    ] = "token"
    reward_weights: Annotated[list[float] | None, Key(note="the weights of reward_funcs", composed=True)] = None
    multi_objective_aggregation: Annotated[
        str,
        Key(
            ("orch.advantage.per_part", "orch.advantage.rescale"),
            "normalize_then_sum sets both. Advantages equal TRL's, also with weights and None rewards",
            composed=True,
        ),
    ] = "sum_then_normalize"
    scale_rewards: Annotated[
        Any,
        Key(
            "orch.advantage.std",
            "`group`, `batch` or `none`; True is `group`, False is `none`; eps is 1e-4 as in TRL",
            composed=True,
        ),
    ] = "group"
    loss_type: Annotated[
        str,
        Key(
            ("train.loss.type", "train.loss.aggregation"),
            "the aggregation is seq-mean-token-mean for grpo and sapo, token-mean for bnpo, dapo, cispo and vespo, and "
            "seq-mean-token-sum-norm for dr_grpo. For bnpo the mean covers the step, in TRL a micro-batch. luspo is "
            "not supported",
            composed=True,
        ),
    ] = "dapo"
    mask_truncated_completions: Annotated[bool, Key("orch.truncated.type", "sets the type `mask`", composed=True)] = (
        False
    )
    sync_ref_model: Annotated[bool, Key(note="the reference is always the initial model", refused=True)] = False
    ref_model_mixup_alpha: Annotated[float, Key(note="only for sync_ref_model, which is not supported")] = 0.6
    ref_model_sync_steps: Annotated[int, Key(note="only for sync_ref_model, which is not supported")] = 512
    top_entropy_quantile: Annotated[
        float,
        Key(
            "train.loss.entropy.top_fraction",
            "the selection covers an update, in TRL a micro-batch. It cannot be combined with an entropy bonus, which "
            "covers the selected tokens in TRL and all tokens in Shoal",
            composed=True,
        ),
    ] = 1.0
    entropy_coef: Annotated[
        float,
        Key(
            "train.loss.entropy.coef",
            "for dapo, bnpo, cispo and vespo, the bonus is a mean over the tokens of an update, in TRL of each "
            "micro-batch. For grpo and sapo, each completion has the same weight in the mean. dr_grpo is not supported",
            composed=True,
        ),
    ] = 0.0
    use_adaptive_entropy: Annotated[
        bool,
        Key(
            "train.loss.entropy.target",
            "sets the target to entropy_target; the coefficient changes after each step, in TRL after each update",
            composed=True,
        ),
    ] = False
    entropy_coef_min: Annotated[
        float, Key("train.loss.entropy.coef_min", "only with use_adaptive_entropy", composed=True)
    ] = 0.0
    entropy_coef_max: Annotated[
        float, Key("train.loss.entropy.coef_max", "only with use_adaptive_entropy", composed=True)
    ] = 1.0
    entropy_coef_delta: Annotated[
        float, Key("train.loss.entropy.delta", "only with use_adaptive_entropy", composed=True)
    ] = 0.005
    entropy_target: Annotated[
        float, Key("train.loss.entropy.target", "only with use_adaptive_entropy", composed=True)
    ] = 0.2
    max_tool_calling_iterations: Annotated[
        int | None, Key(note="only with `environment_factory`; the limit of answers is one more", composed=True)
    ] = None
    vllm_importance_sampling_correction: Annotated[
        bool, Key("train.loss.correction.type", "only with use_vllm", composed=True)
    ] = True
    vllm_importance_sampling_mode: Annotated[
        str,
        Key(
            "train.loss.correction.type",
            "token_truncate is `tis`, and token_mask is `icepop`. Shoal does not support the product of the ratios "
            "over a completion: sequence_mask is applied as `icepop` per token, and sequence_truncate as `tis`, with a "
            "notice. Both are refused with vespo, as in TRL",
            composed=True,
        ),
    ] = "sequence_mask"
    vllm_importance_sampling_clip_max: Annotated[float | None, Key("train.loss.correction.cap", composed=True)] = 3.0
    vllm_importance_sampling_clip_min: Annotated[
        float | None, Key("train.loss.correction.floor", "only for token_mask", composed=True)
    ] = None
    off_policy_mask_threshold: Annotated[
        float | None, Key(note="the loss `masked` drops off-policy tokens and rollouts by another rule", refused=True)
    ] = None
    use_bias_correction_kl: Annotated[
        bool, Key("train.loss.kl.estimator", "True is `k3-unbiased`, False is `k3`", composed=True)
    ] = True
    log_completions: Annotated[bool, Key("train.show_completions", composed=True)] = False
    log_multimodal: Annotated[bool, Key(note="Shoal supports text only")] = True
    num_completions_to_print: Annotated[int | None, Key("train.show_completions", composed=True)] = None
    log_unique_prompts: Annotated[bool, Key(note="rollouts/ contains all prompts and completions")] = False
    log_completions_hub_repo: Annotated[str | None, Key(note="nothing is uploaded", refused=True)] = None
    use_transformers_continuous_batching: Annotated[bool, Key(note="the engine always batches continuously")] = False
    transformers_continuous_batching_config: Annotated[
        dict[str, Any] | None, Key(note="`infer.max_num_seqs` limits the batch")
    ] = None
    use_transformers_paged: Annotated[bool, Key(note="the engine has one cache")] = False
    vllm_importance_sampling_cap: Annotated[
        float | None,
        Key("train.loss.correction.cap", "TRL's old name of vllm_importance_sampling_clip_max", composed=True),
    ] = None
    per_device_train_batch_size: Annotated[
        int,
        Key(
            "orch.batch_size",
            "counts the rollouts of a process and micro-batch; the memory plan sets the micro-batch in Shoal",
            composed=True,
        ),
    ] = 8
    num_train_epochs: Annotated[
        float, Key("train.epochs", "must be a whole number; not used with max_steps", composed=True)
    ] = 3.0
    max_steps: Annotated[
        int,
        Key(
            "train.max_steps",
            "counts optimizer updates in TRL; a step of Shoal has num_iterations × steps_per_generation / "
            "gradient_accumulation_steps updates",
            composed=True,
        ),
    ] = -1
    lr_scheduler_type: Annotated[
        str,
        Key(
            "train.lr_scheduler_type",
            "linear, cosine, constant, constant_with_warmup and cosine_with_min_lr are supported",
            composed=True,
        ),
    ] = "linear"
    lr_scheduler_kwargs: Annotated[
        dict[str, Any] | None, Key("train.final_lr_fraction", "min_lr and min_lr_rate are supported", composed=True)
    ] = None
    warmup_steps: Annotated[
        float,
        Key(("train.warmup_steps", "train.warmup_ratio"), "a value below 1 is a share of the steps", composed=True),
    ] = 0
    optim: Annotated[
        str,
        Key(
            "train.optimizer",
            "adamw_torch, adamw_torch_fused, adamw_8bit and adamw_bnb_8bit are supported",
            composed=True,
        ),
    ] = "adamw_torch_fused"
    optim_args: Annotated[Any, Key(note="adam_beta1, adam_beta2 and adam_epsilon are fields", refused=True)] = None
    weight_decay: Annotated[float, Key("train.weight_decay")] = 0.0
    adam_beta1: Annotated[float, Key("train.adam_beta1")] = 0.9
    adam_beta2: Annotated[float, Key("train.adam_beta2")] = 0.999
    adam_epsilon: Annotated[float, Key("train.adam_epsilon")] = 1e-08
    optim_target_modules: Annotated[Any, Key(note="GaLore is not supported", refused=True)] = None
    gradient_accumulation_steps: Annotated[
        int,
        Key(
            "orch.batch_size",
            "multiplies the rollouts of an update; the split into micro-batches does not change gradients",
            composed=True,
        ),
    ] = 1
    average_tokens_across_devices: Annotated[
        bool, Key(note="denominators always cover the whole step on all processes")
    ] = True
    max_grad_norm: Annotated[float, Key("train.max_grad_norm")] = 1.0
    label_smoothing_factor: Annotated[float, Key(note="only for supervised training", refused=True)] = 0.0
    bf16: Annotated[
        bool | None, Key("train.recipe", "the default is bf16 on a GPU and fp32 on a CPU", composed=True)
    ] = None
    fp16: Annotated[bool, Key(note="use bf16 or fp32", refused=True)] = False
    bf16_full_eval: Annotated[bool, Key(note="evaluation uses the precision of training")] = False
    fp16_full_eval: Annotated[bool, Key(note="evaluation uses the precision of training")] = False
    tf32: Annotated[Any, Key(note="`train.recipe` sets the precision")] = None
    gradient_checkpointing: Annotated[
        bool, Key("train.recompute", "with True, the memory plan chooses; the results are the same", composed=True)
    ] = True
    gradient_checkpointing_kwargs: Annotated[Any, Key(note="no counterpart")] = None
    torch_compile: Annotated[bool, Key(note="decoding uses CUDA graphs")] = False
    torch_compile_backend: Annotated[Any, Key(note="no counterpart")] = None
    torch_compile_mode: Annotated[Any, Key(note="no counterpart")] = None
    use_liger_kernel: Annotated[bool, Key(note="log-probs are always computed in tiles")] = False
    liger_kernel_config: Annotated[Any, Key(note="no counterpart")] = None
    use_cache: Annotated[bool, Key(note="sampling always uses the cache")] = False
    neftune_noise_alpha: Annotated[
        Any,
        Key(note="`train.noise_scheduler` is another method: noise on the norm weights of the sampler", refused=True),
    ] = None
    torch_empty_cache_steps: Annotated[int | None, Key(note="no counterpart")] = None
    auto_find_batch_size: Annotated[bool, Key(note="the memory plan measures the sizes", refused=True)] = False
    logging_strategy: Annotated[
        str, Key(note="`logging_steps` sets the steps between console lines; the files contain every step")
    ] = "steps"
    logging_steps: Annotated[
        float,
        Key(
            "train.logging_steps", "counts the steps between console lines; the files contain every step", composed=True
        ),
    ] = 10
    logging_first_step: Annotated[bool, Key(note="the first step is always printed")] = False
    log_on_each_node: Annotated[bool, Key(note="only the main process writes")] = True
    logging_nan_inf_filter: Annotated[bool, Key(note="non-finite steps are skipped, counted and shown")] = True
    include_num_input_tokens_seen: Annotated[str, Key(note="`tokens/prompt` and `tokens/completion` are metrics")] = (
        "no"
    )
    log_level: Annotated[str, Key(note="the log is in logs/ of the run directory")] = "passive"
    log_level_replica: Annotated[str, Key(note="the log is in logs/ of the run directory")] = "warning"
    disable_tqdm: Annotated[Any, Key(note="the output is plain lines if it is not a terminal")] = None
    report_to: Annotated[Any, Key("train.report_to")] = "none"
    run_name: Annotated[Any, Key("train.report_name")] = None
    project: Annotated[str, Key("train.report_project")] = "huggingface"
    trackio_space_id: Annotated[Any, Key(note="no counterpart")] = None
    trackio_bucket_id: Annotated[Any, Key(note="no counterpart")] = None
    trackio_static_space_id: Annotated[Any, Key(note="no counterpart")] = None
    eval_strategy: Annotated[
        str,
        Key(
            "orch.eval.interval",
            "steps, epoch or no; with steps and epoch the last step is always evaluated",
            composed=True,
        ),
    ] = "no"
    eval_steps: Annotated[Any, Key("orch.eval.interval", "the default is logging_steps", composed=True)] = None
    eval_delay: Annotated[int, Key(note="evaluations follow eval_steps", refused=True)] = 0
    per_device_eval_batch_size: Annotated[int, Key(note="the engine chooses its batches by the available memory")] = 8
    prediction_loss_only: Annotated[bool, Key(note="evaluation measures rewards")] = False
    eval_on_start: Annotated[bool, Key("orch.eval.at_start", composed=True)] = False
    eval_do_concat_batches: Annotated[bool, Key(note="no counterpart")] = True
    eval_use_gather_object: Annotated[bool, Key(note="no counterpart")] = False
    eval_accumulation_steps: Annotated[Any, Key(note="no counterpart")] = None
    include_for_metrics: Annotated[Any, Key(note="no counterpart")] = None
    batch_eval_metrics: Annotated[bool, Key(note="no counterpart")] = False
    save_only_model: Annotated[bool, Key(note="`final/` contains only the weights")] = False
    save_strategy: Annotated[
        str, Key(("train.save_steps", "train.save_epochs"), "steps, epoch and no are supported", composed=True)
    ] = "steps"
    save_steps: Annotated[float, Key("train.save_steps", composed=True)] = 500
    save_on_each_node: Annotated[bool, Key(note="only the main process writes")] = False
    save_total_limit: Annotated[Any, Key("train.save_total_limit", "None keeps all checkpoints", composed=True)] = None
    enable_jit_checkpoint: Annotated[bool, Key(note="a checkpoint is always saved on SIGTERM")] = False
    push_to_hub: Annotated[bool, Key(note="nothing is uploaded; `final/` can be pushed", refused=True)] = False
    hub_token: Annotated[Any, Key(note="nothing is uploaded")] = None
    hub_private_repo: Annotated[Any, Key(note="nothing is uploaded")] = None
    hub_model_id: Annotated[Any, Key(note="nothing is uploaded")] = None
    hub_strategy: Annotated[str, Key(note="nothing is uploaded")] = "every_save"
    hub_always_push: Annotated[bool, Key(note="nothing is uploaded")] = False
    hub_revision: Annotated[Any, Key(note="nothing is uploaded")] = None
    load_best_model_at_end: Annotated[
        bool,
        Key(note="`orch.eval.keep_best` keeps the best checkpoint; final/ contains the last weights", refused=True),
    ] = False
    metric_for_best_model: Annotated[Any, Key(note="only for load_best_model_at_end")] = None
    greater_is_better: Annotated[Any, Key(note="only for load_best_model_at_end")] = None
    ignore_data_skip: Annotated[bool, Key(note="a resumed run continues with the next prompt")] = False
    restore_callback_states_from_checkpoint: Annotated[bool, Key(note="no counterpart")] = False
    full_determinism: Annotated[bool, Key(note="synchronous training on a CPU in fp32 is bit-identical")] = False
    seed: Annotated[int, Key("train.seed")] = 42
    data_seed: Annotated[Any, Key(note="the order of prompts follows seed", refused=True)] = None
    use_cpu: Annotated[bool, Key("train.device", "True is `cpu`", composed=True)] = False
    accelerator_config: Annotated[Any, Key(note="`accelerate launch` starts the processes")] = None
    parallelism_config: Annotated[
        Any, Key(note="only data parallelism is supported; `train.sharding` sets FSDP", refused=True)
    ] = None
    dataloader_drop_last: Annotated[bool, Key(note="the last batch of an epoch is filled from the next epoch")] = False
    dataloader_num_workers: Annotated[int, Key(note="`orch.reward.workers` sets the number of reward processes")] = 0
    dataloader_pin_memory: Annotated[bool, Key(note="no counterpart")] = True
    dataloader_persistent_workers: Annotated[bool, Key(note="no counterpart")] = False
    dataloader_prefetch_factor: Annotated[Any, Key(note="`orch.max_async_level` lets sampling run ahead")] = None
    dataloader_multiprocessing_context: Annotated[Any, Key(note="no counterpart")] = None
    dataloader_in_order: Annotated[bool, Key(note="groups enter training in prompt order")] = True
    label_names: Annotated[Any, Key(note="only for supervised training")] = None
    train_sampling_strategy: Annotated[str, Key(note="rows are packed")] = "random"
    length_column_name: Annotated[str, Key(note="rows are packed")] = "length"
    ddp_find_unused_parameters: Annotated[Any, Key(note="gradients are summed once per step")] = None
    ddp_bucket_cap_mb: Annotated[Any, Key(note="gradients are summed once per step")] = None
    ddp_broadcast_buffers: Annotated[Any, Key(note="gradients are summed once per step")] = None
    ddp_static_graph: Annotated[Any, Key(note="gradients are summed once per step")] = None
    ddp_backend: Annotated[Any, Key(note="the backend is nccl on GPUs and gloo on CPUs")] = None
    ddp_timeout: Annotated[int, Key(note="`orch.deadline_s` limits waits")] = 1800
    fsdp: Annotated[
        Any,
        Key("train.sharding", "True, full_shard and full_shard auto_wrap set `fsdp`", composed=True),
    ] = None
    fsdp_config: Annotated[Any, Key(note="each decoder layer is sharded; the options do not change the results")] = None
    deepspeed: Annotated[Any, Key(note="use overrides=['train.sharding=fsdp']", refused=True)] = None
    debug: Annotated[str, Key(note="the log is in logs/ of the run directory")] = ""
    skip_memory_metrics: Annotated[bool, Key(note="no counterpart")] = True
    do_train: Annotated[bool, Key(note="call `.train()`")] = False
    do_eval: Annotated[bool, Key(note="call `.test()`")] = False
    do_predict: Annotated[bool, Key(note="call `.test()`")] = False
    resume_from_checkpoint: Annotated[Any, Key("train.resume_from_checkpoint", composed=True)] = None
    local_rank: Annotated[int, Key(note="the launcher sets it")] = -1


KEYS = keys_of(GRPOConfig)
DEFAULTS = {field.name: field.default for field in fields(GRPOConfig)}
_NAMES = names_by_key(KEYS)
# Fields of earlier versions of TRL and transformers.
REMOVED = {
    "max_prompt_length": "TRL 1.16 does not have it; prompts without room for max_completion_length tokens within "
    "vllm_max_model_length are excluded",
    "overwrite_output_dir": "an output_dir that holds a run is never overwritten; remove it",
    "logging_dir": "metrics and the report are in output_dir; remove it",
    "save_safetensors": "weights are always safetensors; remove it",
    "warmup_ratio": "warmup_steps below 1 is the share of the steps",
}
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    **{short: _NAMES[key] for short, key in OPTIMIZER_KEYS.items() if key in _NAMES},
}
named_arguments(GRPOConfig, RENAMED, REMOVED)
