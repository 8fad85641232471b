"""Writes docs/reliability.md: what Shoal promises, the test of each promise, and the recorded figure.

    python benchmarks/reliability.py [--page docs/reliability.md]

Figures come from benchmarks/results/. A test checks that every named test exists and that the page is up to date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Promise(NamedTuple):
    text: str
    condition: str
    tests: tuple[str, ...]  # file::function, in tests/
    figure: str = ""


class Fault(NamedTuple):
    text: str
    outcome: str
    tests: tuple[str, ...]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def kills() -> str:
    found = read("kills.json")
    assert found["failed"] == 0
    return f"{found['kills']:,} kills, {found['failed']} failed"


def campaign(*names: str) -> str:
    rows = [row for row in read("kills.json")["rows"] if row["name"] in names]
    assert {row["name"] for row in rows} == set(names) and not any(row["problems"] for row in rows)
    return f"{sum(row['kills'] for row in rows):,} kills, 0 differences"


def attacked() -> str:
    """The p99 of clients with attackers beside them, and of the same clients alone."""
    alone, row = read("soak_cpu.json")["rows"]
    return (
        f"{row['clients']} clients and {row['attackers']} attackers for {row['seconds']:.0f} s: "
        f"{row['attacks']:,} attacks, {row['answers']:,} answers, {row['wrong']} wrong, {row['lost']} lost; "
        f"p99 latency of the clients {row['p99_s']:.2f} s, and {alone['p99_s']:.2f} s without attackers"
    )


def server_memory() -> str:
    row = read("soak_cpu.json")["rows"][1]
    assert row["memory_growth"] <= 0.1
    return f"{row['attacks']:,} attacks within {row['seconds']:.0f} s: {row['memory_growth']:+.1%}"


def run_memory() -> str:
    (row,) = read("soak_steps_cpu.json")["rows"]
    assert row["growth"] < 0.01
    return f"{row['growth']:+.1%} of {row['resident_mib_after_warm_up']:.0f} MiB"


def promises() -> tuple[Promise, ...]:
    return (
        Promise(
            "A killed run resumes from its newest valid checkpoint. No rollout is lost or trained twice.",
            "in any layout and mode",
            (
                "e2e/test_resume.py::test_killed_at_every_stage",
                "e2e/test_resume.py::test_killed_at_any_moment",
                "e2e/test_stopping.py::test_resuming_a_run_that_was_killed_while_it_wrote_its_report",
                "e2e/test_resume.py::test_asynchronous_modes_train_every_rollout_once",
            ),
            kills(),
        ),
        Promise(
            "A resumed run has the same bits as an undisturbed run.",
            "with the synchronous loop, on a CPU in fp32, with the same number of threads",
            ("e2e/test_resume.py::test_killed_at_every_stage", "e2e/test_resume.py::test_killed_with_adapters"),
            campaign(
                "one process, places",
                "one process, moments",
                "one process, LoRA, places",
                "one process, LoRA, moments",
            ),
        ),
        Promise(
            "Each of the three processes of the split layout can be killed without a loss.",
            "on one machine with a shared folder",
            (
                "e2e/test_split.py::test_killed_component_returns",
                "e2e/test_split.py::test_killed_one_after_the_other",
            ),
            campaign("three processes, places", "three processes, moments"),
        ),
        Promise(
            "A checkpoint that is damaged, incomplete or from another run is never loaded.",
            "always",
            (
                "unit/runs/test_checkpoints.py::test_damaged_checkpoint_is_skipped_with_a_reason",
                "unit/runs/test_checkpoints.py::test_checkpoint_of_another_run_is_skipped",
                "e2e/test_stopping.py::test_damaged_checkpoint_is_skipped",
            ),
        ),
        Promise(
            "A resume restores lost, repeated, reordered and changed lines of journal and metrics.",
            "if the checkpoint has a folder `history/`; with older checkpoints the lines are reported",
            (
                "unit/runs/test_history.py::test_damaged_lines_are_restored_from_the_checkpoint",
                "unit/runs/test_history.py::test_steps_that_are_recorded_while_a_checkpoint_is_written_are_not_part_of_it",
                "e2e/test_damaged_history.py::test_damaged_records_and_status_are_repaired",
            ),
        ),
        Promise(
            "A damaged `status.json` does not prevent a resume.",
            "if one checkpoint has a valid manifest",
            ("unit/runs/test_history.py::test_damaged_status_does_not_block_a_resume",),
        ),
        Promise(
            "A wrong configuration ends with exit code 2, and the message names the key, the place and the fix.",
            "always",
            (
                "e2e/test_bad_configs.py::test_bad_configuration_gives_clear_errors",
                "unit/config/test_arbitrary_input.py::test_overrides",
                "unit/config/test_arbitrary_input.py::test_configuration_files_that_are_any_bytes",
            ),
            "50 of 50 wrong configurations are explained",
        ),
        Promise(
            "A chat template that is invalid, never ends or produces too much text ends with exit code 2.",
            "within 10 s and with at most 1 GiB of memory",
            (
                "unit/models/test_template_check.py::test_bad_template_is_one_clear_error",
                "unit/models/test_template_check.py::test_endless_template_is_stopped",
            ),
        ),
        Promise(
            "Damaged safetensors, GGUF and journal files cause error messages, never tracebacks.",
            "always",
            ("fuzz/test_readers.py::test_damaged_file_raises_storage_error",),
        ),
        Promise(
            "No large, slow or deeply nested request delays other clients of the server.",
            "`/health` answers within 1 s on loopback during the attack",
            (
                "unit/server/test_attacks.py::test_a_20_mb_prompt_is_rejected_before_it_is_read",
                "unit/server/test_attacks.py::test_tokenisation_runs_off_the_event_loop",
                "unit/server/test_attacks.py::test_deeply_nested_json_gets_400",
                "unit/server/test_attacks.py::test_connections_with_incomplete_headers_are_closed",
                "unit/server/test_attacks.py::test_connections_with_endless_headers_are_closed",
            ),
            attacked(),
        ),
        Promise(
            "The memory of the server grows by at most 10 % under attack.",
            "after 20 s of warm-up; the same attack",
            (
                "unit/server/test_attacks.py::test_rejected_body_is_freed_at_once",
                "unit/server/test_attacks.py::test_body_is_freed_before_its_completion_is_sampled",
                "unit/server/test_attacks.py::test_one_conversation_at_a_time_is_parsed",
            ),
            server_memory(),
        ),
        Promise(
            "The memory of a run grows by less than 1 % after warm-up.",
            "2,000 steps of a tiny model on a CPU; warm-up is the first tenth",
            (),
            run_memory(),
        ),
        Promise(
            "No request causes a server error, whether it follows or violates the published schema.",
            "tested with generated requests and fixed seeds",
            (
                "unit/server/test_published_schema.py::test_requests_that_follow_the_schema",
                "unit/server/test_published_schema.py::test_bodies_that_are_any_bytes",
            ),
        ),
        Promise(
            "Every route except `GET /health` is denied without the key, and every control route is denied without the "
            "token.",
            "always",
            (
                "unit/server/test_guard.py::test_every_route_is_denied_without_the_key",
                "unit/server/test_published_schema.py::test_no_control_route_answers_without_the_token",
            ),
            "0 routes are open",
        ),
        Promise(
            "Shoal uses no pickle, `eval`, `exec`, shell or unsafe YAML.",
            "in the source of the package",
            ("architecture/test_forbidden_calls.py::test_no_forbidden_call",),
            "0 places found",
        ),
        Promise(
            "Secrets are written to no file of the run directory and passed to no reward process.",
            "for environment variables whose name marks them as secret",
            (
                "e2e/test_surroundings.py::test_secrets_are_in_no_file_and_no_log_line",
                "unit/rewards/test_pool.py::test_secrets_do_not_reach_rewards",
            ),
        ),
        Promise(
            "A stopped or killed reward server is replaced within a time that does not depend on the batch.",
            "the calls that were running end with an error",
            (
                "unit/rewards/test_pool_attacks.py::test_server_that_a_reward_stopped_is_replaced",
                "e2e/test_faults.py::test_reward_that_kills_its_server_costs_one_rollout",
            ),
            "replaced within 10 s",
        ),
        Promise(
            "Hanging reward calls do not occupy the workers of other calls.",
            "if at most 32 calls hang at a time",
            ("unit/rewards/test_pool_attacks.py::test_hanging_calls_slow_the_pool_by_their_share",),
        ),
        Promise(
            "Changes that a reward makes in its process do not affect later rewards.",
            "after an error, and for functions of common modules and of the environment",
            (
                "unit/rewards/test_pool_attacks.py::test_changes_by_a_reward_do_not_affect_the_next",
                "unit/rewards/test_pool_timeouts.py::test_worker_with_invalid_replies_is_replaced",
            ),
        ),
        Promise(
            "Code that an isolated reward runs with `run_code` cannot change its reward or read the answers.",
            "on Linux with user namespaces ([SECURITY.md](../SECURITY.md))",
            (
                "unit/rewards/test_isolate_attacks.py::test_judge_cannot_be_taken_over",
                "unit/rewards/test_isolate_attacks.py::test_answers_are_not_in_the_memory_of_the_program",
                "unit/rewards/test_isolate_attacks.py::test_program_shares_no_namespace_with_the_judge",
            ),
        ),
        Promise(
            "An isolated reward call leaves no process and no file behind, and the sum of its memory is limited.",
            "on Linux with user namespaces; the limit of the memory also needs control groups",
            (
                "unit/rewards/test_isolate_attacks.py::test_no_process_outlives_its_call",
                "unit/rewards/test_isolate_attacks.py::test_files_are_limited_and_not_left_behind",
                "unit/rewards/test_isolate_attacks.py::test_memory_is_limited_in_sum",
            ),
        ),
    )


FAULTS = (
    Fault(
        "The run is killed at any stage of a step, a checkpoint or the export.",
        "The run resumes.",
        (
            "e2e/test_resume.py::test_killed_at_every_stage",
            "e2e/test_resume.py::test_killed_repeatedly",
            "unit/runs/test_checkpoints.py::test_kill_at_each_stage",
        ),
    ),
    Fault(
        "The engine is killed, restarted or stopped.",
        "The run waits, loads the weights again and continues, or ends with a reason after the timeout.",
        (
            "e2e/test_server_lost.py::test_killed_server_is_restarted_elsewhere",
            "e2e/test_server_stopped.py::test_server_suspended_forever",
        ),
    ),
    Fault(
        "The run is killed, and some of its child processes are stopped or in other sessions.",
        "All child processes end with the run.",
        (
            "e2e/test_faults.py::test_killed_run_leaves_no_process_behind",
            "unit/rewards/test_pool_attacks.py::test_stopped_servers_do_not_outlive_a_killed_run",
            "unit/rewards/test_pool_attacks.py::test_setsid_chain_ends_with_a_killed_run",
        ),
    ),
    Fault(
        "The reward server is killed or suspended, or its keeper is killed.",
        "The server is replaced. Without its keeper, the run ends with exit code 3 and the state saved.",
        (
            "e2e/test_faults.py::test_reward_that_kills_its_server_costs_one_rollout",
            "e2e/test_faults.py::test_killed_reward_server_stops_the_run_with_its_state_saved",
            "e2e/test_signals.py::test_reward_server_suspended_for_a_while",
        ),
    ),
    Fault(
        "A process is suspended with SIGSTOP for a while, or a clock is set.",
        "The run continues.",
        (
            "e2e/test_signals.py::test_process_suspended_for_a_while",
            "e2e/test_split_faults.py::test_clock_changes_have_no_effect",
        ),
    ),
    Fault(
        "The run receives SIGINT, SIGTERM or SIGHUP, once or twice, or its stdout is closed.",
        "The first signal saves and ends the run with exit code 130 or 143, the second ends it immediately, and "
        "`--resume` continues. A closed stdout does not end the run.",
        (
            "e2e/test_stopping.py::test_signal_saves_and_the_next_command_continues",
            "e2e/test_stopping.py::test_second_signal_ends_the_run_at_once",
            "e2e/test_stopping.py::test_closed_pipe_does_not_end_the_run",
            "e2e/test_signals.py::test_sighup_saves",
        ),
    ),
    Fault(
        "The disk is full, read-only or failing, or the folder is removed.",
        "The run ends with exit code 4, and can be resumed when the disk works again.",
        (
            "e2e/test_storage.py::test_disk_that_fills_up",
            "e2e/test_storage.py::test_read_only_disk",
            "e2e/test_storage.py::test_device_failure_during_write",
            "e2e/test_storage.py::test_folder_removed_during_the_run",
        ),
    ),
    Fault(
        "A run is resumed with other data, another model or other settings.",
        "The command ends with exit code 2.",
        (
            "e2e/test_stopping.py::test_changed_data_cannot_be_continued",
            "e2e/test_stopping.py::test_resume_with_another_model_is_refused",
        ),
    ),
    Fault(
        "Gradients or weights contain NaN or infinity.",
        "The optimizer step is skipped. After several such steps the run ends with exit code 3.",
        (
            "e2e/test_faults.py::test_one_nonfinite_gradient_is_skipped_and_counted",
            "e2e/test_faults.py::test_nonfinite_gradients_stop_the_run_with_a_checkpoint",
            "unit/rollout/test_embedded.py::test_nonfinite_weights_end_the_run",
        ),
    ),
    Fault(
        "A reward fails, hangs, forks, prints without end or returns an invalid value.",
        "The rollout is excluded and counted.",
        (
            "unit/rewards/test_pool.py::test_failing_reward_affects_only_its_job",
            "unit/rewards/test_pool.py::test_excess_output_is_discarded",
            "unit/rewards/test_pool_timeouts.py::test_hanging_reward_is_a_timeout_and_its_worker_is_replaced",
        ),
    ),
    Fault(
        "A server refuses or resets connections, is slow or busy, or answers with HTML, wrong ids or log-probs.",
        "The request is sent again, or the run ends and the message names the server.",
        (
            "unit/rollout/test_http.py::test_invalid_sampler_answer_ends_the_run_and_names_the_server",
            "unit/rollout/test_http.py::test_busy_server_is_retried",
            "unit/rollout/test_http.py::test_connection_lost_within_a_response_is_retried",
        ),
    ),
    Fault(
        "Answers arrive in another order than the requests.",
        "They are assigned to the requests by id.",
        ("unit/rollout/test_http.py::test_answers_match_their_requests_in_any_order",),
    ),
    Fault(
        "A weight sync is cut off at any tensor, or two weight syncs run at the same time.",
        "An incomplete version changes nothing, and syncs run one after the other.",
        (
            "unit/server/test_weight_sync.py::test_damaged_file_changes_no_tensor",
            "unit/server/test_weight_sync.py::test_concurrent_syncs_are_served_in_order",
        ),
    ),
    Fault(
        "HOME is unset, LANG is C, the umask is 077, or prompts contain control characters and markup.",
        "The run works as usual.",
        (
            "e2e/test_surroundings.py::test_bare_environment",
            "e2e/test_surroundings.py::test_hostile_prompts",
            "unit/runs/test_run_dir.py::test_files_follow_the_umask",
        ),
    ),
    Fault(
        "Rows of a data set are not JSON, not UTF-8, deeply nested, too large or without columns.",
        "The rows are excluded and named with file and line. If no row is left, the exit code is 2.",
        (
            "unit/envs/test_datasets.py::test_bad_row_is_skipped_and_reported",
            "unit/config/test_arbitrary_input.py::test_rows_of_a_data_set",
            "unit/config/test_arbitrary_input.py::test_nesting_is_bounded_everywhere",
        ),
    ),
    Fault(
        "A wait would not end.",
        "The run ends at the deadline, and the stacks of all threads are in `logs/`.",
        (
            "e2e/test_faults.py::test_wait_past_the_deadline_stops_the_run",
            "e2e/test_deadline.py::test_hanging_device_ends_the_run",
            "unit/watch/test_watchdog.py::test_watchdog_names_the_waiter_and_dumps_stacks_once",
        ),
    ),
)
UNPROVEN = (
    "the rest of the planned 5,000 kills: the table counts only the kills that were made",
    "kills on a GPU with captured graphs and a save in flight",
)


def link(test: str) -> str:
    file, name = test.split("::")
    return f"[`{name}`](../tests/{file})"


def page() -> str:
    found = read("kills.json")
    machine = found["machine"]
    dates = " and ".join(sorted({day for row in found["rows"] for day in row["dates"]}))
    seeds = " and ".join(map(str, sorted({row["seed"] for row in found["rows"]})))
    lines = [
        "<!-- Written by benchmarks/reliability.py. Do not edit. -->",
        "# Reliability",
        "",
        "This page lists what Shoal promises when processes are killed, disks fail or input is hostile, with the tests",
        "of each promise. To run the tests and the measurements yourself:",
        "",
        "```bash",
        "make faults                                   # kills at every stage of a run, servers that stop",
        ".venv/bin/python benchmarks/kills.py kills.json   # the kills of the table; --add continues",
        "make soak                                     # long runs, and a server under attack",
        "```",
        "",
        "## Promises",
        "",
        "| Promise | Condition | Tests | Measured result |",
        "|---|---|---|---|",
        *(
            f"| {promise.text} | {promise.condition} | {'<br>'.join(map(link, promise.tests))} | {promise.figure} |"
            for promise in promises()
        ),
        "",
        f"The kills were made on {dates} with {machine['cores']} cores, torch {machine['torch']} and the seeds "
        f"{seeds} ([kills.json](../benchmarks/results/kills.json)). Promises without a measured result are",
        "shown by their tests. [SECURITY.md](../SECURITY.md) describes what isolated rewards guarantee.",
        "",
        "During the measurement of the server, other programs used the same cores "
        "([soak_cpu.json](../benchmarks/results/soak_cpu.json)).",
        "Therefore compare these times only with each other.",
        "",
        "## Faults",
        "",
        "| Fault | Outcome | Tests |",
        "|---|---|---|",
        *(f"| {fault.text} | {fault.outcome} | {'<br>'.join(map(link, fault.tests))} |" for fault in FAULTS),
        "",
        "## Not measured",
        "",
        "These cases have not been run:",
        "",
        *(f"- {text}" for text in UNPROVEN),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md")
    parser.parse_args().page.write_text(page())
