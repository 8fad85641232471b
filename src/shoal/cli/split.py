"""`shoal grpo-orch`, `grpo-train`: processes of the split layout, each read and checked alone."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from shoal.cli.environments import check_environments
from shoal.cli.output import notices, say
from shoal.config.checks import check_section
from shoal.config.load import load_section
from shoal.config.resolve import as_yaml
from shoal.config.schema import OrchConfig
from shoal.errors import ConfigError

DryRun = Annotated[bool, Parameter(negative=())]


def grpo_orch(file: str, *overrides: str, dry_run: DryRun = False) -> None:
    """Run rollouts and rewards for the split layout.

    Parameters
    ----------
    file
        File with the orch section.
    overrides
        Such as orch.batch_size=64.
    dry_run
        Check everything, print the configuration, and stop.
    """
    _section("orch", file, overrides, dry_run)


def grpo_train(file: str, *overrides: str, dry_run: DryRun = False) -> None:
    """Train for the split layout.

    Parameters
    ----------
    file
        File with the train section.
    overrides
        Such as train.learning_rate=1e-5.
    dry_run
        Check everything, print the configuration, and stop.
    """
    _section("train", file, overrides, dry_run)


def _section(name: str, file: str, overrides: tuple[str, ...], dry_run: bool) -> None:
    loaded = load_section(name, file, overrides)
    findings = check_section(name, loaded.config)
    if isinstance(loaded.config, OrchConfig):
        check_environments(loaded.config, findings)
    findings.raise_errors(loaded.origins)
    notices(findings.notice_lines())
    if not dry_run:
        raise ConfigError(
            f"grpo-{name}: the configuration is fine, but the split layout is not available in this version; "
            "use shoal grpo --train T --infer I --orch O, or add --dry-run"
        )
    say(as_yaml(loaded.config))
