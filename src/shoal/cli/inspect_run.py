"""Commands that read runs: `report`, `watch` (live page), `show` (rollouts in the terminal), `doctor`, `explain`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.core.errors import ConfigError
from shoal.watch.glossary import CATALOGUE, FAMILIES, Metric, find_metric, nearest_metrics
from shoal.watch.text import WORDS, count


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
        More run directories, drawn in the same charts.
    out
        Output file instead of RUN/report.html.
    as_json
        Print the data of the page as JSON instead.
    """
    from shoal.watch.report.data import require_run
    from shoal.watch.report.page import report_json, write_report

    runs = [require_run(Path(name)) for name in (run, *others)]
    if as_json:
        if out is not None:
            raise ConfigError("command line: --json: prints to stdout, so --out has no effect; remove one of them")
        sys.stdout.write(report_json(*runs) + "\n")
        return
    path = write_report(*runs, out=_writable(out) if out is not None else None)
    say(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def _writable(out: str) -> Path:
    """Check that the page can be written there, before the runs are read."""
    path = Path(out)
    if path.is_dir():
        raise ConfigError(f"command line: --out: {path} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise ConfigError(
            f"command line: --out: cannot write to {path.parent}: {error.strerror}; name another file"
        ) from error


DEFAULT_PORT = 7447


def watch(
    run: str,
    *others: Annotated[str, Parameter(negative=())],
    port: int | None = None,
) -> None:
    """Serve a live page of a run on this machine. It updates during the run; Ctrl-C stops it.

    For a folder of runs, the page lists them with links.

    Parameters
    ----------
    run
        The run directory, or a folder with run directories in it. It may be mounted read-only.
    others
        More run directories, drawn in the same charts; or more folders.
    port
        Port on 127.0.0.1. Default: 7447 or the next free one; 0 for any.
    """
    from shoal.watch.report.data import find_runs, require_run

    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(
            f"command line: --port: must be between 0 and 65535, not {port}; leave it out for {DEFAULT_PORT}"
        )
    paths = [path if find_runs(path := Path(name)) else require_run(path) for name in (run, *others)]
    asyncio.run(_serve(paths, port))


async def _serve(runs: list[Path], port: int | None) -> None:
    from shoal.watch.report.live_page import serve

    until, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, until.set)
    ports = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + 10), 0]
    for attempt in ports:
        try:
            await serve(runs, attempt, lambda address: say(f"watching {', '.join(map(str, runs))} at {address}"), until)
            return
        except ConfigError:
            if attempt == ports[-1]:
                raise


Tint = Literal["advantage", "logprob", "ratio", "none"]


def show(
    run: str,
    *,
    step: int | None = None,
    group: str | None = None,
    tint: Tint = "advantage",
    best: Annotated[bool, Parameter(negative=())] = False,
    worst: Annotated[bool, Parameter(negative=())] = False,
    held_out: Annotated[bool, Parameter(name="--eval", negative=())] = False,
    listing: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> None:
    """Print one group of rollouts: the prompt, and each completion with its reward and coloured tokens.

    Parameters
    ----------
    run
        The run directory.
    step
        The step. Default: the newest.
    group
        Number of the group in the step (from 1), or the id of its prompt. Default: the first mixed group.
    tint
        Colour of the tokens. advantage, ratio: blue is higher, orange is lower; logprob: darker is less likely.
    best
        Print the group with the highest mean reward.
    worst
        Print the group with the lowest mean reward.
    held_out
        Choose from the groups of an evaluation. A folder of `shoal eval --out` has no others.
    listing
        List the groups of the step.
    """
    from shoal.runs.run_dir import stored_rollouts
    from shoal.watch.report.data import require_run
    from shoal.watch.report.rollouts import index_file, read_group
    from shoal.watch.report.terminal import choose_group, list_groups, print_group

    path = require_run(Path(run))
    split: Literal["train", "eval"] = "eval" if held_out or not stored_rollouts(path, "train") else "train"
    steps = [number for number, _ in stored_rollouts(path, split)]
    if not steps:
        raise ConfigError(f"command line: {run}: has no rollouts{' of evaluations' if held_out else ''} yet")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise ConfigError(f"command line: --step: {wanted} has no rollouts; this run has {steps[0]} to {steps[-1]}")
    heads = index_file(path, wanted, split)
    if listing:
        for line in list_groups(heads):
            say(line)
        return
    if not heads:
        raise ConfigError(f"command line: --step: {wanted} has no rollouts; name another step")
    head = choose_group(heads, group, "best" if best else "worst" if worst else "mixed")
    print_group(read_group(path, head), wanted, tint)


def doctor(run: str | None = None, *, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """Print the problems of a run, finished or not, and what to change. Without a run: check this machine.

    Parameters
    ----------
    run
        The run directory. Without it: devices, versions, memory, disk and ports of this machine.
    as_json
        Print the findings as JSON.
    """
    if run is None:
        _machine(as_json)
        return
    from shoal.watch.health import diagnose
    from shoal.watch.report.data import require_run

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
        f"{run}: {count(warnings, 'warning')}, {count(len(findings) - warnings, 'notice')}"
        if findings
        else f"{run}: no problems found"
    )


def _count(count: int) -> str:
    return f"{count} steps" if count > 1 else ""


def _machine(as_json: bool) -> None:
    from shoal.watch.machine import check_machine

    checks = check_machine()
    if as_json:
        say(json.dumps([check.as_dict() for check in checks], indent=1, ensure_ascii=False))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        say(f"{'ok' if check.fine else '!!'}  {check.name:<{width}}  {check.value}")
        if not check.fine:
            say(f"{'':<{width + 4}}  {check.remedy}")


def explain(metric: str | None = None) -> None:
    """Print what a metric means. Without a name: list all metrics.

    Parameters
    ----------
    metric
        A metric such as mismatch/k3 or eval/gsm8k/mean, a label of the step line such as ent, or a metric name of TRL
        or verl.
    """
    if metric is None:
        for entry in [*CATALOGUE.values(), *FAMILIES.values()]:
            say(f"{entry.name:<28} {entry.meaning}")
        return
    found = find_metric(metric) or find_metric(WORDS.get(metric, "")) or _find_by_alias(metric)
    if found is None:
        near = nearest_metrics(metric)[:4]
        hint = f"did you mean {', '.join(near)}?" if near else "`shoal explain` lists all names"
        raise ConfigError(f"command line: {metric}: is not a metric; {hint}")
    for line in _lines(metric, found):
        say(line)


def _lines(asked: str, metric: Metric) -> list[str]:
    title = metric.name if metric.name == asked else f"{asked} ({metric.name})"
    unit = f" [{metric.unit}]" if metric.unit and metric.unit != "1" else ""
    lines = [f"{title}{unit}", f"  {metric.meaning}"]
    if metric.healthy:
        lines.append(f"  healthy: {metric.healthy}")
    if metric.change:
        lines.append(f"  if not: {metric.change}")
    return lines


def _find_by_alias(name: str) -> Metric | None:
    """A name that a TRL or verl dashboard uses."""
    from shoal.watch.trackers import SCHEMES, alias

    for scheme in SCHEMES:
        for metric in CATALOGUE.values():
            other = alias(scheme, metric.name)
            if name in (other, other.removeprefix("train/")):
                return metric
    return None
