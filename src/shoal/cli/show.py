"""`shoal show`: rollouts of a run printed in a terminal, tokens tinted by advantage, log-prob or ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.errors import ConfigError

Tint = Literal["advantage", "logprob", "ratio", "none"]


def show(
    run: str,
    *,
    step: int | None = None,
    group: str | None = None,
    tint: Tint = "advantage",
    best: Annotated[bool, Parameter(negative=())] = False,
    worst: Annotated[bool, Parameter(negative=())] = False,
    listing: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> None:
    """Print the rollouts of one group: the prompt, and each completion with its reward and its tokens tinted.

    Parameters
    ----------
    run
        The run directory.
    step
        Which step; the newest unless given.
    group
        Its number in the step from 1, or its prompt's id; the first mixed group unless given.
    tint
        What tokens are coloured by: blue up, orange down for advantage and ratio; darker is less likely for logprob.
    best
        The group with the highest mean reward.
    worst
        The group with the lowest.
    listing
        List the groups of the step instead.
    """
    from shoal.report.data import require_run
    from shoal.report.rollouts import index_step, read_group, rollout_steps
    from shoal.report.terminal import choose_group, list_groups, print_group

    path = require_run(Path(run))
    steps = rollout_steps(path)
    if not steps:
        raise ConfigError(f"command line: {run}: has no rollouts yet")
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise ConfigError(f"command line: --step: {wanted} has no rollouts; this run has {steps[0]} to {steps[-1]}")
    heads = index_step(path, wanted)
    if listing:
        for line in list_groups(heads):
            say(line)
        return
    if not heads:
        raise ConfigError(f"command line: --step: {wanted} holds no rollout; name another")
    head = choose_group(heads, group, "best" if best else "worst" if worst else "mixed")
    print_group(read_group(path, head), wanted, tint)
