"""`shoal explain`: the glossary. What a metric means, where it is healthy and what to change."""

from __future__ import annotations

from shoal.cli.output import say
from shoal.errors import ConfigError
from shoal.observability.catalogue import CATALOGUE, FAMILIES, Metric, find_metric, nearest_metrics
from shoal.observability.step_line import WORDS


def explain(metric: str | None = None) -> None:
    """Say what a metric means; without a name, list them all.

    Parameters
    ----------
    metric
        Its name, such as mismatch/k3 or eval/gsm8k/mean, or a word of the step line, such as ent; names of TRL and
        verl are known too.
    """
    if metric is None:
        for entry in [*CATALOGUE.values(), *FAMILIES.values()]:
            say(f"{entry.name:<28} {entry.meaning}")
        return
    found = find_metric(metric) or find_metric(WORDS.get(metric, "")) or _by_other_name(metric)
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
        lines.append(f"  otherwise: {metric.change}")
    return lines


def _by_other_name(name: str) -> Metric | None:
    """A name that a TRL or verl dashboard uses."""
    from shoal.observability.sinks.names import SCHEMES, alias

    for scheme in SCHEMES:
        for metric in CATALOGUE.values():
            other = alias(scheme, metric.name)
            if name in (other, other.removeprefix("train/")):
                return metric
    return None
