"""Text for consoles: safe model output, short numbers, durations, sparklines, and the step line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from shoal.core.types import DROP_REASONS

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
# C0 and C1 controls except newline and tab, and characters that reorder or hide the text around them
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_BARS = "▁▂▃▄▅▆▇█"


def sanitise(text: str) -> str:
    """Remove escape sequences and replace other control characters with �, so that text cannot control the terminal."""
    return _CONTROL.sub("\ufffd", _ANSI.sub("", text))


def one_line(text: str, width: int = 200) -> str:
    line = " ".join(sanitise(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def short_number(value: float) -> str:
    """Two or three significant digits: .31, 1.2e-3, 612, 41k, 1.2M."""
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


def drop_text(reason: str) -> str:
    """The drop reason of a group in words; on disk and in queries it keeps its key."""
    return DROP_REASONS.get(reason, sanitise(reason))


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
    """The last `width` values, scaled to their minimum and maximum. Non-finite values leave a gap."""
    tail = list(values)[-width:]
    finite = [value for value in tail if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    level = len(_BARS) - 1
    return "".join(_BARS[round((v - low) / span * level)] if math.isfinite(v) else " " for v in tail)


_SHARES = (
    ("gen", "rollout"), ("rew", "reward"), ("train", "train"), ("sync", "sync"), ("eval", "eval"), ("save", "save"),
)  # fmt: skip
_SIGNALS = (("k3", "mismatch/k3"), ("ent", "policy/entropy"), ("gn", "optim/grad_norm"))
_PREFERENCE = (("acc", "dpo/accuracy"), ("margin", "dpo/margin"))
# Labels of the step line and their metrics; `shoal explain` accepts the labels.
WORDS = {
    "reward": "reward/mean",
    "loss": "sft/loss",
    "used": "batch/used",
    "zero-variance": "group/flat",
    "mixed": "group/mixed_frac",
    "len": "completion/length_mean",
    "trunc": "completion/truncated_frac",
    **dict((*_SIGNALS, *_PREFERENCE)),
    "stale": "staleness/max",
    "tok/s": "throughput/rollout_tok_s",
    **{word: f"time/{phase}" for word, phase in (*_SHARES, ("idle", "idle"))},
}


def step_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None = None) -> str:
    """A step in one line. Metrics that were not measured are left out."""
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    parts += [part for part in (_reward(metrics), _loss(metrics), _used(metrics), _length(metrics)) if part]
    parts += [" ".join(f"{word} {short_number(metrics[name])}" for word, name in _SIGNALS if name in metrics)]
    if metrics.get("masked"):
        parts.append(f"masked {metrics['masked']:.0%}")
    if metrics.get("staleness/max"):
        parts.append(f"stale {short_number(metrics['staleness/max'])}")
    if "throughput/rollout_tok_s" in metrics:
        parts.append(f"{short_number(metrics['throughput/rollout_tok_s'])} tok/s")
    parts.append(" ".join(f"{word} {share:.0%}" for word, share in time_shares(metrics)))
    parts += [f"eval {name.split('/')[1]} {metrics[name]:.3f}" for name in metrics if is_eval_mean(name)]
    if left_s is not None and step < total:
        parts.append(f"eta {duration(left_s)}")
    return "  ".join(part for part in parts if part)


def time_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The share of the step time of each phase, in whole percent, without phases that took no time.

    Overlapping phases add up to more than the step. Their shares are scaled so that the sum never exceeds 100 %. The
    metrics time/* have the seconds.
    """
    step_s = metrics.get("time/step", 0.0)
    if step_s <= 0:
        return []
    shares = {word: metrics.get(f"time/{phase}", 0.0) / step_s for word, phase in (*_SHARES, ("idle", "idle"))}
    scale = 100 / max(1.0, sum(shares.values()))
    whole = {word: int(share * scale) for word, share in shares.items()}
    # Rounding down leaves a remainder; it goes to the phases that lost most.
    left = round(sum(shares.values()) * scale) - sum(whole.values())
    for word in sorted(shares, key=lambda word: whole[word] - shares[word] * scale)[:left]:
        whole[word] += 1
    return [(word, percent / 100) for word, percent in whole.items() if percent]


def is_eval_mean(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/mean")


def _reward(metrics: Mapping[str, float]) -> str:
    if "reward/mean" not in metrics:
        return ""
    text = f"reward {metrics['reward/mean']:.3f}"
    if "reward/std" in metrics:
        text += f" ±{short_number(metrics['reward/std'])}"
    prefix = "reward/part/"
    named = [f"{n.removeprefix(prefix)} {short_number(v)}" for n, v in metrics.items() if n.startswith(prefix)]
    return f"{text} ({' '.join(named)})" if named else text


def _loss(metrics: Mapping[str, float]) -> str:
    if "dpo/loss" in metrics:
        shown = " ".join(f"{word} {short_number(metrics[name])}" for word, name in _PREFERENCE)
        return f"loss {metrics['dpo/loss']:.3f}  {shown}"
    return f"loss {metrics['sft/loss']:.3f}" if "sft/loss" in metrics else ""


def _used(metrics: Mapping[str, float]) -> str:
    if "batch/used" in metrics and "batch/rollouts" in metrics:
        text = f"used {metrics['batch/used']:.0f}/{metrics['batch/rollouts']:.0f}"
        if metrics.get("tokens/used_frac", 1.0) < 0.995:
            text += f" ({metrics['tokens/used_frac']:.0%} of tokens)"
        zero_variance = round(metrics.get("group/flat", 0))
        return f"{text}, {count(zero_variance, 'zero-variance group')}" if zero_variance else text
    return f"mixed {metrics['group/mixed_frac']:.0%}" if "group/mixed_frac" in metrics else ""


def _length(metrics: Mapping[str, float]) -> str:
    if "completion/length_mean" not in metrics:
        return ""
    text = f"len {short_number(metrics['completion/length_mean'])}"
    truncated = metrics.get("completion/truncated_frac")
    return text if truncated is None else f"{text} trunc {truncated:.0%}"
