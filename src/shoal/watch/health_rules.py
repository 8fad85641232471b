"""Health rules: when a metric indicates a problem, for how many steps in a row, and what to change.

The thresholds follow the healthy ranges of the glossary. A rule sees one step and its history and reads no files.
Used by health.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.watch import glossary
from shoal.watch.glossary import CATALOGUE

Row = dict[str, float]
WINDOW = 20  # steps of history for a rule
FIRST_STEPS = 5  # their mean is the start value of a metric
# Healthy while above this share of the start value. The charts draw the same limits.
SHARE_OF_START = {"policy/entropy": 0.1, "completion/length_mean": 0.25}


@dataclass(frozen=True, slots=True)
class History:
    """The steps before the current one, and the configuration as plain data."""

    first: Sequence[Row]  # the first steps with the metric of the rule
    recent: Sequence[Row]  # the last WINDOW steps, the current one last
    config: Mapping[str, Any]

    def start(self, metric: str) -> float | None:
        """Mean over the first FIRST_STEPS steps; None before that."""
        values = [row[metric] for row in self.first if metric in row]
        return sum(values) / len(values) if len(values) >= FIRST_STEPS else None

    def setting(self, path: str) -> Any:
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True, slots=True)
class RuleMatch:
    words: str
    severity: float  # larger is worse; comparable within one rule
    remedy: str = ""  # replaces the remedy of the rule


Judge = Callable[[Row, History], RuleMatch | None]


@dataclass(frozen=True, slots=True)
class Rule:
    check: str
    metric: str
    judge: Judge
    remedy: str
    patience: int = 3  # measured steps in a row
    level: str = "warning"


def _above(metric: str, limit: float, words: str) -> Judge:
    def judge(row: Row, _: History) -> RuleMatch | None:
        value = row[metric]
        return RuleMatch(words.format(value=value, limit=limit), value) if value > limit else None

    return judge


def _skip_with_noise(judge: Judge) -> Judge:
    """No finding while QeRL noise is on the sampler: then its log-probs differ from the trainer's on purpose."""

    def judged_without_noise(row: Row, history: History) -> RuleMatch | None:
        return judge(row, history) if row.get("noise/sigma", 0.0) <= 0 else None

    return judged_without_noise


def _skip_with_teacher(judge: Judge) -> Judge:
    """No finding with a teacher: it gives a signal to groups whose rewards are equal, too."""
    return lambda row, history: judge(row, history) if "teacher/kl" not in row else None


def _wasted_tokens(row: Row, _: History) -> RuleMatch | None:
    value = row["tokens/used_frac"]
    return RuleMatch(f"only {value:.0%} of the sampled tokens were trained", -value) if value < 0.5 else None


def _reward_flat(row: Row, _: History) -> RuleMatch | None:
    if row["reward/std"] >= 1e-9:
        return None
    good, bad = row.get("group/all_good_frac", 0.0), row.get("group/all_bad_frac", 0.0)
    remedy = glossary.HARDER_PROMPTS if good > bad else ""
    return RuleMatch("all rewards of the step are equal, so there is nothing to learn from", 0.0, remedy)


def _entropy_collapse(row: Row, history: History) -> RuleMatch | None:
    """Only for sampled text. In supervised training a low entropy is the goal."""
    if any(name in row for name in glossary.SUPERVISED_LOSSES):
        return None
    value, start = row["policy/entropy"], history.start("policy/entropy")
    if start is not None and start > 0 and (value < SHARE_OF_START["policy/entropy"] * start or value < 0.005):
        return RuleMatch(
            f"entropy collapsed from {start:.3g} to {value:.3g}: the policy repeats the same output", -value
        )
    return None


def _length_collapse(row: Row, history: History) -> RuleMatch | None:
    value, start = row["completion/length_mean"], history.start("completion/length_mean")
    if start is not None and start >= 8 and value < SHARE_OF_START["completion/length_mean"] * start:
        return RuleMatch(f"completions shrank from {start:.0f} to {value:.0f} tokens", -value)
    return None


def _length_blow_up(row: Row, history: History) -> RuleMatch | None:
    value, start = row["completion/length_mean"], history.start("completion/length_mean")
    cut = row.get("completion/truncated_frac", 0.0)
    if start is not None and value > 3 * start and cut > 0.2:
        return RuleMatch(
            f"completions grew from {start:.0f} to {value:.0f} tokens and {cut:.0%} of them are truncated", value
        )
    return None


def _reward_errors(row: Row, _: History) -> RuleMatch | None:
    failed, late = row["reward/error_frac"], row.get("reward/timeout_frac", 0.0)
    if failed + late <= 0.02:
        return None
    return RuleMatch(f"rewards fail: {failed:.0%} of the rollouts had an error and {late:.0%} a timeout", failed + late)


def _few_useful_groups(row: Row, _: History) -> RuleMatch | None:
    mixed = row["group/mixed_frac"]
    if mixed >= 0.2:
        return None
    good, bad = row.get("group/all_good_frac", 0.0), row.get("group/all_bad_frac", 0.0)
    if row.get("reward/error_frac", 0.0) + row.get("reward/timeout_frac", 0.0) > 0.5:
        return None  # most rewards failed: the rule reward-errors reports that
    if good == bad == 0:
        remedy = "if all groups of a task have its best reward, set orch.reward.max or max_reward of the environment"
        return RuleMatch(f"only {mixed:.0%} of the groups have different rewards", -mixed, remedy)
    side, remedy = ("too easy", glossary.HARDER_PROMPTS) if good > bad else ("too hard", glossary.EASIER_PROMPTS)
    share = f"only {mixed:.0%}" if mixed else "none"
    words = f"{share} of the groups have different rewards: prompts are {side} ({good:.0%} all good, {bad:.0%} all bad)"
    return RuleMatch(words, -mixed, remedy)


def _idle(row: Row, _: History) -> RuleMatch | None:
    step_s = row.get("time/step", 0.0)
    share = row["time/idle"] / step_s if step_s > 0 else 0.0
    return RuleMatch(f"the run is idle for {share:.0%} of the step", share) if share > 0.25 else None


def _reward_fell(row: Row, history: History) -> RuleMatch | None:
    """The reward is far below the best of the recent steps, and below its start value."""
    values = [r["reward/mean"] for r in history.recent if "reward/mean" in r]
    start = history.start("reward/mean")
    if start is None or len(values) < WINDOW:
        return None
    best, now = max(values[: WINDOW // 2]), sum(values[-5:]) / 5
    if now < start and best - now > 0.3 * max(abs(best), abs(start)):
        return RuleMatch(
            f"the reward fell from {best:.3g} to {now:.3g}, below its start value of {start:.3g}", best - now
        )
    return None


def _inert_clip(row: Row, history: History) -> RuleMatch | None:
    """With one optimizer step per batch every ratio is 1, so clipping has no effect for any bounds."""
    train = history.setting("train") or {}
    one_update = train.get("ppo_epochs", 1) == 1 and train.get("minibatches", 1) == 1
    fresh = not row.get("staleness/max")
    if len(history.recent) < WINDOW or not one_update or not fresh:
        return None
    if any(r.get("policy/clip_frac", 0.0) > 0 for r in history.recent):
        return None
    return RuleMatch(
        "the clip bounds of the loss have no effect: with one optimizer step per batch every ratio is 1", 0.0
    )


def _inert_cap(row: Row, history: History) -> RuleMatch | None:
    values = [r["correction/capped_frac"] for r in history.recent if "correction/capped_frac" in r]
    if len(values) < WINDOW or any(values):
        return None
    return RuleMatch("the cap of train.loss.correction has no effect: no weight reaches it", 0.0)


RULES: tuple[Rule, ...] = (
    Rule(
        "masked",
        "masked",
        _above(
            "masked", 0.5, "the loss masks {value:.0%} of the tokens: the policy is far from the one that sampled them"
        ),
        CATALOGUE["masked"].change,
    ),
    Rule(
        "truncated",
        "completion/truncated_frac",
        _above("completion/truncated_frac", 0.5, "{value:.0%} of the completions are truncated at the length limit"),
        glossary.LONGER,
    ),
    Rule(
        "mixed",
        "group/mixed_frac",
        _skip_with_teacher(_few_useful_groups),
        f"too hard: {glossary.EASIER_PROMPTS}; too easy: {glossary.HARDER_PROMPTS}",
    ),
    Rule(
        "mismatch",
        "mismatch/k3",
        _skip_with_noise(
            _above(
                "mismatch/k3",
                0.01,
                "sampler and trainer log-probs differ: k3 is {value:.2g}, healthy is below {limit:g}",
            )
        ),
        CATALOGUE["mismatch/k3"].change,
    ),
    Rule("entropy", "policy/entropy", _entropy_collapse, glossary.MORE_ENTROPY),
    Rule(
        "length-collapse",
        "completion/length_mean",
        _length_collapse,
        "read rollouts (`shoal show RUN`): the reward may favour short completions; lower train.learning_rate or add "
        "train.loss.kl.beta",
    ),
    Rule("length-blow-up", "completion/length_mean", _length_blow_up, glossary.LONGER),
    Rule(
        "kl",
        "policy/kl_ref",
        _above("policy/kl_ref", 0.2, "the policy is far from its reference: KL is {value:.2g} nats"),
        CATALOGUE["policy/kl_ref"].change,
    ),
    Rule(
        "reward-errors", "reward/error_frac", _reward_errors, f"{glossary.FIX_REWARD}; or raise orch.reward.timeout_s"
    ),
    Rule("reward-flat", "reward/std", _skip_with_teacher(_reward_flat), glossary.EASIER_PROMPTS),
    Rule(
        "wasted-tokens",
        "tokens/used_frac",
        _wasted_tokens,
        glossary.WASTED,
        patience=10,
        level="notice",
    ),
    Rule("reward-fell", "reward/mean", _reward_fell, f"{glossary.LOWER_RATE}, and continue from an earlier checkpoint"),
    Rule("idle", "time/idle", _idle, CATALOGUE["time/idle"].change),
    Rule(
        "skipped",
        "optim/skipped",
        _above("optim/skipped", 0.0, "the gradient was not finite, so the optimizer step was skipped"),
        CATALOGUE["optim/skipped"].change,
        patience=1,
    ),
    Rule(
        "ratio",
        "mismatch/ratio_max",
        _skip_with_noise(
            _above(
                "mismatch/ratio_max",
                100.0,
                "one token is {value:.3g} times as likely under the trainer as under the sampler",
            )
        ),
        CATALOGUE["mismatch/ratio_max"].change,
    ),
    Rule(
        "inert-clip",
        "policy/clip_frac",
        _inert_clip,
        "nothing, or set train.ppo_epochs or train.minibatches above 1 if you want clipping",
        patience=1,
        level="notice",
    ),
    Rule(
        "inert-cap", "correction/capped_frac", _inert_cap, "lower train.loss.correction.cap, or remove it", 1, "notice"
    ),
)
