"""Parts for tests of the loop: letters as tasks, groups with given rewards, a runner that finishes in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.core.admission import Admission
from shoal.core.collect import Collector, GroupRules
from shoal.core.prompts import Buffer, PromptStream
from shoal.core.types import Completion, Message, Prompt, Rollout, RolloutGroup, Span, Task, Turn
from shoal.envs.base import SingleTurn, ask

Rewards = Callable[[Prompt], Sequence[float | None]]


class Letters(SingleTurn):
    """Task i asks for the number i. Tasks in `long` have text that does not fit."""

    def __init__(self, size: int, name: str = "letters", long: Sequence[int] = (), size_eval: int = 0) -> None:
        self.name = name
        sizes = {"train": size, "eval": size_eval}
        self._tasks = {
            split: [ask(f"{split} {i}" + "x" * 100 * (i in long), answer=i) for i in range(count)]
            for split, count in sizes.items()
        }

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks[split]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 0.0


def fits(messages: Sequence[Message]) -> bool:
    return len(messages[-1]["content"]) < 50


def make_stream(
    size: int = 1000, seed: int = 0, buffer: Buffer | None = None, long: Sequence[int] = ()
) -> PromptStream:
    return PromptStream({"letters": Letters(size, long=long)}, {"letters": 1.0}, seed, fits, buffer)


def make_turn(
    tokens: Sequence[int] = (3, 4),
    version: int = 0,
    finish: str = "stop",
    logprobs: Sequence[float] | None = None,
    prompt_ids: Sequence[int] = (1, 2),
) -> Turn:
    logprobs = [-0.5] * len(tokens) if logprobs is None else list(logprobs)
    completion = Completion("r", list(tokens), logprobs, [Span(0, len(tokens), version)], finish, "ab")  # type: ignore[arg-type]
    return Turn(list(prompt_ids), completion)


def make_prompt(index: int = 0, epoch: int = 0, env: str = "letters") -> Prompt:
    return Prompt(env, index, [{"role": "user", "content": f"train {index}"}], "train", epoch)


def make_group(
    prompt: Prompt, rewards: Sequence[float | None], version: int = 0, turn: Turn | None = None
) -> RolloutGroup:
    """One rollout per reward. None is a rollout whose reward failed."""
    rollouts = []
    for index, reward in enumerate(rewards):
        status = "ok" if reward is not None else "error"
        answer = [*prompt.messages, {"role": "assistant", "content": "ab"}]
        rollouts.append(
            Rollout(prompt, index, [turn or make_turn(version=version)], status, reward, reward, messages=answer)
        )
    return RolloutGroup(prompt, rollouts, version)


@dataclass
class ShuffledRunner:
    """Finishes each prompt after a random number of iterations of the event loop, so groups finish in any order."""

    rewards: Rewards
    seed: int = 0
    slowest: int = 12
    version: int = 0  # the version that the sampler serves; the test syncs it like the loop
    dispatched: list[Prompt] = field(default_factory=list)
    finished: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def __call__(self, prompt: Prompt) -> RolloutGroup:
        self.dispatched.append(prompt)
        drawn_with = self.version
        for _ in range(self._random.randrange(self.slowest) + 1):
            await asyncio.sleep(0)
        self.finished.append(prompt)
        return make_group(prompt, self.rewards(prompt), drawn_with)


def make_collector(
    rewards: Rewards, admission: Admission, rules: GroupRules | None = None, seed: int = 0, size: int = 1000
) -> tuple[Collector, ShuffledRunner]:
    runner = ShuffledRunner(rewards, seed)
    return Collector(runner, make_stream(size), admission, rules or GroupRules()), runner


def mixed(prompt: Prompt) -> Sequence[float]:
    return [0.0, 1.0]


def every_third_flat(prompt: Prompt) -> Sequence[float]:
    return [0.0, 0.0] if prompt.index % 3 == 0 else [0.0, 1.0]
