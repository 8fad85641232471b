"""The documents that Shoal started from, promise by promise: each has a test, a recorded run, or a stated gap.

A row is the text of a document, what it promises if the text does not say it, and the tests. `NOT_RUN` marks what no
test and no record shows. With SHOAL_SHARED, the texts are looked up in the documents.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.pages import ROOT

NOT_RUN = "not run: "
QUICKSTART, TRAINER = "surogate-grpo-quickstart.md", "grpo-trainer-guide.md"
RECIPE, LAUNCHER = "cookbook-rl-loop.md", "gsm8k-areal.md"
FILES = "unit/config/test_checks.py::test_seed_files_pass_without_notices"
TRAINS = "e2e/test_training.py::test_quickstart_files_train_a_small_local_model"
THREE = "e2e/test_split.py::test_quickstart_files_run_as_three_commands"
ARGUMENTS = "unit/surfaces/test_trainer_arguments.py::test_argument_changes_its_setting"
FIELDS = "unit/surfaces/test_recipe_fields.py::test_field_changes_its_setting"
KEYS = "unit/launcher/test_keys.py::test_key_changes_the_run"
EXAMPLE = "e2e/test_launcher.py::test_shipped_example_runs_unchanged"
LOSSES = "unit/core/test_losses.py::test_loss_and_gradient_equal_the_reference"
INFRA = "unit/recipes/test_infra.py::"
DATUMS = "unit/recipes/test_datums.py::"
VLLM = "real_vllm/test_vllm.py::test_split_run_samples_from_vllm"
IN_PROCESS = "real_vllm/test_vllm.py::test_two_steps_in_the_training_process"
DOORS = "benchmarks/results/doors_h200.json"
RATIOS = "unit/core/test_losses.py::test_masked_reports_what_it_drops"

# document → (text, tests or records)
PROMISES: dict[str, list[tuple[str, str]]] = {
    QUICKSTART: [
        ("via a single command", TRAINS),
        ("GRPO uses three config files", "unit/config/test_load.py::test_three_files_are_one_file"),
        ("surogate grpo --train examples/grpo/train.yaml", TRAINS),
        ("uv run surogate grpo", NOT_RUN + "uv itself; it starts the command that the tests start"),
        ("all three components in a single process", TRAINS),
        ("zero-copy GPU weight sharing", "unit/rollout/test_embedded.py::test_hash_identifies_the_served_weights"),
        ("`gpu_memory_utilization` is computed automatically", "unit/build/test_memory.py::test_slots_that_fit"),
        ("are written under the trainer's `output_dir`", TRAINS),
        ("reverse-text", "unit/envs/test_built_in.py::test_reverse_text_is_the_published_definition"),
        ("model: Qwen/Qwen3-0.6B", FILES),
        ("output_dir: ./outputs", THREE),
        ("gpus: 1", FILES),
        ("per_device_train_batch_size: 1", TRAINS),
        ("sequence_len: 2048", FILES),
        ("max_steps: 40", FILES),
        ("logging_steps: 1", "unit/watch/test_console.py::test_plain_console_prints_one_line_per_step"),
        ("learning_rate: 2e-4", "unit/config/test_yaml_text.py::test_yaml_1_2_scalars"),
        ("lr_scheduler_type: constant", "unit/trainer/test_schedule.py::test_no_step_has_a_rate_of_zero"),
        ("max_grad_norm: 1.0", TRAINS),
        ("weight_decay: 0.01", FILES),
        ("recipe: fp8-hybrid", "unit/models/test_precision.py::test_fp8_hybrid_is_bf16_with_fp8_products"),
        ("recipe: fp8-hybrid", DOORS),
        ("lora: true", TRAINS),
        ("lora_rank: 16", FILES),
        ("lora_alpha: 32", FILES),
        ("ratio_type: token", LOSSES),
        ("kl_tau: 0.0", LOSSES),
        ("adv_tau: 1.0", LOSSES),
        ("token_mask_low: 0.125", RATIOS),
        ("token_mask_high: 8.0", RATIOS),
        ("geo_mask_low: 0.1", RATIOS),
        ("geo_mask_high: 10.0", RATIOS),
        ("noise_scheduler:", "unit/core/test_cadence.py::test_noise_of_the_quickstart"),
        ("enabled: true", TRAINS),
        ("enable_lora: true", FILES),
        ("max_lora_rank: 32", FILES),
        ("lora_adapter: default", "unit/rollout/test_http_bits.py::test_same_bits_as_the_engine_in_this_process"),
        ("batch_size: 128", FILES),
        ("rollouts_per_example: 16", FILES),
        ("seq_len: 2048", FILES),
        ("max_tokens: 128", FILES),
        ("`5e-7` to `5e-5`", "unit/config/test_checks.py::test_unusual_settings_give_notices"),
        ("`constant` or `cosine`", "unit/trainer/test_schedule.py::test_decay_is_that_of_transformers"),
        ("Warmup", "unit/trainer/test_schedule.py::test_schedule_never_exceeds_the_peak_and_warmup_rises"),
        (
            "packed sequences fill the batch",
            "parity/test_packing.py::test_packed_rows_equal_transformers_on_a_padded_rectangle",
        ),
        ('`"token"` (per-token ratios, recommended) or `"sequence"`', LOSSES),
        (
            "If `masked` fraction exceeds 50%",
            "unit/watch/test_health.py::test_each_problem_is_reported_with_metric_steps_and_remedy",
        ),
        ("(geometric decay intervals)", "unit/core/test_cadence.py::test_noise_falls_and_never_below_its_end"),
        (
            "adds controlled noise to inference weights",
            "unit/models/test_sampler_view.py::test_noise_affects_only_the_sampler",
        ),
        ("**BF16**", "unit/models/test_precision.py::test_bf16_on_a_gpu"),
        ("`qlora_fp8: true`", "unit/models/test_precision.py::test_how_the_base_is_stored"),
        ("`qlora_bnb: true`", "unit/models/test_formats.py::test_nf4_double_quantised"),
        ("`qlora_fp4: true`", "unit/models/test_formats.py::test_nvfp4"),
        ("`qlora_fp8: true`", "benchmarks/results/precision_h200.json"),
        ("surogate grpo-infer infer.yaml", THREE),
        ("surogate grpo-orch orch.yaml", THREE),
        ("surogate grpo-train train.yaml", THREE),
        ("on separate GPUs (or separate nodes)", NOT_RUN + "two GPUs; two processes on one machine are tested"),
        ("`vllm` to be installed", VLLM),
        ("must match across all three config files", "e2e/test_split.py::test_contradictions_end_all_components"),
        (
            "`max_steps` in `train.yaml` and `orch.yaml` should match",
            "unit/config/test_split.py::test_contradictions_between_sections",
        ),
    ],
    TRAINER: [
        ("Qwen/Qwen2.5-0.5B-Instruct", DOORS),
        ("optimizer: AdamW", ARGUMENTS),
        ("learning rate: 1e-5", "unit/surfaces/test_trainer_arguments.py::test_defaults_are_those_of_the_surface"),
        ("sampling temperature: 0.6 to 0.8", ARGUMENTS),
        ("group size: 2 to 4", ARGUMENTS),
        ("ppo steps: 1 to 2", "e2e/test_training.py::test_minibatches_times_epochs_optimizer_steps"),
        ("clip eps: 0.2", ARGUMENTS),
        ("kl penalty: 0.0 to 0.1", ARGUMENTS),
        ("max new tokens: 64 to 256", ARGUMENTS),
        (
            "batch size: 1 to 4 (per device)",
            "unit/surfaces/test_trainer_arguments.py::test_batch_size_counts_the_prompts_of_a_process",
        ),
        ("max grad norm: 1.0", ARGUMENTS),
        (
            "Set `eval_steps` and pass an `eval_dataset`",
            "unit/test_grpo_trainer.py::test_training_and_evaluation_use_all_items",
        ),
        (
            "`eval_dataset` items must implement `get_reward`",
            "unit/surfaces/test_trainer_kinds.py::test_test_items_are_named_in_errors",
        ),
        ("Pass `use_accelerate=True`", "e2e/test_accelerate.py::test_two_processes_train_one_model"),
        (
            "accelerate launch --num_processes 2 examples/grpo_trainer_math.py",
            "e2e/test_accelerate.py::test_example_runs_under_the_launcher",
        ),
        ("multiple GPUs", NOT_RUN + "two GPUs; two CPU processes are tested"),
        (
            "effective sample throughput scales",
            "e2e/test_accelerate.py::test_two_processes_are_one_process_with_twice_the_prompts",
        ),
        ("run on the main process", "e2e/test_accelerate.py::test_main_process_alone_writes"),
        ("use_vllm=True,", ARGUMENTS),
        ("use_vllm=True,", IN_PROCESS),
        ('"gpu_memory_utilization": 0.5', ARGUMENTS),
        ('"tensor_parallel_size": 1', ARGUMENTS),
        ("Install vLLM first", "unit/test_grpo_trainer.py::test_vllm_that_is_not_installed_says_what_to_do"),
        ("dict passed to `vllm.LLM()`", "unit/test_grpo_trainer.py::test_vllm_that_is_not_installed_says_what_to_do"),
        (
            "3-5x speedup",
            NOT_RUN + "vLLM in the process on a GPU; benchmarks/results/rollout_vllm.json compares the engines",
        ),
        (
            "put vLLM to sleep between generations",
            "real_vllm/test_in_process.py::test_sleeping_engine_wakes_on_request",
        ),
        ("free GPU memory", NOT_RUN + "the memory that sleep frees on a GPU"),
        ("Weights are automatically synced", IN_PROCESS),
    ],
    RECIPE: [
        ("scores them with a reward function", "unit/recipes/test_main.py::test_rows_without_a_reward_are_refused"),
        ("group reward statistics", DATUMS + "test_advantages_are_group_mean_and_unbiased_std"),
        ("runs forward_backward_custom + optim_step", INFRA + "test_loss_of_ten_lines_equals_the_built_in_one"),
        ("Optional frozen copy", INFRA + "test_full_fine_tuning_has_a_reference_only_with_a_shape"),
        ("(--forward-only)", "e2e/test_attach.py::test_reference_can_be_a_process"),
        ("client-side tokenized", INFRA + "test_samples_have_n_log_probs_and_the_trainer_n_minus_one"),
        ("cookbook’sConfig + main", "e2e/test_docs_examples.py::test_recipe_page_starts_with_a_working_command"),
        *(
            (f'"{loss}"', test)
            for loss in ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo")
            for test in (LOSSES, "unit/surfaces/test_recipe_fields.py::test_every_loss_runs_with_the_surfaces_defaults")
        ),
        ("REINFORCE + KL penalty (default)", DATUMS + "test_grpo_loss_by_hand"),
        ("training.utils.rl.setup_infra", INFRA + "test_loop_with_its_own_prompts_needs_no_dataset"),
        ("shape\nresolution", "unit/surfaces/test_recipe_fields.py::test_shapes_are_keys_of_the_train_section"),
        ("LoRA shared-reference", "unit/surfaces/test_recipe_fields.py::test_lora_has_its_base_as_reference"),
        ("re-attach", "e2e/test_attach.py::test_killed_loop_is_continued_by_another_process"),
        ("needs_reference", INFRA + "test_full_fine_tuning_has_a_reference_only_with_a_shape"),
        ("needs_inference", INFRA + "test_without_inference_there_is_no_sampler"),
        ("PER_TRAINER (default)", INFRA + "test_sampler_changes_only_on_sync"),
        ("PER_DEPLOYMENT", INFRA + "test_deployment_has_its_own_weights"),
        ("make_grpo_loss_fn and build_grpo_datums", DATUMS + "test_grpo_loss_by_hand"),
        ("make_grpo_loss_fn and build_grpo_datums", INFRA + "test_wrong_arguments_of_the_parts_are_named"),
        ("All prompts in a window sample concurrently", "unit/recipes/test_main.py::test_windows"),
        ("N-step windows with overlap inside", "unit/recipes/test_main.py::test_windows"),
        ("No syncs", "unit/recipes/test_main.py::test_windows"),
        ("weights sync to the deployment", INFRA + "test_sync_that_is_missing_or_not_awaited_is_an_error"),
        ("raisesValueErrorif not set", "unit/surfaces/test_recipe_fields.py::test_wrong_field_is_named_in_one_line"),
        ("Set\ninfra.training_shape_id", FIELDS),
        (
            "skips reference-model provisioning entirely",
            INFRA + "test_full_fine_tuning_has_a_reference_only_with_a_shape",
        ),
        ("Skip prompts with uniform rewards", DATUMS + "test_zero_variance_groups_are_skipped"),
        (
            "Track reward distributions and KL",
            "unit/recipes/test_main.py::test_reference_of_full_fine_tuning_and_of_lora",
        ),
        ("never calloptim_stepon", INFRA + "test_reference_is_forward_only"),
        ("issuesnconcurrentn=1requests", INFRA + "test_samples_have_n_log_probs_and_the_trainer_n_minus_one"),
        (
            "disabled by default (\ndcp_save_interval=0)",
            "unit/recipes/test_main.py::test_without_an_interval_nothing_is_saved_and_a_used_path_is_refused",
        ),
        ("resume training from a checkpoint", "unit/recipes/test_main.py::test_stopped_run_continues_by_itself"),
        ("verify advantage computation", "unit/core/test_advantages.py::test_matches_manual_computation"),
        ("tokenizer mismatch invalidates", INFRA + "test_tokenizers_must_agree"),
        ("Trainer returns N-1 logprobs", INFRA + "test_samples_have_n_log_probs_and_the_trainer_n_minus_one"),
        ("Cookbook DPO", "unit/trainer/test_dpo.py::test_held_out_preferences_are_learned"),
        (
            "all config classes",
            "unit/surfaces/test_recipe_fields.py::test_every_field_has_a_row_here_and_in_the_documentation",
        ),
    ],
    LAUNCHER: [
        ("Uses **PPO", LOSSES),
        ("directly from the math parser", "unit/rewards/test_graders.py::test_right_answers"),
        ("`train_grpo.py`", EXAMPLE),
        ("`train_grpo.yaml`", EXAMPLE),
        ("`train_local_simple.py`", EXAMPLE),
        ("`train_hf_trainer.py`", EXAMPLE),
        ("DOCKER_WINDOWS_SETUP.md", "e2e/test_launcher.py::test_container_copies_existing_files"),
        ("CURSOR_DOCKER_WORKFLOW.md", "architecture/test_seed_promises.py::test_pages_of_the_example_exist"),
        ("Docker + WSL2", NOT_RUN + "Windows and Docker"),
        ("Install SGLang for inference serving", "unit/launcher/test_read.py::test_allocations_with_a_server"),
        ("Install SGLang for inference serving", NOT_RUN + "SGLang itself; its HTTP interface is tested with a double"),
        ("export WANDB_API_KEY", "unit/watch/test_trackers.py::test_wandb_key_is_checked_at_the_start"),
        ("python -m areal.launcher.local train_grpo.py", EXAMPLE),
        ("--config train_grpo.yaml", EXAMPLE),
        ("experiment_name=gsm8k-grpo-local", EXAMPLE),
        ("trial_name=trial0", EXAMPLE),
        ("actor.path=Qwen", KEYS),
        ("stats_logger.wandb.mode=online", KEYS),
        ("stats_logger.wandb.wandb_api_key", "unit/launcher/test_keys.py::test_key_reaches_only_wandb"),
        ("`total_train_epochs`: Number of training epochs (default: 5)", KEYS),
        ("`gconfig.n_samples`", KEYS),
        ("`gconfig.max_new_tokens`", KEYS),
        ("`train_dataset.batch_size`", KEYS),
        ("`actor.lr`", KEYS),
        ("`actor.reward_scaling`", KEYS),
        ("`allocation_mode`", "unit/launcher/test_read.py::test_allocations_that_work"),
        (
            "manages the inference server automatically",
            "unit/launcher/test_keys.py::test_server_is_started_or_attached_to",
        ),
        ("manages the inference server automatically", "real_vllm/test_vllm.py::test_launcher_starts_a_server"),
        ("num_workers: 0", "unit/launcher/test_keys.py::test_num_workers_zero_is_accepted"),
        ("generate `n_samples` completions", EXAMPLE),
        ("`math_parser.process_results()`", "unit/rewards/test_graders.py::test_wrong_answers"),
        ("binary reward", "unit/rewards/test_graders.py::test_both_answers_come_back"),
        ("group-relative normalization", "unit/core/test_advantages.py::test_matches_manual_computation"),
        ("Apply PPO update", "e2e/test_launcher.py::test_launcher_run_equals_shoal_grpo"),
        (
            "Update inference server weights after each training step",
            "e2e/test_split.py::test_split_equals_one_process",
        ),
        ("Cross-entropy on answer tokens", "e2e/test_resume.py::test_killed_supervised_training"),
        ("Learns format", EXAMPLE),
        ("higher accuracy than SFT alone", NOT_RUN + "a comparison at the size of the document"),
        ("`mb_spec.max_tokens_per_mb`", KEYS),
        ("Reduce these parameters", KEYS),
        ("CUDA_VISIBLE_DEVICES=0", NOT_RUN + "a machine with several GPUs"),
        ("GSM8K", "e2e/test_launcher.py::test_real_questions_train"),
    ],
}
ROWS = [(document, text, proof) for document, rows in PROMISES.items() for text, proof in rows]


def has_proof(proof: str) -> bool:
    """`folder/file.py::test`, or a file of the repository."""
    path, _, test = proof.partition("::")
    if not test:
        return (ROOT / path).is_file()
    file = ROOT / "tests" / path
    return file.is_file() and f"def {test}(" in file.read_text("utf-8")


def test_every_promise_has_a_test_or_a_record():
    assert [proof for _, _, proof in ROWS if not (proof.startswith(NOT_RUN) or has_proof(proof))] == []
    assert not has_proof("unit/core/test_losses.py::test_nothing") and not has_proof("benchmarks/results/none.json")


@pytest.mark.skipif("SHOAL_SHARED" not in os.environ, reason="SHOAL_SHARED is not set")
@pytest.mark.parametrize("document", PROMISES)
def test_every_text_is_in_its_document(document: str):
    written = (Path(os.environ["SHOAL_SHARED"]) / "seeds" / document).read_text("utf-8")
    assert [text for text, _ in PROMISES[document] if text not in written] == []


def test_pages_of_the_example_exist():
    for name in ("DOCKER_WINDOWS_SETUP.md", "CURSOR_DOCKER_WORKFLOW.md"):
        assert (ROOT / "examples" / "gsm8k" / name).stat().st_size > 500
