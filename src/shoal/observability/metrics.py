"""The tally that reduces the metrics of a step, once. Their names and meanings are in catalogue.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shoal.observability.catalogue import Metric, require_metric, sort_metrics


class Tally:
    """Collects what happened during a step and reduces it once. What got no data is absent from the result."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._values: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a mean. A count of 0 says that the totals are summed as they are; 0 of 0 is no data for a mean."""
        metric = self._claim(name, self._sums)
        if count == 0 and total == 0 and not metric.summed:
            return
        seen_total, seen_count = self._sums.get(name, (0.0, 0.0))
        if name in self._sums and (count == 0) != (seen_count == 0):
            raise ValueError(f"{name} is added once with a count and once without one")
        self._sums[name] = (seen_total + float(total), seen_count + float(count))

    def add_all(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, count) in pairs.items():
            self.add(name, total, count)

    def mean(self, name: str, values: Iterable[float]) -> None:
        """Add values to a mean; no values, no change."""
        values = [float(value) for value in values]
        if values:
            self.add(name, sum(values), len(values))

    def max(self, name: str, value: float) -> None:
        self._claim(name, self._maxima)
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def value(self, name: str, value: float) -> None:
        """Set a value; the last one counts."""
        self._claim(name, self._values)
        self._values[name] = float(value)

    def values(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.value(name, value)

    def reduce(self) -> dict[str, float]:
        """Name → value, in the order of the catalogue."""
        sums = {name: total / count if count else total for name, (total, count) in self._sums.items()}
        return sort_metrics({**sums, **self._maxima, **self._values})

    def state(self) -> dict[str, Any]:
        """As plain data, for a process that goes on with it."""
        return {"sums": dict(self._sums), "maxima": dict(self._maxima), "values": dict(self._values)}

    def take(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what another process collected."""
        self.add_all({name: (total, count) for name, (total, count) in state["sums"].items()})
        for name, value in state["maxima"].items():
            self.max(name, value)
        self.values(state["values"])

    def _claim(self, name: str, kind: dict[str, Any]) -> Metric:
        metric = require_metric(name)
        if any(name in other for other in (self._sums, self._maxima, self._values) if other is not kind):
            raise ValueError(f"{name} is collected in two different ways")
        return metric
