"""Watches that every part named in `orch.reward.parts` exists: a weight on a misspelt one would do nothing."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.errors import ConfigError

# Scores of every environment before a part counts as missing: a reward may leave a part out now and then.
ENOUGH = 8


class PartCheck:
    def __init__(self, wanted: Iterable[str], environments: Iterable[str]) -> None:
        self._missing = set(wanted)
        self._scored = Counter(dict.fromkeys(environments, 0))
        self._seen: set[str] = set()

    def note(self, env: str, parts: Mapping[str, float]) -> None:
        """One scored rollout. Raises once it is clear that a part does not exist."""
        if not self._missing:
            return
        self._seen |= set(parts)
        self._missing -= set(parts)
        self._scored[env] += 1
        if min(self._scored.values()) >= ENOUGH:
            self._refuse()

    def _refuse(self) -> None:
        if not self._missing:
            return
        name = sorted(self._missing)[0]
        near = difflib.get_close_matches(name, sorted(self._seen), n=1)
        there = f"there are {', '.join(sorted(self._seen))}" if self._seen else "the rewards have no parts"
        hint = f"did you mean `{near[0]}`?" if near else "remove it"
        raise ConfigError(f"orch.reward.parts.{name}: no reward has such a part; {there}; {hint}")
