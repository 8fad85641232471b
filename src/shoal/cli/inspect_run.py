"""Commands that read runs: `report`, `watch` (live page), `show` (rollouts in the terminal), `doctor`, `explain`."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from shoal.cli.output import say
from shoal.core.errors import ConfigError
from shoal.watch.glossary import CATALOGUE, FAMILIES, Metric, find_metric, nearest_metrics
from shoal.watch.report.rollouts import GroupHead
from shoal.watch.text import WORDS, count, drop_text, one_line, sanitise, short_number


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


UP, DOWN, UNSURE = (0, 114, 178), (213, 94, 0), (176, 125, 0)  # as on the page; safe for colour-blind readers


def choose_group(heads: Sequence[GroupHead], wanted: str | None, default: str) -> GroupHead:
    """By number or prompt id; otherwise the best, the worst or the first mixed group."""
    if wanted is not None:
        if wanted.isdigit() and 1 <= int(wanted) <= len(heads):
            return heads[int(wanted) - 1]
        named = [head for head in heads if wanted in (head.group, head.prompt_id)]
        if not named:
            raise ConfigError(
                f"command line: --group: {wanted} is not in this step; it has groups 1 to {len(heads)} (--list)"
            )
        return named[0]
    scored = [head for head in heads if head.mean is not None]
    if default != "mixed" and scored:
        pick = max if default == "best" else min
        return pick(scored, key=lambda head: head.mean or 0.0)
    mixed = [head for head in heads if len({r for r in head.rewards if r is not None}) > 1]
    return (mixed or list(heads))[0]


def list_groups(heads: Sequence[GroupHead]) -> Iterator[str]:
    for number, head in enumerate(heads, start=1):
        rewards = " ".join("–" if reward is None else short_number(reward) for reward in head.rewards)
        dropped = f"  (dropped: {drop_text(head.drop_reason)})" if head.drop_reason else ""
        yield f"{number:>4}  {head.prompt_id}  {one_line(head.preview, 48)}  [{rewards}]{dropped}"


def print_group(group: dict[str, Any], step: int, tint: str, console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    title = f"step {step}, {group['prompt_id'] or group['group']}"
    console.print(Rule(Text(sanitise(title)), align="left"))
    console.print(Text(sanitise(group["prompt"])))
    if group["drop_reason"]:
        console.print(Text(f"dropped: {drop_text(group['drop_reason'])}", style="yellow"))
    largest = max((abs(rollout["advantage"] or 0.0) for rollout in group["rollouts"]), default=0.0)
    for number, rollout in enumerate(group["rollouts"], start=1):
        console.print(Rule(_title(number, rollout), align="left", style="bright_black"))
        if rollout["error"]:
            console.print(Text(sanitise(rollout["error"]), style="yellow"))
        console.print(colored_completion(rollout, tint, largest))


def _title(number: int, rollout: dict[str, Any]) -> Text:
    title = Text(f"{number}")
    if rollout["reward"] is not None:
        title.append(f"  reward {short_number(rollout['reward'])}", style="bold")
    for name, value in rollout["parts"].items():
        title.append(f"  {sanitise(name)} {short_number(value) if value is not None else '–'}")
    if rollout["advantage"] is not None:
        title.append(f"  advantage {rollout['advantage']:+.2f}")
    if rollout["status"] != "ok":
        title.append(f"  {sanitise(rollout['status'])}", style="yellow")
    return title.append("  truncated", style="yellow") if rollout["truncated"] else title


def colored_completion(rollout: dict[str, Any], tint: str, largest: float = 1.0) -> Text:
    """The completion. Tokens that the policy did not sample are dim. `largest` advantage has the full colour."""
    tokens = rollout["tokens"]
    if tokens is None:
        return Text(sanitise(rollout["completion"]) or "(empty)")
    text = Text()
    for i, piece in enumerate(tokens["text"]):
        style = _style(rollout, tokens, i, tint, largest) if tokens["mask"][i] else "bright_black italic"
        text.append(sanitise(piece), style=style)
    if tokens["left_out"]:
        text.append(f" … {tokens['left_out']} more tokens", style="bright_black")
    return text


def _style(rollout: dict[str, Any], tokens: dict[str, Any], i: int, tint: str, largest: float) -> str:
    sampler = tokens["sampler"][i] if tokens["sampler"] else None
    policy = tokens["policy"][i] if tokens["policy"] else None
    if tint == "advantage" and rollout["advantage"] is not None:
        return _background(UP if rollout["advantage"] > 0 else DOWN, abs(rollout["advantage"]) / (largest or 1.0))
    if tint == "logprob" and sampler is not None:
        return _background(UNSURE, -sampler / 4)
    if tint == "ratio" and sampler is not None and policy is not None:
        return _background(UP if policy > sampler else DOWN, abs(policy - sampler) / 0.5)
    return ""


def _background(colour: tuple[int, int, int], share: float) -> str:
    """White text on `colour`, mixed with a dark background in proportion to `share`."""
    share = min(1.0, share) if math.isfinite(share) else 1.0
    if share < 0.05:
        return ""
    mixed = tuple(round(40 + (channel - 40) * share) for channel in colour)
    return f"white on rgb({mixed[0]},{mixed[1]},{mixed[2]})"
