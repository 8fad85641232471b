"""Text for people: model output made safe for a terminal, numbers made short, a row of numbers as a sparkline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
# C0 and C1 controls except newline and tab, and the characters that reorder or hide what stands around them
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_BARS = "▁▂▃▄▅▆▇█"


def sanitise(text: str) -> str:
    """Drop escape sequences and show other control characters as �, so text cannot act on a terminal."""
    return _CONTROL.sub("\ufffd", _ANSI.sub("", text))


def one_line(text: str, width: int = 200) -> str:
    flat = " ".join(sanitise(text).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def short_number(value: float) -> str:
    """About three characters of meaning: .31, 1.2e-3, 612, 41k, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15:
        return f"{value:.1e}"
    for limit, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            scaled = value / scale
            return f"{scaled:.0f}{suffix}" if abs(scaled) >= 10 else f"{scaled:.1f}{suffix}"
    if value == 0 or size >= 100:
        return f"{value:.0f}"
    if size < 0.01:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:.2f}" if size < 1 else f"{value:.3g}"
    return text.replace("0.", ".", 1) if size < 1 else text


def count(number: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """42s, 3m05, 1h12, 2d03h."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(bytes_: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if bytes_ < 1024:
            return f"{bytes_:.0f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} GiB"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values between their own least and greatest; gaps where a value is not finite."""
    tail = list(values)[-width:]
    finite = [value for value in tail if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    level = len(_BARS) - 1
    return "".join(_BARS[round((v - low) / span * level)] if math.isfinite(v) else " " for v in tail)
