"""Generates the pages for users of other systems: `python -m shoal.coming_from docs/coming-from`.

The tables here have the commands, imports and paths of other systems. The tables of arguments are derived from their
declarations. A new page goes into PAGES.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.config.fields import known_keys, sections_at, walk_keys
from shoal.config.reference import table_cell
from shoal.config.schema import DpoConfig, RunConfig
from shoal.grpo_trainer import KEYS as TRAINER_KEYS
from shoal.launcher.read import KEYS as LAUNCHER_KEYS
from shoal.recipes.config import KEYS as RECIPE_KEYS
from shoal.surfaces import trl
from shoal.surfaces.names import KeyRow, KeyTable, rows_of

QUICKSTART = KeyTable(
    "Three files, one command",
    (
        KeyRow(
            "surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`shoal grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml`",
            "the files work unchanged; `shoal init DIR` writes them",
        ),
        KeyRow(
            "uv run surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`uv run shoal grpo …`, the same arguments",
        ),
        KeyRow(
            "CUDA_VISIBLE_DEVICES=0 surogate grpo-infer infer.yaml",
            "`CUDA_VISIBLE_DEVICES=0 shoal grpo-infer infer.yaml`",
        ),
        KeyRow("surogate grpo-orch orch.yaml", "`shoal grpo-orch orch.yaml`"),
        KeyRow(
            "CUDA_VISIBLE_DEVICES=1 surogate grpo-train train.yaml",
            "`CUDA_VISIBLE_DEVICES=1 shoal grpo-train train.yaml`",
        ),
        KeyRow("examples/grpo/", "`examples/grpo/`"),
        KeyRow("train.yaml", "`examples/grpo/train.yaml`", "[configuration.md](../configuration.md) lists all keys"),
        KeyRow("infer.yaml", "`examples/grpo/infer.yaml`"),
        KeyRow("orch.yaml", "`examples/grpo/orch.yaml`"),
        KeyRow("./outputs", "`./outputs`", "the default run directory"),
        KeyRow("vllm (to be installed)", (), "vLLM is not needed: the embedded engine samples with the trained model"),
    ),
)

TRAINER = KeyTable(
    "Commands and names around the trainer",
    (
        KeyRow("GRPOTrainer", "`from shoal import GRPOTrainer`", "the next table lists its arguments"),
        KeyRow(
            "accelerate launch --num_processes 2 examples/grpo_trainer_math.py",
            "`accelerate launch --num_processes 2 examples/grpo_trainer_math.py`",
            "set `use_accelerate=True`; this also works without a GPU",
        ),
        KeyRow("examples/grpo_trainer_math.py", "`examples/grpo_trainer_math.py`"),
        KeyRow("pip install vllm", "`pip install vllm`", "needed only for `use_vllm=True`"),
        KeyRow("vllm.LLM()", "`use_vllm=True, vllm_args={…}`"),
        KeyRow("get_reward", "`get_reward(completion) -> float | None`", "None excludes a completion from its group"),
        KeyRow("AdamW", '`optimizer="AdamW"`', "`torch.optim.AdamW` is accepted too"),
    ),
)

RECIPE = KeyTable(
    "The recipe and its API level",
    (
        KeyRow(
            "training/recipes/rl_loop.py",
            "`from shoal.recipes.rl_loop import Config, main`",
            "the source is in `src/shoal/recipes/`",
        ),
        KeyRow("Config + main", "`main(Config(…), reward_fn)`"),
        KeyRow("training.utils.rl.setup_infra", "`shoal.recipes.rl_loop.setup_infra`"),
        KeyRow(
            "Infra", "`shoal.recipes.rl_loop.Infra`", "has `policy`, `reference`, `sampler`, `sync_weights` and `close`"
        ),
        KeyRow("skills/dev/", "`docs/recipes.md`"),
        KeyRow("forward_backward_custom", "`infra.policy.forward_backward_custom(datums, loss_fn)`"),
        KeyRow("optim_step", "`infra.policy.optim_step(AdamParams(…))`", "raises an error on the reference"),
        KeyRow("DeploymentSampler", "`shoal.recipes.rl_loop.DeploymentSampler`"),
        KeyRow("DeploymentSampler.sample_with_tokens()", "`await infra.sampler.sample_with_tokens(prompt, n)`"),
        KeyRow("make_grpo_loss_fn", "`make_grpo_loss_fn(config, reference_logprobs, old_logprobs)`"),
        KeyRow("build_grpo_datums", "`build_grpo_datums(groups)`", "zero-variance groups are skipped"),
        KeyRow("WeightSyncScope.PER_TRAINER", "`WeightSyncScope.PER_TRAINER`", "this is the default"),
        KeyRow("PER_DEPLOYMENT", "`WeightSyncScope.PER_DEPLOYMENT`"),
        KeyRow("WeightSyncConfig", "`WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=0)`"),
        KeyRow("dcp_save_interval=0", "`train.save_steps=0`", "a checkpoint is written only if the run is interrupted"),
        KeyRow(
            "weight_sync_interval",
            "`orch.weight_sync_interval`",
            "the values 1, N > 1 and 0 have the same meaning as in the cookbook",
        ),
        KeyRow(
            "--forward-only",
            "`shoal grpo-train FILE --forward-only`",
            "or `infra.ref_trainer_id`, which starts this process; without it the reference is a frozen copy beside "
            "the policy",
        ),
        KeyRow("asyncio.run(...)", "`asyncio.run(infra.sampler.sample_with_tokens(…))`"),
        KeyRow(
            "inference[1:]",
            "`datum.sampler_logprobs[1:]`",
            "`shoal.recipes.datums` aligns them for the built-in losses",
        ),
        KeyRow('"grpo"', '`policy_loss="grpo"`'),
        KeyRow('"importance_sampling"', '`policy_loss="importance_sampling"`'),
        KeyRow('"reinforce"', '`policy_loss="reinforce"`'),
        KeyRow('"dapo"', '`policy_loss="dapo"`'),
        KeyRow('"dro"', '`policy_loss="dro"`'),
        KeyRow('"gspo"', '`policy_loss="gspo"`'),
        KeyRow('"cispo"', '`policy_loss="cispo"`'),
    ),
)

LAUNCHER = KeyTable(
    "Config file and launcher",
    (
        KeyRow(
            "python -m areal.launcher.local train_grpo.py --config train_grpo.yaml experiment_name=… trial_name=…",
            "`python -m shoal.launcher.local examples/gsm8k/train_grpo.py --config examples/gsm8k/train_grpo.yaml "
            "experiment_name=… trial_name=…`",
        ),
        KeyRow("train_grpo.py", "`examples/gsm8k/train_grpo.py`"),
        KeyRow("train_grpo.yaml", "`examples/gsm8k/train_grpo.yaml`", "the next table lists its keys"),
        KeyRow("train_local_simple.py", "`examples/gsm8k/train_local_simple.py`"),
        KeyRow("train_hf_trainer.py", "`examples/gsm8k/train_hf_trainer.py`"),
        KeyRow("areal.reward.math_parser", "`shoal.rewards.math_parser`", "`process_results(completion, gold)`"),
        KeyRow(
            "DOCKER_WINDOWS_SETUP.md, CURSOR_DOCKER_WORKFLOW.md", "`examples/gsm8k/`", "the files have the same names"
        ),
        KeyRow("algorithms/grpo.md of its documentation", "`docs/algorithms.md`"),
        KeyRow("math/gsm8k_grpo.py of its examples", "`examples/gsm8k/train_grpo.py`"),
        KeyRow("outputs of a trial", "`outputs/<experiment>/<trial>`", "this folder is the run directory"),
    ),
)


ARGUMENTS = KeyTable(
    "`GRPOTrainer`: arguments",
    rows_of(TRAINER_KEYS),
    intro=(
        "Without `args`, `GRPOTrainer` uses the loss `grpo` with the aggregation `seq-mean-token-mean`, the mean and "
        "the standard deviation of the group, and the KL estimator k3."
    ),
    columns=("Argument", "Configuration key"),
)
FIELDS = KeyTable(
    "`shoal.recipes.rl_loop`: fields of `Config`",
    rows_of(RECIPE_KEYS),
    intro=(
        "Advantages use the mean and the unbiased standard deviation of the group. Losses use the aggregation "
        "`token-mean`, except `gspo`, which has its own. Zero-variance groups are skipped."
    ),
    columns=("Field", "Configuration key"),
)
LAUNCHER_FIELDS = KeyTable("Keys of the launcher's files", rows_of(LAUNCHER_KEYS))


VERL = KeyTable(
    "Keys of verl's `ppo_trainer` configuration",
    (
        KeyRow("python3 -m verl.trainer.main_ppo key=value …", "`shoal grpo run.yaml key=value …`"),
        KeyRow("algorithm.adv_estimator=grpo", "orch.advantage", "the default subtracts the mean of the group"),
        KeyRow("algorithm.adv_estimator=rloo", "orch.advantage.leave_one_out", "set true, and `std: none`"),
        KeyRow("algorithm.adv_estimator=reinforce_plus_plus", "orch.advantage.std", "`mean: batch`, `std: batch`"),
        KeyRow("algorithm.adv_estimator=gae", note="there is no critic", refused=True),
        KeyRow("algorithm.norm_adv_by_std_in_grpo", "orch.advantage.std", "True is `std: group`, False is `std: none`"),
        KeyRow("algorithm.use_kl_in_reward", "train.loss.kl.in", "set `in: reward`"),
        KeyRow("algorithm.kl_ctrl.kl_coef", "train.loss.kl.beta", "the coefficient is fixed"),
        KeyRow("data.train_files", "orch.dataset.path", "reads parquet files too"),
        KeyRow("data.val_files", "orch.eval.env"),
        KeyRow("data.prompt_key", "orch.dataset.columns"),
        KeyRow("data.train_batch_size", "orch.batch_size", "verl counts prompts: multiply by `rollout.n`"),
        KeyRow("data.max_prompt_length", "orch.seq_len", "limits prompt and completion together"),
        KeyRow("data.max_response_length", "orch.sampling.max_tokens"),
        KeyRow("data.seed", "train.seed"),
        KeyRow("actor_rollout_ref.model.path", "train.model"),
        KeyRow("actor_rollout_ref.model.lora_rank", "train.lora_rank", "set `train.lora: true` too"),
        KeyRow("actor_rollout_ref.model.enable_gradient_checkpointing", "train.recompute"),
        KeyRow("actor_rollout_ref.actor.optim.lr", "train.learning_rate"),
        KeyRow("actor_rollout_ref.actor.optim.lr_warmup_steps", "train.warmup_steps"),
        KeyRow(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "train.minibatches",
            "the value is train_batch_size / ppo_mini_batch_size",
        ),
        KeyRow(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "train.per_device_train_batch_size", "counts rows"
        ),
        KeyRow("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "train.sequence_len", "rows are packed"),
        KeyRow("actor_rollout_ref.actor.ppo_epochs", "train.ppo_epochs"),
        KeyRow("actor_rollout_ref.actor.clip_ratio_low", "train.loss.clip_low", "set `train.loss.type: grpo` too"),
        KeyRow("actor_rollout_ref.actor.clip_ratio_high", "train.loss.clip_high"),
        KeyRow(
            "actor_rollout_ref.actor.clip_ratio_c",
            "train.loss.dual_clip",
            "the default is 3 in verl and unset in Shoal",
        ),
        KeyRow(
            "actor_rollout_ref.actor.loss_agg_mode",
            "train.loss.aggregation",
            "token-mean, seq-mean-token-mean and seq-mean-token-sum-norm have the same names",
        ),
        KeyRow("actor_rollout_ref.actor.use_kl_loss", "train.loss.kl.beta", "set a value above 0"),
        KeyRow("actor_rollout_ref.actor.kl_loss_coef", "train.loss.kl.beta"),
        KeyRow("actor_rollout_ref.actor.kl_loss_type", "train.loss.kl.estimator", "low_var_kl is `k3`, mse is `k2`"),
        KeyRow("actor_rollout_ref.actor.entropy_coeff", "train.loss.entropy.coef"),
        KeyRow("actor_rollout_ref.actor.grad_clip", "train.max_grad_norm"),
        KeyRow("actor_rollout_ref.actor.strategy=fsdp", "train.sharding", "`fsdp`"),
        KeyRow("actor_rollout_ref.actor.strategy=megatron", note="FSDP2 is the only sharding", refused=True),
        KeyRow("actor_rollout_ref.rollout.name=vllm", "infer.engine", "`vllm` or `sglang`"),
        KeyRow("actor_rollout_ref.rollout.n", "orch.rollouts_per_example"),
        KeyRow("actor_rollout_ref.rollout.temperature", "orch.sampling.temperature"),
        KeyRow("actor_rollout_ref.rollout.top_p", "orch.sampling.top_p"),
        KeyRow("actor_rollout_ref.rollout.gpu_memory_utilization", "infer.gpu_memory_utilization"),
        KeyRow("actor_rollout_ref.rollout.tensor_model_parallel_size", "infer.tp"),
        KeyRow("custom_reward_function.path, .name", "orch.reward.function", "`path/to/file.py:name`"),
        KeyRow("reward_model.enable", "orch.env", "use the environment `dataset` with `reward: judge`"),
        KeyRow("trainer.total_epochs", "train.epochs"),
        KeyRow("trainer.total_training_steps", "train.max_steps"),
        KeyRow("trainer.n_gpus_per_node", "train.gpus"),
        KeyRow("trainer.nnodes", note="start the run with torchrun ([scale-out.md](../scale-out.md))"),
        KeyRow("trainer.logger", "train.report_to", "`train.metric_names: verl` keeps verl's names"),
        KeyRow("trainer.project_name", "train.report_project"),
        KeyRow("trainer.experiment_name", "train.report_name"),
        KeyRow("trainer.save_freq", "train.save_steps"),
        KeyRow("trainer.test_freq", "orch.eval.interval"),
        KeyRow("trainer.val_before_train", "orch.eval.at_start"),
        KeyRow("trainer.default_local_dir", "train.output_dir"),
        KeyRow("trainer.resume_mode", "train.resume_from_checkpoint", "or `--resume` on the command line"),
        KeyRow(
            "compute_score(data_source, solution_str, ground_truth)",
            "`f(completion, answer)`",
            "set it as `orch.reward.function`",
        ),
    ),
    intro="Batch sizes count prompts in verl and rollouts in Shoal.",
    columns=("In {system}", "Configuration key"),
)

OPENRLHF = KeyTable(
    "Arguments of OpenRLHF's `train_ppo_ray`",
    (
        KeyRow("python3 -m openrlhf.cli.train_ppo_ray --key value …", "`shoal grpo run.yaml key=value …`"),
        KeyRow("--pretrain", "train.model"),
        KeyRow("--prompt_data", "orch.dataset.path", "or `orch.dataset.name`"),
        KeyRow("--input_key", "orch.dataset.columns"),
        KeyRow("--label_key", "orch.dataset.columns", "name the column `answer`"),
        KeyRow("--apply_chat_template", note="a chat template is always applied"),
        KeyRow("--save_path", "train.output_dir"),
        KeyRow("--advantage_estimator group_norm", "orch.advantage", "the default with `train.loss.type: grpo`"),
        KeyRow("--advantage_estimator dr_grpo", "orch.advantage.std", "`std: none`"),
        KeyRow("--advantage_estimator rloo", "orch.advantage.leave_one_out", "set true, and `std: none`"),
        KeyRow("--advantage_estimator reinforce_baseline", "orch.advantage.std", "`mean: group`, `std: batch`"),
        KeyRow("--advantage_estimator gae", note="there is no critic", refused=True),
        KeyRow("--n_samples_per_prompt", "orch.rollouts_per_example"),
        KeyRow("--rollout_batch_size", "orch.batch_size", "OpenRLHF counts prompts: multiply by n_samples_per_prompt"),
        KeyRow("--train_batch_size", "train.minibatches", "the value is the rollouts per step / train_batch_size"),
        KeyRow("--micro_train_batch_size", "train.per_device_train_batch_size", "counts rows"),
        KeyRow("--max_epochs", "train.ppo_epochs"),
        KeyRow("--num_episodes", "train.epochs"),
        KeyRow("--prompt_max_len", "orch.seq_len", "limits prompt and completion together"),
        KeyRow("--generate_max_len", "orch.sampling.max_tokens"),
        KeyRow("--temperature", "orch.sampling.temperature"),
        KeyRow("--top_p", "orch.sampling.top_p"),
        KeyRow("--actor_learning_rate", "train.learning_rate"),
        KeyRow("--critic_learning_rate", note="there is no critic", refused=True),
        KeyRow("--lr_warmup_ratio", "train.warmup_ratio"),
        KeyRow("--l2", "train.weight_decay"),
        KeyRow("--max_norm", "train.max_grad_norm"),
        KeyRow("--eps_clip", "train.loss.clip_low"),
        KeyRow("--eps_clip_low_high", ("train.loss.clip_low", "train.loss.clip_high")),
        KeyRow("--dual_clip", "train.loss.dual_clip"),
        KeyRow("--policy_loss_type gspo", "train.loss.type", "`gspo`"),
        KeyRow("--init_kl_coef", "train.loss.kl.beta"),
        KeyRow("--kl_estimator", "train.loss.kl.estimator", "`k1` needs `train.loss.kl.in: reward`"),
        KeyRow("--use_kl_loss", "train.loss.kl.in", "`loss` with this option, `reward` without it"),
        KeyRow("--entropy_loss_coef", "train.loss.entropy.coef"),
        KeyRow(
            "--remote_rm_url",
            "orch.reward.function",
            "name a function as `file.py:function`; for a URL, use the environment `dataset` with `reward: judge`",
        ),
        KeyRow("--reward_pretrain", "orch.env", "use the environment `dataset` with `reward: judge`"),
        KeyRow("--dynamic_filtering", "orch.groups.uniform", "`refill`, the default"),
        KeyRow("--vllm_num_engines", "infer.dp"),
        KeyRow("--vllm_tensor_parallel_size", "infer.tp"),
        KeyRow("--vllm_gpu_memory_utilization", "infer.gpu_memory_utilization"),
        KeyRow("--enable_vllm_is_correction", "train.loss.correction.type", "`tis`"),
        KeyRow("--async_train", "orch.max_async_level", "set 1 or more"),
        KeyRow("--colocate_all_models", note="`shoal grpo` always samples and trains on the same devices"),
        KeyRow("--zero_stage", "train.sharding", "`fsdp` for stage 3"),
        KeyRow("--gradient_checkpointing", "train.recompute"),
        KeyRow("--lora_rank", "train.lora_rank", "set `train.lora: true` too"),
        KeyRow("--load_in_4bit", "train.qlora_bnb"),
        KeyRow("--seed", "train.seed"),
        KeyRow("--save_steps", "train.save_steps"),
        KeyRow("--eval_steps", "orch.eval.interval"),
        KeyRow("--use_wandb", "train.report_to", "`wandb`; export the key as WANDB_API_KEY"),
        KeyRow("--load_checkpoint", "train.resume_from_checkpoint", "or `--resume` on the command line"),
    ),
    columns=("In {system}", "Configuration key"),
)

UNSLOTH = KeyTable(
    "Unsloth",
    (
        KeyRow("from unsloth import FastLanguageModel", "`from shoal import GRPOConfig, GRPOTrainer`"),
        KeyRow("FastLanguageModel.from_pretrained(model_name)", "train.model", "pass the name as `model=`"),
        KeyRow("max_seq_length", "train.sequence_len", '`overrides=["train.sequence_len=…"]`'),
        KeyRow("load_in_4bit", "train.qlora_bnb", '`overrides=["train.qlora_bnb=true"]`'),
        KeyRow("load_in_8bit", "train.qlora_fp8", "uses FP8 instead of int8"),
        KeyRow("full_finetuning", "train.lora", "set false, the default"),
        KeyRow(
            "fast_inference", "infer.engine", "vLLM is not needed: the embedded engine samples with the trained weights"
        ),
        KeyRow(
            "gpu_memory_utilization", "infer.gpu_memory_utilization", "by default the memory plan chooses the value"
        ),
        KeyRow("max_lora_rank", "train.lora_rank"),
        KeyRow("FastLanguageModel.get_peft_model(model, r, …)", "train.lora", "pass `peft_config=LoraConfig(…)`"),
        KeyRow("lora_alpha", "train.lora_alpha"),
        KeyRow("target_modules", "train.lora_target_modules"),
        KeyRow(
            'use_gradient_checkpointing="unsloth"', "train.recompute", "by default the memory plan chooses the value"
        ),
        KeyRow("random_state", "train.seed"),
        KeyRow("GRPOConfig(…)", "`GRPOConfig(…)`", "has the fields of TRL"),
        KeyRow("GRPOTrainer(model, processing_class, reward_funcs, args, train_dataset)", "`GRPOTrainer(…)`"),
        KeyRow("model.save_lora(path)", "`final/`", "contains an adapter in the format of PEFT"),
        KeyRow("model.save_pretrained_merged(path)", "`shoal export`"),
        KeyRow("FastLanguageModel.for_inference(model)", "`trainer.test(dataset)`", "or `shoal eval`"),
        KeyRow("UNSLOTH_VLLM_STANDBY", "infer.engine", "this variable is not needed with the embedded engine"),
    ),
    intro="Unsloth's scripts use TRL's trainer. [trl.md](trl.md) lists the arguments of that trainer.",
)

PRIME_RL = KeyTable(
    "Keys of prime-rl's files",
    (
        KeyRow("uv run rl @ rl.toml", "`shoal grpo run.yaml`", "add `--layout split` for three processes"),
        KeyRow("uv run trainer @ train.toml", "`shoal grpo-train train.yaml`"),
        KeyRow("uv run orchestrator @ orch.toml", "`shoal grpo-orch orch.yaml`"),
        KeyRow("uv run inference @ infer.toml", "`shoal grpo-infer infer.yaml`"),
        KeyRow("uv run sft @ sft.toml", "`shoal sft sft.yaml`"),
        KeyRow("model.name", ("train.model", "infer.model")),
        KeyRow("max_steps", ("train.max_steps", "orch.max_steps")),
        KeyRow("seq_len", ("train.sequence_len", "orch.seq_len")),
        KeyRow("output_dir", "train.output_dir"),
        KeyRow("trainer.optim.lr", "train.learning_rate"),
        KeyRow("trainer.optim.weight_decay", "train.weight_decay"),
        KeyRow("trainer.optim.max_norm", "train.max_grad_norm"),
        KeyRow("trainer.optim.type=muon", note="AdamW is the only optimizer", refused=True),
        KeyRow("trainer.scheduler.type", "train.lr_scheduler_type"),
        KeyRow("trainer.ckpt.interval", "train.save_steps"),
        KeyRow("trainer.model.ac", "train.recompute"),
        KeyRow("trainer.model.lora.rank", "train.lora_rank", "set `train.lora: true` too"),
        KeyRow("trainer.loss.token_mask_low", "train.loss.token_mask_low", "a parameter of the loss `masked`"),
        KeyRow("trainer.loss.token_mask_high", "train.loss.token_mask_high"),
        KeyRow("trainer.loss.geo_mask_low", "train.loss.geo_mask_low"),
        KeyRow("trainer.loss.geo_mask_high", "train.loss.geo_mask_high"),
        KeyRow("trainer.loss.ratio_type", "train.loss.ratio_type"),
        KeyRow("trainer.loss.kl_tau", "train.loss.kl_tau"),
        KeyRow("trainer.loss.adv_tau", "train.loss.adv_tau"),
        KeyRow("trainer.loss.teacher_tau", note="`train.teacher` configures distillation from a teacher", refused=True),
        KeyRow("trainer.weight_broadcast.type", "train.weight_broadcast.type"),
        KeyRow("orchestrator.batch_size", "orch.batch_size"),
        KeyRow("orchestrator.rollouts_per_example", "orch.rollouts_per_example"),
        KeyRow("orchestrator.oversampling_factor", "orch.groups.max_refill", "zero-variance groups are replaced"),
        KeyRow("orchestrator.max_async_level", "orch.max_async_level"),
        KeyRow("orchestrator.max_off_policy_steps", "orch.max_off_policy_steps"),
        KeyRow("orchestrator.sampling.temperature", "orch.sampling.temperature"),
        KeyRow("orchestrator.sampling.max_tokens", "orch.sampling.max_tokens"),
        KeyRow("orchestrator.env.id", "orch.env", "set `id: verifiers:ID`"),
        KeyRow("orchestrator.env.args", "orch.env", "set `args`"),
        KeyRow("orchestrator.eval.interval", "orch.eval.interval"),
        KeyRow("orchestrator.buffer.easy_threshold", "orch.buffer.easy_threshold"),
        KeyRow("orchestrator.buffer.hard_threshold", "orch.buffer.hard_threshold"),
        KeyRow("orchestrator.buffer.easy_fraction", "orch.buffer.easy_fraction", "the value is a sampling probability"),
        KeyRow("orchestrator.advantage", "orch.advantage"),
        KeyRow("orchestrator.client.base_url", "orch.client.base_url"),
        KeyRow("inference.parallel.tp", "infer.tp"),
        KeyRow("inference.parallel.dp", "infer.dp"),
        KeyRow("inference.server.port", "infer.port"),
        KeyRow("wandb.project", "train.report_project", "set `train.report_to: wandb` too"),
        KeyRow("wandb.name", "train.report_name"),
    ),
    intro="Shoal's files are YAML instead of TOML.",
    columns=("In {system}", "Configuration key"),
)

PURPOSE = "This page helps users of {system} to run the same training with Shoal."
KEYS_INTRO = (
    "The tables of this page map names of {system} to names of Shoal. Most names are configuration keys, which "
    "[configuration.md](../configuration.md) describes. Set a key in a file, on the command line "
    '(`train.learning_rate=1e-5`), or with `overrides=["train.learning_rate=1e-5"]` in a script. A dash means that '
    "no configuration key corresponds to the name."
)
# File → (system, how to begin, tables).
PAGES: dict[str, tuple[str, str, tuple[KeyTable, ...]]] = {
    "trl": (
        "TRL",
        "Change `from trl import GRPOConfig, GRPOTrainer` to `from shoal import GRPOConfig, GRPOTrainer`. With "
        "`args=GRPOConfig(…)`, the defaults of TRL 1.16 apply ([grpo-trainer.md](../grpo-trainer.md)). The last table "
        "lists Shoal's own arguments, which apply without `args`.",
        (trl.TRAINER, trl.FIELDS, trl.DPO, TRAINER, ARGUMENTS),
    ),
    "verl": ("verl", "Write a YAML file with `shoal init`, and run it with `shoal grpo`.", (VERL,)),
    "openrlhf": ("OpenRLHF", "Write a YAML file with `shoal init`, and run it with `shoal grpo`.", (OPENRLHF,)),
    "unsloth": ("Unsloth", "An Unsloth script is a TRL script that loads the model in another way.", (UNSLOTH,)),
    "prime-rl": (
        "prime-rl",
        "Shoal has the same three processes as prime-rl, and most keys have the same names.",
        (PRIME_RL,),
    ),
    "surogate": (
        "Surogate",
        "The three files work unchanged: `shoal grpo --train train.yaml --infer infer.yaml --orch orch.yaml`.",
        (QUICKSTART,),
    ),
    "fireworks-cookbook": (
        "the Fireworks cookbook",
        "`shoal.recipes.rl_loop` has the same names as the cookbook's `rl_loop` ([recipes.md](../recipes.md)). "
        "Import `Config` and `main` from it.",
        (RECIPE, FIELDS),
    ),
    "areal": (
        "AReaL",
        "`python -m shoal.launcher.local train_grpo.py --config train_grpo.yaml` reads AReaL's files "
        "([launcher.md](../launcher.md)).",
        (LAUNCHER, LAUNCHER_FIELDS),
    ),
}


def page(name: str) -> str:
    system, start, tables = PAGES[name]
    head = f"# Coming from {system}\n\n{PURPOSE.format(system=system)} {start}\n\n{KEYS_INTRO.format(system=system)}\n"
    note = "\nThis page is generated: `python -m shoal.coming_from docs/coming-from`.\n"
    return "\n".join([head, *(render(table, system) for table in tables)]).rstrip("\n") + "\n" + note


def render(table: KeyTable, system: str) -> str:
    head = [f"## {table.title}", ""] + ([table.intro, ""] if table.intro else [])
    theirs, ours = table.columns
    rows = [f"| {theirs.format(system=system)} | {ours} | Note |", "|---|---|---|", *(_line(row) for row in table.rows)]
    return "\n".join([*head, *rows, ""])


def _line(row: KeyRow) -> str:
    ours = "not supported" if row.refused else ", ".join(k if "`" in k else f"`{k}`" for k in row.keys) or "–"
    return f"| {table_cell(f'`{row.theirs}`')} | {table_cell(ours)} | {table_cell(row.note)} |"


def unknown_keys() -> list[str]:
    """Keys in the tables that the schema does not have."""
    known = {key.dotted for root in (RunConfig, DpoConfig) for key in walk_keys(root)}
    named = [
        key
        for _, _, tables in PAGES.values()
        for table in tables
        for row in table.rows
        for key in row.keys
        if "`" not in key
    ]
    return [key for key in named if key not in known and not _free_form(key)]


def _free_form(key: str) -> bool:
    """True for keys under free-form data, such as infer.engine_args."""
    *parent, _ = key.split(".")
    above = sections_at(RunConfig, tuple(parent[:-1]))
    return bool(above) and parent[-1] in known_keys(*above) and not sections_at(RunConfig, tuple(parent))


if __name__ == "__main__":
    for name in PAGES:
        (Path(sys.argv[1]) / f"{name}.md").write_text(page(name), encoding="utf-8")
