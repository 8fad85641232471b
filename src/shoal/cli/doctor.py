"""`shoal doctor`: what goes wrong in a run and what to change; without a run, whether this machine is fit for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.observability.text import count


def doctor(run: str | None = None, *, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """Look at a run directory, finished or going on, and say in plain words what is wrong; or check the machine.

    Parameters
    ----------
    run
        The run directory; left out: devices, versions, memory, disk and ports of this machine.
    as_json
        Print the findings as JSON.
    """
    if run is None:
        _machine(as_json)
        return
    from shoal.observability.health import diagnose
    from shoal.report.data import require_run

    findings = diagnose(require_run(Path(run)))
    if as_json:
        say(json.dumps([finding.as_dict() for finding in findings], indent=1, ensure_ascii=False))
        return
    for finding in findings:
        say(f"{finding.level}: {finding.what}")
        where = ", ".join(part for part in (finding.metric, finding.where, _count(finding.count)) if part)
        if where and finding.metric:
            say(f"    seen in: {where}")
        if finding.remedy:
            say(f"    change: {finding.remedy}")
    warnings = sum(finding.level == "warning" for finding in findings)
    say(
        f"{run}: {count(warnings, 'warning')}, {count(len(findings) - warnings, 'remark')}"
        if findings
        else f"{run}: nothing to complain about"
    )


def _count(count: int) -> str:
    return f"{count} steps" if count > 1 else ""


def _machine(as_json: bool) -> None:
    from shoal.observability.machine import check_machine

    facts = check_machine()
    if as_json:
        say(json.dumps([fact.as_dict() for fact in facts], indent=1, ensure_ascii=False))
        return
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        say(f"{'ok' if fact.fine else '!!'}  {fact.name:<{width}}  {fact.value}")
        if not fact.fine:
            say(f"{'':<{width + 4}}  {fact.remedy}")
