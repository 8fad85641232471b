"""`shoal report`: one self-contained page from one or several run directories, or the same data as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.errors import ConfigError


def report(
    run: str,
    *others: Annotated[str, Parameter(negative=())],
    out: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Write report.html: curves, rollouts, findings, events and configuration in one file that needs no network.

    Parameters
    ----------
    run
        The run directory.
    others
        More run directories, laid over the first.
    out
        Where to write the page instead of RUN/report.html.
    as_json
        Print the data of the page as JSON instead.
    """
    from shoal.report import report_json, write_report
    from shoal.report.data import require_run

    runs = [require_run(Path(name)) for name in (run, *others)]
    if as_json:
        if out is not None:
            raise ConfigError("command line: --json: prints the data, so --out has no effect; leave one of them out")
        sys.stdout.write(report_json(*runs) + "\n")
        return
    path = write_report(*runs, out=Path(out) if out is not None else None)
    say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
