"""Surface 3, `shoal.recipes.rl_loop`: the fields of `Config` and their schema keys, and where each import went."""

from __future__ import annotations

from shoal.surfaces.table import Row, Table

FIELDS = Table(
    "`shoal.recipes.rl_loop`: fields of `Config`",
    (
        Row("log_path", "train.output_dir"),
        Row("base_model", "train.model"),
        Row("dataset", ("orch.dataset.path", "orch.dataset.name"), "a file or folder, a hub name, or rows in memory"),
        Row("lora_rank", ("train.lora", "train.lora_rank"), "0 is full fine-tuning"),
        Row("max_seq_len", "train.sequence_len"),
        Row("learning_rate", "train.learning_rate"),
        Row("kl_beta", "train.loss.kl.beta", "unset: .001 for grpo and reinforce where there is a reference"),
        Row("completions_per_prompt", "orch.rollouts_per_example"),
        Row("max_completion_tokens", "orch.sampling.max_tokens"),
        Row("temperature", "orch.sampling.temperature"),
        Row("epochs", "train.epochs"),
        Row("max_rows", "orch.dataset.max_rows"),
        Row("prompt_groups_per_step", "orch.batch_size", "× completions_per_prompt"),
        Row("policy_loss", "train.loss.type"),
        Row("eps_clip", "train.loss.clip_low", "grpo and dapo"),
        Row("eps_clip_high", "train.loss.clip_high", "grpo and dapo"),
        Row("ratio_log_cap", "train.loss.ratio_log_cap"),
        Row("ppo_n_minibatches", "train.minibatches"),
        Row("tis", "train.loss.correction.type", "None turns it off"),
        Row("tis.cap", "train.loss.correction.cap"),
        Row("tis.level", "train.loss.correction.level"),
        Row("importance_sampling.ratio_low", "train.loss.ratio_low"),
        Row("importance_sampling.ratio_high", "train.loss.ratio_high"),
        Row("reinforce.ratio", "train.loss.ratio"),
        Row("dapo.eps_clip", "train.loss.clip_low"),
        Row("dapo.eps_clip_high", "train.loss.clip_high"),
        Row("dapo.dual_clip", "train.loss.dual_clip"),
        Row("dro.beta", "train.loss.quad_beta"),
        Row("gspo.eps_clip", "train.loss.clip_low"),
        Row("gspo.eps_clip_high", "train.loss.clip_high"),
        Row("cispo.ratio_low", "train.loss.ratio_low"),
        Row("cispo.ratio_high", "train.loss.ratio_high"),
        Row("infra.training_shape_id", ("train.device", "train.gpus", "train.recipe"), "`shoal shapes` lists them"),
        Row("infra.ref_training_shape_id", "train.reference", "frozen; LoRA always has its own base as reference"),
        Row("infra.trainer_id", (), "setup_infra re-attaches to the running trainer of this id"),
        Row("deployment.tokenizer_model", (), "required; must agree with base_model's tokenizer"),
        Row("deployment.weight_sync_scope", "infer.weights", "PER_DEPLOYMENT is own"),
        Row("deployment.deployment_id", (), "setup_infra re-attaches to the running deployment of this id"),
        Row("weight_sync.weight_sync_interval", "orch.weight_sync_interval"),
        Row("weight_sync.dcp_save_interval", "train.save_steps", "above 0, main resumes from log_path by itself"),
        Row("weight_sync.weight_sync_timeout", "orch.sync_deadline_s"),
        Row("weight_sync.dcp_timeout", "train.save_deadline_s"),
        Row("wandb", "train.report_to"),
        Row("wandb.project", "train.report_project"),
        Row("wandb.run_name", "train.report_name"),
        Row("seed", "train.seed"),
        Row("overrides", (), "any other key of the schema, as on the command line"),
    ),
    intro=(
        "Group mean and unbiased std, `token-mean` (gspo keeps its own aggregation), "
        "prompts with uniform rewards are skipped."
    ),
    columns=("field", "schema key"),
)
