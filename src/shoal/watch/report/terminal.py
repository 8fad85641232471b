"""Rollouts in the terminal, for `shoal show`: choose a group, print its completions with coloured tokens.

Control characters in model text are replaced first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from shoal.core.errors import ConfigError
from shoal.watch.report.rollouts import GroupHead
from shoal.watch.text import drop_text, one_line, sanitise, short_number

UP, DOWN, UNSURE = (0, 114, 178), (213, 94, 0), (176, 125, 0)  # as on the page; safe for colour-blind readers


def choose_group(heads: Sequence[GroupHead], wanted: str | None, default: str) -> GroupHead:
    """By number or prompt id; otherwise the best, the worst or the first mixed group."""
    if wanted is not None:
        if wanted.isdigit() and 1 <= int(wanted) <= len(heads):
            return heads[int(wanted) - 1]
        named = [head for head in heads if wanted in (head.group, head.prompt_id)]
        if not named:
            raise ConfigError(
                f"command line: --group: {wanted} is not in this step; it has groups 1 to {len(heads)} (--list)"
            )
        return named[0]
    scored = [head for head in heads if head.mean is not None]
    if default != "mixed" and scored:
        pick = max if default == "best" else min
        return pick(scored, key=lambda head: head.mean or 0.0)
    mixed = [head for head in heads if len({r for r in head.rewards if r is not None}) > 1]
    return (mixed or list(heads))[0]


def list_groups(heads: Sequence[GroupHead]) -> Iterator[str]:
    for number, head in enumerate(heads, start=1):
        rewards = " ".join("–" if reward is None else short_number(reward) for reward in head.rewards)
        dropped = f"  (dropped: {drop_text(head.drop_reason)})" if head.drop_reason else ""
        yield f"{number:>4}  {head.prompt_id}  {one_line(head.preview, 48)}  [{rewards}]{dropped}"


def print_group(group: dict[str, Any], step: int, tint: str, console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    title = f"step {step}, {group['prompt_id'] or group['group']}"
    console.print(Rule(Text(sanitise(title)), align="left"))
    console.print(Text(sanitise(group["prompt"])))
    if group["drop_reason"]:
        console.print(Text(f"dropped: {drop_text(group['drop_reason'])}", style="yellow"))
    largest = max((abs(rollout["advantage"] or 0.0) for rollout in group["rollouts"]), default=0.0)
    for number, rollout in enumerate(group["rollouts"], start=1):
        console.print(Rule(_title(number, rollout), align="left", style="bright_black"))
        if rollout["error"]:
            console.print(Text(sanitise(rollout["error"]), style="yellow"))
        console.print(colored_completion(rollout, tint, largest))


def _title(number: int, rollout: dict[str, Any]) -> Text:
    title = Text(f"{number}")
    if rollout["reward"] is not None:
        title.append(f"  reward {short_number(rollout['reward'])}", style="bold")
    for name, value in rollout["parts"].items():
        title.append(f"  {sanitise(name)} {short_number(value) if value is not None else '–'}")
    if rollout["advantage"] is not None:
        title.append(f"  advantage {rollout['advantage']:+.2f}")
    if rollout["status"] != "ok":
        title.append(f"  {sanitise(rollout['status'])}", style="yellow")
    return title.append("  truncated", style="yellow") if rollout["truncated"] else title


def colored_completion(rollout: dict[str, Any], tint: str, largest: float = 1.0) -> Text:
    """The completion. Tokens that the policy did not sample are dim. `largest` advantage has the full colour."""
    tokens = rollout["tokens"]
    if tokens is None:
        return Text(sanitise(rollout["completion"]) or "(empty)")
    text = Text()
    for i, piece in enumerate(tokens["text"]):
        style = _style(rollout, tokens, i, tint, largest) if tokens["mask"][i] else "bright_black italic"
        text.append(sanitise(piece), style=style)
    if tokens["left_out"]:
        text.append(f" … {tokens['left_out']} more tokens", style="bright_black")
    return text


def _style(rollout: dict[str, Any], tokens: dict[str, Any], i: int, tint: str, largest: float) -> str:
    sampler = tokens["sampler"][i] if tokens["sampler"] else None
    policy = tokens["policy"][i] if tokens["policy"] else None
    if tint == "advantage" and rollout["advantage"] is not None:
        return _background(UP if rollout["advantage"] > 0 else DOWN, abs(rollout["advantage"]) / (largest or 1.0))
    if tint == "logprob" and sampler is not None:
        return _background(UNSURE, -sampler / 4)
    if tint == "ratio" and sampler is not None and policy is not None:
        return _background(UP if policy > sampler else DOWN, abs(policy - sampler) / 0.5)
    return ""


def _background(colour: tuple[int, int, int], share: float) -> str:
    """White text on `colour`, mixed with a dark background in proportion to `share`."""
    share = min(1.0, share) if math.isfinite(share) else 1.0
    if share < 0.05:
        return ""
    mixed = tuple(round(40 + (channel - 40) * share) for channel in colour)
    return f"white on rgb({mixed[0]},{mixed[1]},{mixed[2]})"
