"""`shoal grpo-infer`: the inference server of the split layout, and of whoever wants one."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import notices, say
from shoal.config.checks import check_section
from shoal.config.load import load_section
from shoal.config.resolve import as_yaml
from shoal.config.schema import InferConfig


def grpo_infer(file: str, *overrides: str, dry_run: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Serve the model over HTTP, as OpenAI's clients and the other processes of the split layout ask for it.

    Parameters
    ----------
    file
        File with the infer section.
    overrides
        Such as infer.port=8001.
    dry_run
        Check everything, print the configuration, and stop.
    """
    loaded = load_section("infer", file, overrides)
    findings = check_section("infer", loaded.config)
    findings.raise_errors(loaded.origins)
    notices(findings.notice_lines())
    if dry_run:
        say(as_yaml(loaded.config))
        return
    assert isinstance(loaded.config, InferConfig)
    _serve(loaded.config)


def _serve(config: InferConfig) -> None:
    from shoal import api

    api.serve(config, _tell)


def _tell(line: str) -> None:
    say(line)
    sys.stdout.flush()  # whoever started the server waits for this line
