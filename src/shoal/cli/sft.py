"""`shoal sft` and `shoal dpo`: training on given completions, with the train section of `shoal grpo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.build.load import check_run_folder
from shoal.cli.entry import note_run_folder
from shoal.cli.grpo import end_dry_run, quoted, split_tokens
from shoal.cli.output import notices
from shoal.config.load import Supervised, load_supervised
from shoal.config.resolve import resolve_supervised
from shoal.config.rules import check_supervised
from shoal.config.schema import DpoConfig, SftConfig
from shoal.core.errors import ConfigError

Flag = Annotated[bool, Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True)
class Arguments:
    """The flags of both commands.

    Parameters
    ----------
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

    model: str | None = None
    dataset: str | None = None
    output_dir: str | None = None
    max_steps: int | None = None
    dry_run: Flag = False
    resume: Flag = False


NO_FLAGS = Arguments()


def sft(*tokens: str, arguments: Arguments = NO_FLAGS) -> None:
    """Train on given completions; the loss is on the completions only.

    Parameters
    ----------
    tokens
        A file with the sections train and dataset, and overrides such as train.learning_rate=1e-5.
    """
    if run := _configure(SftConfig, tokens, arguments):
        from shoal import api

        api.sft(run[0], resume=run[1])


def dpo(*tokens: str, arguments: Arguments = NO_FLAGS) -> None:
    """Train on pairs of a chosen and a rejected completion (DPO).

    Parameters
    ----------
    tokens
        A file with the sections train, dataset and loss, and overrides such as loss.beta=0.2.
    """
    if run := _configure(DpoConfig, tokens, arguments):
        from shoal import api

        api.dpo(run[0], resume=run[1])


def _configure(kind: type[Supervised], tokens: tuple[str, ...], arguments: Arguments) -> tuple[Supervised, bool] | None:
    """The checked and resolved configuration, and whether to resume; None after a dry run."""
    file, overrides = split_tokens(tokens)
    flags = {
        "train.model": arguments.model,
        "dataset.path": arguments.dataset,
        "train.output_dir": arguments.output_dir,
        "train.max_steps": arguments.max_steps,
    }
    overrides += [f"{key}={quoted(value)}" for key, value in flags.items() if value is not None]
    if file is None and not overrides:
        command = f"shoal {kind.verb} {kind.verb}.yaml"
        raise ConfigError(f"command line: no configuration; write {command}, or --model M --dataset D --max-steps N")
    loaded = load_supervised(kind, file, overrides, check_supervised)
    findings = check_supervised(loaded.config)
    findings.raise_errors(loaded.origins)
    config = resolve_supervised(loaded.config)
    note_run_folder(Path(config.train.output_dir))
    notices(findings.notice_lines() + check_run_folder(loaded, config, arguments.resume))
    resume = arguments.resume or config.train.resume_from_checkpoint
    if not arguments.dry_run:
        return config, resume
    end_dry_run(config, resume)
    return None
