"""The console for a terminal: a block that is redrawn in place; messages and warnings scroll above it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from shoal.runs.secrets import redact
from shoal.watch.console import Bar, BaseConsole, Progress, SafeStream
from shoal.watch.glossary import SUPERVISED_LOSSES
from shoal.watch.text import duration, is_eval_mean, one_line, sanitise, short_number, size, sparkline, time_shares

_SHARE_COLOURS = {
    "gen": "blue",
    "rew": "yellow",
    "train": "magenta",
    "sync": "cyan",
    "eval": "green",
    "idle": "bright_black",
}


class LiveConsole(BaseConsole):
    """`memory` returns the memory in use as text; by default the resident memory of this process."""

    def __init__(self, stream: TextIO, *, every: int = 1, heartbeat_s: float = 30.0) -> None:
        self._rich = RichConsole(file=cast(TextIO, SafeStream(stream)), highlight=False)
        self._live: Live | None = None
        self._over = False  # after the end the block has no "now" row
        self._title = ""
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=512)
        self._evals: dict[str, tuple[float, float]] = {}  # environment → first and last mean
        self.memory: Callable[[], str] = host_memory
        super().__init__(stream, every=every, heartbeat_s=heartbeat_s)

    def begin(self, title: str, total_steps: int, first_step: int = 0) -> None:
        self._title = one_line(redact(title))
        self._total, self._step = total_steps, first_step
        self._pace.start(first_step)
        self._over = False
        self._live = Live(console=self._rich, get_renderable=self.block, refresh_per_second=2, transient=False)
        self._live.start()

    def close(self) -> None:
        super().close()
        self._stop_live()

    def closing(self, lines: list[str] | tuple[str, ...]) -> None:
        self._bar = None
        self._stop_live()
        super().closing(lines)

    def note(self, text: str) -> None:
        self._say(Text(sanitise(redact(text))))

    def warn(self, text: str) -> None:
        self._say(Text.assemble(("warning ", "bold yellow"), sanitise(redact(text))))

    @contextmanager
    def progress(self, description: str, total: float | None = None, *, quiet: bool = False) -> Iterator[Progress]:
        if self._live is not None or quiet:  # rich allows one live region, so the block shows the bar during training
            bar = Bar(total)
            with self._operation(description, bar):
                yield bar
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = RichProgress(*columns, console=self._rich, transient=False)
        with self._operation(description, None), shown as bar:
            task = bar.add_task(Text(one_line(description)).plain.replace("[", r"\["), total=total)
            yield _RichBar(bar, task)
            if total is None:
                bar.update(task, total=1, completed=1)

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guard:
            self._metrics = dict(metrics)
            self._last_shown = time.monotonic()
            if "reward/mean" in metrics:
                self._rewards.append(metrics["reward/mean"])
            for name in SUPERVISED_LOSSES:
                if name in metrics:
                    self._rewards.append(metrics[name])
            for name in filter(is_eval_mean, metrics):
                env = name.split("/")[1]
                first = self._evals.get(env, (metrics[name], 0.0))[0]
                self._evals[env] = (first, metrics[name])

    def _show_heartbeat(self) -> None:
        if self._live is None:  # the block updates by itself; before it starts, print a line
            super()._show_heartbeat()

    def _print(self, text: str) -> None:
        self._say(Text(text))

    def _say(self, text: Text) -> None:
        """Takes only rich's lock: the drawing thread takes that lock and then ours, so the reverse order deadlocks."""
        self._last_shown = time.monotonic()
        self._rich.print(text)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._over = True
            self._live.stop()  # draws the block a last time
            self._live = None

    def block(self) -> RenderableType:
        """The current block."""
        with self._guard:
            metrics, table = self._metrics, Table.grid(padding=(0, 2))
            table.add_column(style="bright_black", no_wrap=True)
            table.add_column()
            for label, value in self._lines(metrics):
                table.add_row(label, value)
            title = Text(f" {self._title} ", style="bold")
            return Panel(Group(table), title=title, title_align="left", box=box.ROUNDED, border_style="bright_black")

    def _lines(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, Text]]:
        left = self._pace.left(self._total)
        eta = f"   eta {duration(left)}" if left is not None and self._step < self._total else ""
        yield "step", Text(f"{self._step}/{self._total}{eta}", style="bold")
        if self._rewards:
            label = "loss" if any(name in metrics for name in SUPERVISED_LOSSES) else "reward"
            yield label, Text(f"{self._rewards[-1]:.3f}  {sparkline(list(self._rewards))}", style="green")
        for env, (first, latest) in self._evals.items():
            yield "held out", Text(f"{env} {first:.3f} → {latest:.3f}")
        yield from self._details(metrics)
        shares = time_shares(metrics)
        if shares:
            yield "time", _share_bar(shares)
        yield "memory", Text("   ".join(filter(None, (self.memory(), device_memory()))))
        if not self._over:
            yield "now", self._now()

    def _now(self) -> Text:
        """The current operation: a bar if its length is known, the work of the sampler, and the elapsed time."""
        text = Text(style="bright_black")
        if self._bar is not None and self._bar.total:
            share = min(1.0, self._bar.done / self._bar.total)
            text.append("━" * round(24 * share), style="cyan").append("━" * (24 - round(24 * share)))
            text.append(f" {self._bar}  ")
        details = [part for part in (self.activity(), duration(time.monotonic() - self._since)) if part]
        return text.append(f"{self._waiting} ({', '.join(details)})")

    def _details(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, Text]]:
        groups = ("group/mixed_frac", "group/all_good_frac", "group/all_bad_frac")
        if groups[0] in metrics:
            mixed, good, bad = (metrics.get(name, 0.0) for name in groups)
            text = f"mixed {mixed:.0%}   zero-variance: all good {good:.0%}, all bad {bad:.0%}"
            yield "groups", _mix_bar([mixed, good, bad]).append(text)
        signals = (
            ("k3", "mismatch/k3"),
            ("entropy", "policy/entropy"),
            ("grad norm", "optim/grad_norm"),
            ("KL", "policy/kl_ref"),
            ("lr", "optim/lr"),
        )
        policy = "   ".join(f"{word} {short_number(metrics[name])}" for word, name in signals if name in metrics)
        if policy:
            yield "policy", Text(policy)
        stale = [f"mean {short_number(metrics[n])}" for n in ("staleness/mean",) if n in metrics]
        stale += [f"max {short_number(metrics[n])}" for n in ("staleness/max",) if n in metrics]
        if "masked" in metrics or stale:
            masked = f"masked {metrics['masked']:.1%}   " if "masked" in metrics else ""
            yield "trained", Text(f"{masked}{'staleness ' + ', '.join(stale) if stale else ''}")
        if "completion/length_mean" in metrics:
            cut = metrics.get("completion/truncated_frac", 0.0)
            yield "length", Text(f"mean {metrics['completion/length_mean']:.0f} tokens   {cut:.0%} truncated")
        rates = (("rollout", "throughput/rollout_tok_s"), ("training", "throughput/train_tok_s"))
        speed = "   ".join(f"{word} {short_number(metrics[name])} tok/s" for word, name in rates if name in metrics)
        if speed:
            yield "speed", Text(speed)


class _RichBar:
    def __init__(self, bar: RichProgress, task) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)


def _mix_bar(shares: list[float], width: int = 16) -> Text:
    """Shares of mixed, all-good and all-bad groups as one bar. Groups with too few rewards leave a gap."""
    bar = Text()
    for share, colour in zip(shares, ("cyan", "green", "red"), strict=True):
        bar.append("█" * round(width * share), style=colour)
    return bar.append(" " * max(1, width + 2 - len(bar)))


def _share_bar(shares: list[tuple[str, float]], width: int = 32) -> Text:
    total = sum(share for _, share in shares)
    bar = Text()
    for word, share in shares:
        bar.append("█" * max(1, round(width * share / total)), style=_SHARE_COLOURS[word])
    for word, share in shares:
        bar.append(f"  {word} {share:.0%}", style=_SHARE_COLOURS[word])
    return bar


def host_memory() -> str:
    """Resident memory of this process from /proc, if available."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return "unknown"
    return f"{size(pages * 4096)} host"


def device_memory() -> str:
    """GPU memory of torch, from its counters only: a CUDA call could disturb the capture of a graph."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    reserved, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    return f"{size(reserved)} GPU (peak {size(peak)} in use)"
