"""`shoal report`: one self-contained page from one or several run directories, or the same data as JSON."""

from __future__ import annotations

import sys
import tempfile
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
    path = write_report(*runs, out=_writable(out) if out is not None else None)
    say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def _writable(out: str) -> Path:
    """Where the page can be written, found out before the runs are read; nothing is left behind by trying."""
    path = Path(out)
    if path.is_dir():
        raise ConfigError(f"command line: --out: {path} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise ConfigError(
            f"command line: --out: nothing can be written into {path.parent}: {error.strerror}; name another file"
        ) from error
