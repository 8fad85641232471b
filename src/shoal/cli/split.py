"""`shoal grpo-orch`, `grpo-train` and `grpo-infer`: the processes of the split layout. Each reads and checks its own
section; `grpo-infer` also serves a model without a run."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.build.load import check_environments, check_user_code
from shoal.cli.grpo import FILE_SUFFIXES, import_user_code, note_machine
from shoal.cli.output import notices, say, say_at_once
from shoal.config.infer import InferConfig
from shoal.config.load import ConfigDraft, load_section
from shoal.config.orch import OrchConfig
from shoal.config.problems import Findings, Origins
from shoal.config.resolve import as_yaml
from shoal.config.rules import check_section
from shoal.config.train import TrainConfig
from shoal.core.errors import EXIT_TERMINATED, ConfigError
from shoal.rewards.sandbox import die_with_parent
from shoal.split.supervisor import SUPERVISOR, free_port

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
        How to continue the run, for status.json; set by the supervisor.
    """
    loaded = read_section("orch", file, overrides, dry_run)
    if loaded is not None:
        from shoal.split import commands as split

        again = next_command or split.resume_command(file, overrides)
        split.orchestrate(loaded.config, loaded.origins, resume=resume, next_command=again)


def grpo_train(
    file: str,
    *overrides: str,
    dry_run: DryRun = False,
    forward_only: Flag = False,
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
        Serve only the reference log-probs of train.model, for the loop of a recipe.
    """
    loaded = read_section("train", file, overrides, dry_run)
    if loaded is not None and forward_only:
        serve_reference(loaded.config)
    elif loaded is not None:
        from shoal.split import commands as split

        split.serve_training(loaded.config, loaded.origins, ("grpo-train", file, *overrides))


def serve_reference(train: TrainConfig) -> None:
    """`grpo-train --forward-only`: a server of the frozen model in train.output_dir."""
    if train.lora:
        raise ConfigError(
            "--forward-only: train.lora: the reference of an adapter is its base model; remove train.lora"
        )
    from shoal.split import commands as split
    from shoal.split.inference_process import infer_section

    section = {**infer_section(train), "output_dir": train.output_dir, "port": free_port()}
    split.serve_inference(InferConfig.model_validate(section), Origins(), say_at_once)


def read_section(name: str, file: str, overrides: tuple[str, ...], dry_run: bool) -> ConfigDraft[Any] | None:
    """The checked section; None after a dry run."""
    die_with_supervisor()
    only_overrides = "=" in file and not file.endswith(FILE_SUFFIXES)
    words = (None, [file, *overrides]) if only_overrides else (file, overrides)
    loaded = load_section(name, *words, rules=_check)
    findings = _check(loaded.config)
    findings.raise_errors(loaded.origins)
    if os.environ.get("RANK", "0") == "0":  # once, not on every rank
        notices(findings.notice_lines())
    if isinstance(loaded.config, OrchConfig | TrainConfig):
        import_user_code(loaded.config)  # fail before waiting for the other processes
    if not dry_run:
        return loaded
    if isinstance(loaded.config, TrainConfig):
        note_machine(loaded.config)
    say(as_yaml(loaded.config))
    return None


def _check(section: TrainConfig | InferConfig | OrchConfig) -> Findings:
    """The rules of the section, and the environments and functions that it names."""
    findings = check_section(section)
    if isinstance(section, OrchConfig):
        check_environments(section, findings)
    if isinstance(section, OrchConfig | TrainConfig):
        check_user_code(section, findings)
    return findings


def die_with_supervisor() -> None:
    """A process that `shoal grpo --layout split` started ends when the supervisor ends, for whatever reason."""
    supervisor = os.environ.pop(SUPERVISOR, None)
    if supervisor is not None:
        die_with_parent()
        if os.getppid() != int(supervisor):
            sys.exit(EXIT_TERMINATED)  # the supervisor ended before the line above


def grpo_infer(file: str, *overrides: str, dry_run: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Serve the model over HTTP, for OpenAI clients and for the other processes of the split layout.

    Parameters
    ----------
    file
        File with the infer section.
    overrides
        Such as infer.port=8001.
    dry_run
        Check everything, print the configuration, and stop.
    """
    loaded = read_section("infer", file, overrides, dry_run)
    if loaded is not None:
        from shoal.split import commands as split

        split.serve_inference(loaded.config, loaded.origins, say_at_once)
