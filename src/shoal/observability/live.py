"""The console of a terminal: a block that redraws itself, with notes and warnings scrolling by above it."""

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

from shoal.observability.console import Bar, BaseConsole, Progress, SafeStream
from shoal.observability.redact import redact
from shoal.observability.step_line import is_eval_mean, time_shares
from shoal.observability.text import duration, one_line, sanitise, short_number, size, sparkline

_SHARE_COLOURS = {
    "gen": "blue",
    "rew": "yellow",
    "train": "magenta",
    "sync": "cyan",
    "eval": "green",
    "idle": "bright_black",
}


class LiveConsole(BaseConsole):
    """`memory`, if given, tells the memory in use in words; by default it is this process's own."""

    def __init__(self, stream: TextIO, *, every: int = 1, heartbeat_s: float = 30.0) -> None:
        self._rich = RichConsole(file=cast(TextIO, SafeStream(stream)), highlight=False)
        self._live: Live | None = None
        self._over = False  # the block that stays says nothing of now
        self._title = ""
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=512)
        self._evals: dict[str, tuple[float, float]] = {}  # environment → first and latest mean
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
        if self._live is not None or quiet:  # one live region at a time: inside training the block holds the bar
            bar = Bar(total)
            with self._going_on(description, bar):
                yield bar
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = RichProgress(*columns, console=self._rich, transient=False)
        with self._going_on(description, None), shown as bar:
            task = bar.add_task(Text(one_line(description)).plain.replace("[", r"\["), total=total)
            yield _Bar(bar, task)
            if total is None:
                bar.update(task, total=1, completed=1)

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guard:
            self._metrics = dict(metrics)
            self._last_shown = time.monotonic()
            if "reward/mean" in metrics:
                self._rewards.append(metrics["reward/mean"])
            elif "sft/loss" in metrics:
                self._rewards.append(metrics["sft/loss"])
            for name in filter(is_eval_mean, metrics):
                env = name.split("/")[1]
                first = self._evals.get(env, (metrics[name], 0.0))[0]
                self._evals[env] = (first, metrics[name])

    def _show_heartbeat(self) -> None:
        if self._live is None:  # the block ticks by itself; before it starts a line has to do
            super()._show_heartbeat()

    def _print(self, text: str) -> None:
        self._say(Text(text))

    def _say(self, text: Text) -> None:
        """Under rich's own lock, never under ours: whoever draws the block holds that one, and asks for this."""
        self._last_shown = time.monotonic()
        self._rich.print(text)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._over = True
            self._live.stop()  # draws the block once more, for good
            self._live = None

    def block(self) -> RenderableType:
        """The block as it stands now."""
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
            label = "reward" if "sft/loss" not in metrics else "loss"
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
        """What is going on: a bar where its length is known, what the sampler does, and for how long."""
        text = Text(style="bright_black")
        if self._bar is not None and self._bar.total:
            share = min(1.0, self._bar.done / self._bar.total)
            text.append("━" * round(24 * share), style="cyan").append("━" * (24 - round(24 * share)))
            text.append(f" {self._bar}  ")
        facts = [fact for fact in (self.activity(), duration(time.monotonic() - self._since)) if fact]
        return text.append(f"{self._waiting} ({', '.join(facts)})")

    def _details(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, Text]]:
        groups = (("mixed", "group/mixed_frac"), ("all good", "group/all_good_frac"), ("all bad", "group/all_bad_frac"))
        mix = "   ".join(f"{word} {metrics[name]:.0%}" for word, name in groups if name in metrics)
        if mix:
            yield "groups", _mix_bar([metrics.get(name, 0.0) for _, name in groups]).append(mix)
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
            yield "length", Text(f"{metrics['completion/length_mean']:.0f} tokens each   {cut:.0%} truncated")
        rates = (("rollout", "throughput/rollout_tok_s"), ("training", "throughput/train_tok_s"))
        speed = "   ".join(f"{word} {short_number(metrics[name])} tok/s" for word, name in rates if name in metrics)
        if speed:
            yield "speed", Text(speed)


class _Bar:
    def __init__(self, bar: RichProgress, task) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)


def _mix_bar(shares: list[float], width: int = 16) -> Text:
    """Mixed, all good, all bad as one bar; what is left over (too few scored) is a gap."""
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
    """Resident memory of this process, from /proc where there is one."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return "unknown"
    return f"{size(pages * 4096)} host"


def device_memory() -> str:
    """What torch holds on a GPU in use. Only counters: a call into CUDA could disturb a capture."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    held, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
    return f"{size(held)} GPU (peak {size(most)} in use)"
