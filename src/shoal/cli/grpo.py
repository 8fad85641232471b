"""`shoal grpo`: train, co-located. Reads and checks the configuration, then hands it to shoal.api."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.cli.environments import check_environments, check_user_code
from shoal.cli.output import notices
from shoal.cli.run_folder import end_dry_run, prepare_folder
from shoal.config.checks import check_run
from shoal.config.load import Loaded, load_run
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.errors import ConfigError

FILE_SUFFIXES = (".yaml", ".yml")


def grpo(
    *tokens: Annotated[str, Parameter(show=True, negative=(), allow_leading_hyphen=False)],
    train: str | None = None,
    infer: str | None = None,
    orch: str | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    layout: Literal["colocated", "split"] = "colocated",
) -> int | None:
    """Train with GRPO.

    shoal grpo run.yaml, or shoal grpo --train train.yaml --infer infer.yaml --orch orch.yaml; then any overrides.

    Parameters
    ----------
    tokens
        A file with the sections train, infer and orch; and overrides such as train.learning_rate=1e-5.
    train
        File with the train section.
    infer
        File with the infer section.
    orch
        File with the orch section.
    dry_run
        Check everything, print and write the resolved configuration, and stop.
    resume
        Continue the run in train.output_dir.
    layout
        colocated: one process a device. split: grpo-infer, grpo-orch and grpo-train, started and supervised here.
    """
    run, overrides = split_tokens(tokens)
    parts = {name: file for name, file in (("train", train), ("infer", infer), ("orch", orch)) if file is not None}
    if layout == "split":
        from shoal.cli.layout import SplitCommand, supervise

        return supervise(SplitCommand(run, parts, overrides, resume, dry_run), _load(run, parts, overrides))
    train_loaded(_load(run, parts, overrides), resume=resume, dry_run=dry_run)
    return None


def train_loaded(
    loaded: Loaded[RunConfig],
    *,
    resume: bool = False,
    dry_run: bool = False,
    wording: Callable[[str], str] = str,
) -> None:
    """Check a configuration that was read, whatever surface it came from, and train.

    `wording` puts what is said before and while it trains into the words of that surface.
    """
    findings = check_run(loaded.config)
    check_environments(loaded.config.orch, findings)
    for section in (loaded.config.orch, loaded.config.train):
        check_user_code(section, findings)
    findings.raise_errors(loaded.origins)
    config = resolve_run(loaded.config)
    resume = resume or config.train.resume_from_checkpoint
    advice = [wording(line) for line in findings.notice_lines() + prepare_folder(loaded, config, resume)]
    if dry_run:
        notices(advice)
        end_dry_run(config, resume)
        return
    from shoal import api

    api.train(config, resume=resume, notices=advice, wording=wording)


def _load(run: str | None, parts: dict[str, str], overrides: list[str]) -> Loaded[RunConfig]:
    if run is not None and parts:
        given = ", ".join(f"--{name}" for name in parts)
        raise ConfigError(f"command line: {run}: a file for the whole run excludes {given}; give one or the other")
    if run is None and not parts and not overrides:
        raise ConfigError(
            "command line: no configuration; write shoal grpo run.yaml, or shoal grpo --train T --infer I --orch O "
            "(`shoal init DIR` writes examples)"
        )
    if run is None and parts and (missing := [name for name in ("train", "orch") if name not in parts]):
        raise ConfigError(f"command line: --{missing[0]}: is required next to --{next(iter(parts))}; name its file")
    return load_run(run, parts=parts, overrides=overrides)


def split_tokens(tokens: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The configuration file, if the first token names one, and the overrides."""
    if tokens and (tokens[0].endswith(FILE_SUFFIXES) or "=" not in tokens[0]):
        return tokens[0], list(tokens[1:])
    return None, list(tokens)
