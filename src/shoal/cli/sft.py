"""`shoal sft`: supervised training on completions, with the train section of `shoal grpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.build.load import check_run_folder
from shoal.cli.dry_run import end_dry_run
from shoal.cli.entry import note_run_folder
from shoal.cli.grpo import split_tokens
from shoal.cli.output import notices
from shoal.config.load import load_sft
from shoal.config.resolve import resolve_sft
from shoal.config.rules import check_sft
from shoal.core.errors import ConfigError


def sft(
    *tokens: str,
    model: str | None = None,
    dataset: str | None = None,
    output_dir: str | None = None,
    max_steps: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train on given completions; the loss is on the completions only.

    Parameters
    ----------
    tokens
        A file with the sections train and dataset, and overrides such as train.learning_rate=1e-5.
    model
        The same as train.model=...
    dataset
        The same as dataset.path=...
    output_dir
        The same as train.output_dir=...
    max_steps
        The same as train.max_steps=...
    dry_run
        Check everything, print and write the resolved configuration, and stop.
    resume
        Continue the run in train.output_dir.
    """
    file, overrides = split_tokens(tokens)
    flags = {
        "train.model": model,
        "dataset.path": dataset,
        "train.output_dir": output_dir,
        "train.max_steps": max_steps,
    }
    overrides += [f"{key}={_quoted(value)}" for key, value in flags.items() if value is not None]
    if file is None and not overrides:
        raise ConfigError(
            "command line: no configuration; write shoal sft sft.yaml, or --model M --dataset D --max-steps N"
        )
    loaded = load_sft(file, overrides)
    findings = check_sft(loaded.config)
    findings.raise_errors(loaded.origins)
    config = resolve_sft(loaded.config)
    note_run_folder(Path(config.train.output_dir))
    notices(findings.notice_lines() + check_run_folder(loaded, config, resume))
    resume = resume or config.train.resume_from_checkpoint
    if dry_run:
        end_dry_run(config, resume)
        return
    from shoal import api

    api.sft(config, resume=resume)


def _quoted(value: str | int) -> str:
    """A YAML scalar of the same type: a folder called 1e5 must stay a string."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
