"""A step in one line, and the words that both consoles share."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.observability.text import count, duration, short_number

_SHARES = (
    ("gen", "rollout"), ("rew", "reward"), ("train", "train"), ("sync", "sync"), ("eval", "eval"), ("save", "save"),
)  # fmt: skip
_SIGNALS = (("k3", "mismatch/k3"), ("ent", "policy/entropy"), ("gn", "optim/grad_norm"))
# The words of a line and the metrics they stand for; `shoal explain` takes them too.
WORDS = {
    "reward": "reward/mean",
    "loss": "sft/loss",
    "used": "batch/used",
    "flat": "group/flat",
    "mixed": "group/mixed_frac",
    "len": "completion/length_mean",
    "trunc": "completion/truncated_frac",
    **dict(_SIGNALS),
    "stale": "staleness/max",
    "tok/s": "throughput/rollout_tok_s",
    **{word: f"time/{phase}" for word, phase in (*_SHARES, ("idle", "idle"))},
}


def step_line(step: int, total: int, metrics: Mapping[str, float], left_s: float | None = None) -> str:
    """A step in one line; what was not measured is not mentioned."""
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
    """Share of the step each phase took, in whole per cents and reading order, without what took none.

    Phases that overlap add up to more than the step; they are shown by their part of that sum, so that a line never
    comes to more than 100 %. The metrics time/* have the seconds.
    """
    step_s = metrics.get("time/step", 0.0)
    if step_s <= 0:
        return []
    shares = {word: metrics.get(f"time/{phase}", 0.0) / step_s for word, phase in (*_SHARES, ("idle", "idle"))}
    scale = 100 / max(1.0, sum(shares.values()))
    whole = {word: int(share * scale) for word, share in shares.items()}
    # What rounding down left over goes to those that lost most by it.
    left = round(sum(shares.values()) * scale) - sum(whole.values())
    for word in sorted(shares, key=lambda word: whole[word] - shares[word] * scale)[:left]:
        whole[word] += 1
    return [(word, per_cent / 100) for word, per_cent in whole.items() if per_cent]


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
    return f"loss {metrics['sft/loss']:.3f}" if "sft/loss" in metrics else ""


def _used(metrics: Mapping[str, float]) -> str:
    if "batch/used" in metrics and "batch/rollouts" in metrics:
        text = f"used {metrics['batch/used']:.0f}/{metrics['batch/rollouts']:.0f}"
        return f"{text}, {count(round(metrics['group/flat']), 'group')} flat" if metrics.get("group/flat") else text
    return f"mixed {metrics['group/mixed_frac']:.0%}" if "group/mixed_frac" in metrics else ""


def _length(metrics: Mapping[str, float]) -> str:
    if "completion/length_mean" not in metrics:
        return ""
    text = f"len {short_number(metrics['completion/length_mean'])}"
    truncated = metrics.get("completion/truncated_frac")
    return text if truncated is None else f"{text} trunc {truncated:.0%}"
