"""What every loss, correction and KL estimator is called, which knobs it has, and what they default to. Pure data.

The schema reads it to refuse a knob that the chosen loss does not use, `shoal.algorithms` to check its own values, the
documentation to list them. The formulas are in `shoal.algorithms` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ParamValue = float | str | None
ParamKind = Literal["float", "choice"]

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean")
STATISTICS = ("group", "batch", "none")  # what an advantage's mean and std are taken over
ADVANTAGE_EPS = 1e-6


def keeps_uniform(mean: str, std: str) -> bool:
    """Whether groups of equal rewards take part: they move batch statistics. A group std would divide them by eps."""
    return "batch" in (mean, std) and std != "group"


@dataclass(frozen=True)
class ParamSpec:
    """One knob. `default` None means unset, unless `same_as` names the knob whose value it then takes."""

    name: str
    default: ParamValue
    kind: ParamKind = "float"
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False  # the bound itself is not allowed
    choices: tuple[str, ...] = ()
    same_as: str | None = None
    only_with: tuple[str, str] | None = None  # (knob, value) without which this one does nothing

    def problem(self, value: object) -> str | None:
        """Why `value` cannot be used, or None if it can."""
        if value is None:
            return None if self.default is None else "needs a value"
        if self.kind == "choice":
            return None if value in self.choices else f"must be one of {', '.join(self.choices)}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return "must be a finite number"
        below = value <= self.low if self.low_open else value < self.low
        return f"must be {self.range_text}" if below or value > self.high else None

    @property
    def range_text(self) -> str:
        """The allowed values in words, as `> 0, <= 1`."""
        if self.kind == "choice":
            return " | ".join(self.choices)
        low = "" if self.low == -math.inf else f"{'>' if self.low_open else '>='} {self.low:g}"
        high = "" if self.high == math.inf else f"<= {self.high:g}"
        return ", ".join(part for part in (low, high) if part) or "any number"


@dataclass(frozen=True)
class PartSpec:
    """Something chosen by `type:`, with its knobs. `ordered` names pairs whose first must be below the second."""

    name: str
    summary: str
    params: tuple[ParamSpec, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()

    def param(self, name: str) -> ParamSpec | None:
        return next((param for param in self.params if param.name == name), None)

    @property
    def defaults(self) -> dict[str, ParamValue]:
        return {param.name: param.default for param in self.params}

    def resolve(self, given: Mapping[str, ParamValue]) -> dict[str, ParamValue]:
        """Every knob with its value: what was given, else the default, else the knob it follows."""
        values = {**self.defaults, **given}
        for param in self.params:
            if values[param.name] is None and param.same_as is not None:
                values[param.name] = values[param.same_as]
        return values

    def problems(self, given: Mapping[str, ParamValue]) -> dict[str, str]:
        """Knob → why it is refused; empty if everything given can be used."""
        found: dict[str, str] = {}
        for name, value in given.items():
            param = self.param(name)
            reason = f"is not used by {self.name}" if param is None else param.problem(value)
            if reason is not None:
                found[name] = reason
        return found or {**self._inert(given), **self._crossed(given)}

    def _inert(self, given: Mapping[str, ParamValue]) -> dict[str, str]:
        values = self.resolve(given)
        wanted = {p.name: p.only_with for p in self.params if p.name in given and p.only_with is not None}
        return {
            name: f"has no effect unless {knob} is {value}"
            for name, (knob, value) in wanted.items()
            if values[knob] != value
        }

    def _crossed(self, given: Mapping[str, ParamValue]) -> dict[str, str]:
        values = self.resolve(given)
        found: dict[str, str] = {}
        for low_name, high_name in self.ordered:
            low, high = values[low_name], values[high_name]
            if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
                found[low_name if low_name in given else high_name] = f"{low_name} must be below {high_name}"
        return found


@dataclass(frozen=True)
class LossSpec(PartSpec):
    """A policy loss: its knobs and what may be combined with it."""

    takes_kl: bool = False
    takes_correction: bool = True
    default_aggregation: str = "token-mean"
    default_advantage_std: str = "group"
    needs_old: bool = False  # `recompute_old: auto` takes a forward for it
    uses_ratio: bool = True  # clamps the log of a policy ratio, so ratio_log_cap has an effect

    def aggregation(self, given: Mapping[str, ParamValue]) -> str:
        """The aggregation when none was set; for `masked` it follows ratio_type."""
        if self.resolve(given).get("ratio_type") == "sequence":
            return "seq-mean-token-mean"
        return self.default_aggregation


def _clip(low: float, high: float | None) -> tuple[ParamSpec, ...]:
    return (
        ParamSpec("clip_low", low, low=0, high=1, low_open=True),
        ParamSpec("clip_high", high, low=0, low_open=True, same_as=None if high is not None else "clip_low"),
    )


def _ratio_bounds(prefix: str, low: float | None, high: float | None) -> tuple[ParamSpec, ...]:
    # The bounds straddle 1: a policy that equals the sampler is never clipped or dropped.
    return ParamSpec(f"{prefix}_low", low, low=0, high=1), ParamSpec(f"{prefix}_high", high, low=1)


_DUAL_CLIP = ParamSpec("dual_clip", None, low=1, low_open=True)

_LOSSES = (
    LossSpec("grpo", "clipped policy gradient, optionally with a KL penalty", _clip(0.2, None), takes_kl=True),
    LossSpec(
        "importance_sampling",
        "ratio-weighted policy gradient, optionally with bounds on the ratio",
        _ratio_bounds("ratio", None, None),
        (("ratio_low", "ratio_high"),),
        takes_kl=True,
    ),
    LossSpec(
        "reinforce",
        "plain policy gradient, corrected by the stop-gradient ratio to the sampler",
        (ParamSpec("ratio", "on", kind="choice", choices=("on", "none")),),
        takes_kl=True,
        takes_correction=False,
    ),
    LossSpec("dapo", "clipped policy gradient with more room upwards", (*_clip(0.2, 0.28), _DUAL_CLIP)),
    LossSpec(
        "dro",
        "log-prob times advantage with a quadratic pull to the old policy",
        (ParamSpec("quad_beta", 0.05, low=0),),
        uses_ratio=False,
    ),
    LossSpec(
        "gspo",
        "clipping by the whole sequence's geometric-mean ratio",
        _clip(3e-4, 4e-4),
        default_aggregation="seq-mean-token-mean",
        needs_old=True,
    ),
    LossSpec(
        "cispo",
        "policy gradient weighted by a clipped, stop-gradient ratio; no token loses its gradient",
        _ratio_bounds("ratio", 0.0, 4.0),
        (("ratio_low", "ratio_high"),),
    ),
    LossSpec(
        "decoupled",
        "clipping against the old policy, weighting against the sampler, for stale rollouts",
        (*_clip(0.4, 0.4), ParamSpec("cap", 5.0, low=1), _DUAL_CLIP),
        takes_correction=False,
        needs_old=True,
    ),
    LossSpec(
        "masked",
        "ratio-weighted policy gradient that drops tokens and rollouts which drifted too far",
        (
            ParamSpec("ratio_type", "token", kind="choice", choices=("token", "sequence")),
            ParamSpec("adv_tau", 1.0, low=0),
            ParamSpec("kl_tau", 0.0, low=0),
            *_ratio_bounds("token_mask", 0.125, 8.0),
            *_ratio_bounds("geo_mask", 0.1, 10.0),
            *_ratio_bounds("sequence_mask", 0.0, 100.0),
            ParamSpec("sequence_clip_high", 10.0, low=0, low_open=True, only_with=("ratio_type", "sequence")),
        ),
        (
            ("token_mask_low", "token_mask_high"),
            ("geo_mask_low", "geo_mask_high"),
            ("sequence_mask_low", "sequence_mask_high"),
        ),
        takes_correction=False,
        default_advantage_std="none",
        uses_ratio=False,
    ),
    LossSpec(
        "dppo",
        "drops tokens whose probability moved too far from the sampler's, with a quadratic pull",
        (
            ParamSpec("mask_low", 0.2, low=0, high=1),
            ParamSpec("mask_high", 0.2, low=0, high=1),
            ParamSpec("kl_tau", 1e-3, low=0),
        ),
        takes_correction=False,
    ),
    LossSpec(
        "sapo",
        "a soft gate instead of a clip: the gradient fades as the ratio leaves 1",
        (ParamSpec("tau_pos", 1.0, low=0, low_open=True), ParamSpec("tau_neg", 1.05, low=0, low_open=True)),
    ),
)

LOSS_ALIASES: dict[str, str] = {"ppo": "grpo"}
LOSS_CATALOGUE: dict[str, LossSpec] = {spec.name: spec for spec in _LOSSES}
LOSS_CATALOGUE.update({alias: LOSS_CATALOGUE[name] for alias, name in LOSS_ALIASES.items()})

CORRECTION_CATALOGUE: dict[str, PartSpec] = {
    "none": PartSpec("none", "no correction: w = 1"),
    "tis": PartSpec(
        "tis",
        "the ratio of old policy to sampler, capped from above",
        (
            ParamSpec("cap", 5.0, low=0, low_open=True),
            ParamSpec("level", "token", kind="choice", choices=("token", "sequence")),
        ),
    ),
    "icepop": PartSpec(
        "icepop",
        "the ratio of old policy to sampler inside [floor, cap], zero outside",
        (ParamSpec("floor", 0.5, low=0, high=1), ParamSpec("cap", 5.0, low=1)),
    ),
}

KL_ESTIMATORS: dict[str, str] = {
    "k1": "d; only in the reward, since as a loss its gradient is zero-mean noise",
    "k2": "d²/2",
    "k3": "exp(-d) + d - 1, never negative",
    "k3-unbiased": "rho·k3, unbiased when the rollouts are off policy",
}
KL_PLACES: dict[str, tuple[str, ...]] = {"loss": ("k3", "k2", "k3-unbiased"), "reward": ("k1",)}  # first = default

# Products of ratios collapse with length: above this max_tokens, `masked` with ratio_type sequence gives a notice.
SEQUENCE_PRODUCT_NOTICE_TOKENS = 64
