"""`shoal grpo-orch`, `grpo-train`: processes of the split layout, each read and checked alone."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.environments import check_environments, check_user_code, load_code
from shoal.cli.grpo import FILE_SUFFIXES
from shoal.cli.machine import note_machine
from shoal.cli.output import notices, say
from shoal.config.checks import check_section
from shoal.config.load import Loaded, load_section
from shoal.config.resolve import as_yaml
from shoal.config.schema import OrchConfig, TrainConfig
from shoal.errors import EXIT_TERMINATED, ConfigError
from shoal.orchestrator.supervise import SUPERVISOR
from shoal.rewards.confine import die_with_parent

DryRun = Flag = Annotated[bool, Parameter(negative=())]


def grpo_orch(
    file: str,
    *overrides: str,
    dry_run: DryRun = False,
    resume: Flag = False,
    next_command: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Run rollouts and rewards for the split layout.

    Parameters
    ----------
    file
        File with the orch section, or with all three.
    overrides
        Such as orch.batch_size=64.
    dry_run
        Check everything, print the configuration, and stop.
    resume
        Continue the run in orch.output_dir.
    next_command
        How to go on, for status.json, where a supervisor started this.
    """
    loaded = read_section("orch", file, overrides, dry_run)
    if loaded is not None:
        from shoal import split

        again = next_command or split.resume_command(file, overrides)
        split.orchestrate(loaded.config, loaded.origins, resume=resume, next_command=again)


def grpo_train(
    file: str,
    *overrides: str,
    dry_run: DryRun = False,
    forward_only: Annotated[bool, Parameter(negative=(), show=False)] = False,
) -> None:
    """Train for the split layout.

    Parameters
    ----------
    file
        File with the train section, or with all three.
    overrides
        Such as train.learning_rate=1e-5.
    dry_run
        Check everything, print the configuration, and stop.
    forward_only
        Refused: a trainer computes the reference itself.
    """
    if forward_only:
        raise ConfigError(
            "--forward-only: no trainer serves the reference alone: grpo-train holds it beside the policy; "
            "set train.reference=frozen (or adapter-off with train.lora), and leave this flag out"
        )
    loaded = read_section("train", file, overrides, dry_run)
    if loaded is not None:
        from shoal import split

        split.serve_training(loaded.config, loaded.origins, ("grpo-train", file, *overrides))


def read_section(name: str, file: str, overrides: tuple[str, ...], dry_run: bool) -> Loaded[Any] | None:
    """The section, read and checked; None if that is all that was wanted."""
    die_with_supervisor()
    only_overrides = "=" in file and not file.endswith(FILE_SUFFIXES)
    loaded = load_section(name, None, [file, *overrides]) if only_overrides else load_section(name, file, overrides)
    findings = check_section(name, loaded.config)
    if isinstance(loaded.config, OrchConfig):
        check_environments(loaded.config, findings)
    if isinstance(loaded.config, OrchConfig | TrainConfig):
        check_user_code(loaded.config, findings)
    findings.raise_errors(loaded.origins)
    if os.environ.get("RANK", "0") == "0":  # of several that were started alike, one says it
        notices(findings.notice_lines())
    if isinstance(loaded.config, OrchConfig | TrainConfig):
        load_code(loaded.config)  # what cannot be had is said before anybody is waited for
    if not dry_run:
        return loaded
    if isinstance(loaded.config, TrainConfig):
        note_machine(loaded.config)
    say(as_yaml(loaded.config))
    return None


def die_with_supervisor() -> None:
    """A process that `shoal grpo --layout split` started ends with it, however that one ends."""
    supervisor = os.environ.pop(SUPERVISOR, None)
    if supervisor is not None:
        die_with_parent()
        if os.getppid() != int(supervisor):
            sys.exit(EXIT_TERMINATED)  # it ended before this process could ask for that
