"""Every command, import and path of the documents the surfaces come from, and ours."""

from __future__ import annotations

from shoal.surfaces.table import Row, Table

QUICKSTART = Table(
    "Three files, one command (the quickstart)",
    (
        Row(
            "surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`shoal grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml`",
            "the files work unchanged; `shoal init DIR` writes them",
        ),
        Row(
            "uv run surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`uv run shoal grpo …`, the same arguments",
        ),
        Row(
            "CUDA_VISIBLE_DEVICES=0 surogate grpo-infer infer.yaml",
            "`CUDA_VISIBLE_DEVICES=0 shoal grpo-infer infer.yaml`",
        ),
        Row("surogate grpo-orch orch.yaml", "`shoal grpo-orch orch.yaml`"),
        Row(
            "CUDA_VISIBLE_DEVICES=1 surogate grpo-train train.yaml",
            "`CUDA_VISIBLE_DEVICES=1 shoal grpo-train train.yaml`",
        ),
        Row("examples/grpo/", "`examples/grpo/`"),
        Row("train.yaml", "`examples/grpo/train.yaml`", "every key is in configuration.md under the same name"),
        Row("infer.yaml", "`examples/grpo/infer.yaml`"),
        Row("orch.yaml", "`examples/grpo/orch.yaml`"),
        Row("./outputs", "`./outputs`", "the run directory"),
        Row("vllm (to be installed)", (), "not needed: the trainer's own model samples"),
    ),
)

TRAINER = Table(
    "A Python class (the GRPO training guide)",
    (
        Row("GRPOTrainer", "`from shoal import GRPOTrainer`", "arguments below"),
        Row(
            "accelerate launch --num_processes 2 examples/grpo_trainer_math.py",
            "`accelerate launch --num_processes 2 examples/grpo_trainer_math.py`",
            "with `use_accelerate=True`; without a GPU add `--multi_gpu`, which starts the two processes on the CPU",
        ),
        Row("examples/grpo_trainer_math.py", "`examples/grpo_trainer_math.py`"),
        Row("pip install vllm", "`pip install vllm`", "only for `use_vllm=True`"),
        Row("vllm.LLM()", "`use_vllm=True, vllm_args={…}`"),
        Row("get_reward", "`get_reward(completion) -> float | None`", "None leaves a completion out of its group"),
        Row("AdamW", '`optimizer="AdamW"`', "torch.optim.AdamW is accepted too"),
    ),
)

RECIPE = Table(
    "A recipe and its API level (the cookbook's rl_loop)",
    (
        Row("training/recipes/rl_loop.py", "`from shoal.recipes.rl_loop import Config, main`", "src/shoal/recipes/"),
        Row("Config + main", "`main(Config(…), reward_fn)`"),
        Row("training.utils.rl.setup_infra", "`shoal.recipes.rl_loop.setup_infra`"),
        Row("Infra", "`shoal.recipes.rl_loop.Infra`", "policy, reference, sampler, sync_weights, close"),
        Row("skills/dev/", "`docs/recipes.md`"),
        Row("forward_backward_custom", "`infra.policy.forward_backward_custom(datums, loss_fn)`"),
        Row("optim_step", "`infra.policy.optim_step(AdamParams(…))`", "raises on the reference"),
        Row("DeploymentSampler", "`shoal.recipes.rl_loop.DeploymentSampler`"),
        Row("DeploymentSampler.sample_with_tokens()", "`await infra.sampler.sample_with_tokens(prompt, n)`"),
        Row("make_grpo_loss_fn", "`make_grpo_loss_fn(config, reference_logprobs, old_logprobs)`"),
        Row("build_grpo_datums", "`build_grpo_datums(groups)`", "groups of uniform rewards are skipped"),
        Row("WeightSyncScope.PER_TRAINER", "`WeightSyncScope.PER_TRAINER`", "the default"),
        Row("PER_DEPLOYMENT", "`WeightSyncScope.PER_DEPLOYMENT`"),
        Row("WeightSyncConfig", "`WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=0)`"),
        Row("dcp_save_interval=0", "`train.save_steps=0`", "no checkpoints but when interrupted"),
        Row("weight_sync_interval", "`orch.weight_sync_interval`", "1, N > 1 and 0 mean the same"),
        Row(
            "--forward-only",
            "`infra.reference`",
            "a frozen copy in the same process; the flag is refused by name",
        ),
        Row("asyncio.run(...)", "`asyncio.run(infra.sampler.sample_with_tokens(…))`"),
        Row(
            "inference[1:]", "`datum.sampler_logprobs[1:]`", "`shoal.algorithms.align` does it for the built-in losses"
        ),
        Row('"grpo"', '`policy_loss="grpo"`'),
        Row('"importance_sampling"', '`policy_loss="importance_sampling"`'),
        Row('"reinforce"', '`policy_loss="reinforce"`'),
        Row('"dapo"', '`policy_loss="dapo"`'),
        Row('"dro"', '`policy_loss="dro"`'),
        Row('"gspo"', '`policy_loss="gspo"`'),
        Row('"cispo"', '`policy_loss="cispo"`'),
    ),
)

LAUNCHER = Table(
    "Config file and launcher (GSM8K)",
    (
        Row(
            "python -m areal.launcher.local train_grpo.py --config train_grpo.yaml experiment_name=… trial_name=…",
            "`python -m shoal.launcher.local examples/gsm8k/train_grpo.py --config examples/gsm8k/train_grpo.yaml "
            "experiment_name=… trial_name=…`",
        ),
        Row("train_grpo.py", "`examples/gsm8k/train_grpo.py`"),
        Row("train_grpo.yaml", "`examples/gsm8k/train_grpo.yaml`", "keys below"),
        Row("train_local_simple.py", "`examples/gsm8k/train_local_simple.py`"),
        Row("train_hf_trainer.py", "`examples/gsm8k/train_hf_trainer.py`"),
        Row("areal.reward.math_parser", "`shoal.rewards.math_parser`", "`process_results(completion, gold)`"),
        Row("DOCKER_WINDOWS_SETUP.md, CURSOR_DOCKER_WORKFLOW.md", "`examples/gsm8k/README.md`", "WSL2 and a container"),
        Row("algorithms/grpo.md of its documentation", "`docs/algorithms.md`"),
        Row("math/gsm8k_grpo.py of its examples", "`examples/gsm8k/train_grpo.py`"),
        Row("outputs of a trial", "`outputs/<experiment>/<trial>`", "the run directory"),
    ),
)
