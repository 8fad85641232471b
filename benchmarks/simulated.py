"""A simulated engine and a simulated policy with fixed delays, and the real loop around them.

For the costs and gains of scheduling without a model: runner, collector, loop, records and run directory are real. A
request uses one of the engine's slots for its delay, and an optimizer step takes its delay. With the wall clock, the
work of the loop itself counts. The virtual clock jumps to the next event.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules
from shoal.core.learn import Learner, LearnSettings
from shoal.core.loop import Loop
from shoal.core.prompts import PromptStream
from shoal.core.protocols import Judge
from shoal.core.runner import GroupRunner, RunnerSettings
from shoal.core.state import LoopSettings, Parts, SaveCadence
from shoal.core.types import Completion, Message, Request, Row, SamplingParams, Score, Span, Task
from shoal.envs.base import SingleTurn, TaskList, ask
from shoal.rollout.weight_channels import InProcessWeights
from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir, read_metrics
from shoal.signals.advantages import AdvantageNormalizer
from shoal.watch.console import BaseConsole, make_console
from shoal.watch.observer import Phases, RunObserver, Sinks
from shoal.watch.watchdog import Watchdog

Seconds = Callable[[Request], float]
PROMPT_TOKENS = 64
NEVER_S = 3600.0
WORDS, MOST_TOKENS = 997, 4096
LETTERS = "".join(chr(97 + n * n * 7 % 26) for n in range(WORDS + MOST_TOKENS))


def now_s() -> float:
    return asyncio.get_running_loop().time()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next event instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_NeverWaiting(self))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs immediately and takes no time, because a virtual clock cannot wait for a thread."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


class _NeverWaiting(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self._loop.now_s += timeout
        return super().select(0 if timeout is not None else None)


class SimulatedEngine:
    """Implements RolloutEngine. Each request takes its delay in one of `slots`. Versions loaded meanwhile are in its
    spans, by the share of the time that each version served.
    """

    path, activity, opening = "simulated", "", ""

    def __init__(self, slots: int, seconds: Seconds, tokens: int = 64) -> None:
        self.version = 0
        self.busy_s = 0.0  # summed over slots
        self.most_open = 0
        self._seconds = seconds
        self._tokens = tokens
        self._slots = asyncio.Semaphore(slots)
        self._open = 0
        self._loads: list[tuple[float, int]] = [(0.0, 0)]

    async def generate(self, request: Request) -> Completion:
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            async with self._slots:
                started = now_s()
                await asyncio.sleep(self._seconds(request))
                ended = now_s()
        finally:
            self._open -= 1
        self.busy_s += ended - started
        at = request.sampling.seed % WORDS  # answers differ and take no time, because the engine is not measured
        text = LETTERS[at : at + self._tokens]
        spans = self._spans(started, ended)
        return Completion(request.request_id, list(text.encode()), [-0.5] * len(text), spans, "stop", text)

    def _spans(self, started: float, ended: float) -> list[Span]:
        served = [version for at, version in self._loads if at <= started][-1]
        marks = [(0, served)]
        for at, version in self._loads:
            if started < at < ended:
                marks.append((int(self._tokens * (at - started) / (ended - started)), version))
        ends = [start for start, _ in marks[1:]] + [self._tokens]
        return [Span(start, end, version) for (start, version), end in zip(marks, ends, strict=True) if end > start]

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        self.version = version
        self._loads = [*self._loads[-16:], (now_s(), version)]
        return f"simulated-{version}"

    async def connect(self) -> None: ...

    async def describe(self) -> dict[str, Any]:
        return {}

    async def rest(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> dict[str, Any]:
        return {"ok": True, "version": self.version}

    async def close(self) -> None: ...


@dataclass
class SimulatedPolicy:
    """Implements Policy: an optimizer step takes its delay without blocking the event loop, and changes nothing."""

    seconds: float
    shares_prefixes: bool = True
    passes_together: bool = False
    busy_s: float = 0.0

    def logprobs(self, rows: Sequence[Row]) -> SimulatedResults:
        return SimulatedResults([row.sampler_logprobs for row in rows])

    def reference_logprobs(self, rows: Sequence[Row]) -> SimulatedResults:
        return self.logprobs(rows)

    def forward_backward(self, rows: Sequence[Row], objective: Any, mismatch_from: Any = "old") -> SimulatedResults:
        return self.logprobs(rows)

    def discard_gradient(self) -> None: ...

    def optim_step(self) -> Mapping[str, float]:
        return {"optim/lr": 0.0, "optim/skipped": 0.0, "optim/grad_norm": 1.0}

    async def on_device(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function == self.optim_step:
            started = now_s()
            await asyncio.sleep(self.seconds)
            self.busy_s += now_s() - started
        return function(*arguments)


@dataclass
class SimulatedResults:
    rows: list[np.ndarray]

    def read(self) -> tuple[Mapping[str, tuple[float, float]], list[np.ndarray]]:
        return {"policy/loss": (0.0, 0.0)}, self.rows


class NoFiles:
    """A policy without weights saves nothing."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


class Characters:
    """Implements the runner's Tokens: one id per character."""

    def prompt_ids(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [ord(letter) % 128 for message in messages for letter in str(message["content"])]

    def message(self, prompt_ids: Any, completion: Any, tools: Any = None) -> Message:
        return {"role": "assistant", "content": completion.text}

    def next_prompt_ids(self, so_far: Any, messages: Any, following: Any, tools: Any = None) -> list[int]:
        raise NotImplementedError("episodes of this environment have one turn")


class Vowels(SingleTurn):
    """The reward is the share of vowels in the answer."""

    name = "vowels"

    def tasks(self, split: str) -> Sequence[Task]:
        return TaskList(1_000_000, lambda index: ask(f"{index:>{PROMPT_TOKENS}}"))

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        answer = str(messages[-1]["content"])
        return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


@dataclass
class InstantJudge:
    """Implements Judge in this process, to measure scheduling without rewards."""

    environment: Vowels = field(default_factory=Vowels)

    async def score(self, env: str, split: str, index: int, messages: Sequence[Message]) -> Score:
        return Score("ok", self.environment.reward(self.environment.tasks(split)[index], messages))

    async def score_group(
        self, env: str, split: str, index: int, conversations: Sequence[Sequence[Message]]
    ) -> list[Score]:
        return [await self.score(env, split, index, messages) for messages in conversations]

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Shape:
    """The simulated run: rollouts per step and group, steps, and delays."""

    batch: int
    group: int
    steps: int
    train_s: float
    seconds: Seconds
    slots: int | None = None  # by default the batch: the rollouts of a step run together
    tokens: int = 64
    level: int = 0


@dataclass
class Outcome:
    wall_s: float
    rollouts: int  # trained, as the run directory has it
    sampler_idle: float  # share of slot time without a request
    trainer_idle: float
    most_open: int

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts / self.wall_s


def simulate(shape: Shape, folder: Path, judge: Judge | None = None, *, virtual: bool = False) -> Outcome:
    """The real loop in a real run directory. The time starts at the first dispatch and ends at the last record."""
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else None) as runner:
        return runner.run(_simulate(shape, folder, judge or InstantJudge()))


async def _simulate(shape: Shape, folder: Path, judge: Judge) -> Outcome:
    slots = shape.slots or shape.batch
    engine, policy = SimulatedEngine(slots, shape.seconds, shape.tokens), SimulatedPolicy(shape.train_s)
    with (
        RunDir.create(folder, "train: {}\n", {}) as run_dir,
        contextlib.closing(make_console(io.StringIO())) as console,
    ):
        loop = make_loop(shape, engine, policy, judge, (run_dir, console))
        started = now_s()
        await loop.run()
        wall_s = now_s() - started
        await loop.parts.collector.cancel()
        trained = sum(int(line["batch/used"]) for line in read_metrics(folder))
    return Outcome(
        wall_s,
        trained,
        1 - engine.busy_s / (slots * wall_s),
        1 - policy.busy_s / wall_s,
        engine.most_open,
    )


def make_loop(
    shape: Shape, engine: SimulatedEngine, policy: SimulatedPolicy, judge: Judge, around: tuple[RunDir, BaseConsole]
) -> Loop:
    environment, phases = Vowels(), Phases()
    run_dir, console = around
    events = EventLog(run_dir)
    runner = GroupRunner(engine, {"vowels": environment}, judge, Characters(), RunnerSettings(4096))
    stream = PromptStream({"vowels": environment}, {"vowels": 1.0}, 0, lambda _: True)
    sampling = SamplingParams(max_tokens=shape.tokens)

    async def run_group(prompt: Any) -> Any:
        return await runner.run(prompt, shape.group, sampling, phases)

    admission = Admission(shape.batch, shape.group, 1, shape.level, last_step=shape.steps)
    rules = GroupRules(uniform="keep", deadline_s=NEVER_S)
    settings = LearnSettings(token_budget=8192, aggregation="token-mean", max_tokens=shape.tokens)
    parts = Parts(
        engine=engine,
        weights=InProcessWeights(),
        collector=Collector(run_group, stream, admission, rules),
        stream=stream,
        learner=Learner(policy, AdvantageNormalizer(std="none"), None, settings, policy.on_device),
        files=NoFiles(),
        evaluator=None,
        store=run_dir,
        observer=RunObserver(console, events, Watchdog(run_dir.logs, events), Sinks(run_dir)),
        phases=phases,
        on_device=policy.on_device,
        token_text=chr,
    )
    return Loop(parts, LoopSettings(shape.steps, SaveCadence(0)))
