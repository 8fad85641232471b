"""Numbers as they are found in files of a run: finite, or nothing."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None; metrics spell NaN and infinities out as words."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
