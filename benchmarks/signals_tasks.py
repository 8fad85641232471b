"""The tasks of benchmarks/signals.py: a code of letters belongs to each of eight keys, and the policy learns the codes.

The runs load these environments by name. `warm_up_rows` writes the supervised examples from which every run starts: the
model then answers with random letters, and repeats an answer that the prompt contains.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from shoal.core.types import Message, Reward, Task
from shoal.envs.base import MultiTurn, SingleTurn, ask

LETTERS = "abcdefgh"
KEYS = "ABCDEFGH"
TALK = 32  # letters of the second turn
NEXT = "go on"


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(count))


def with_hint(prompt: str, answer: str) -> str:
    """The prompt as a teacher sees it."""
    return f"{prompt}\n\n{hint(answer)}"


def hint(answer: str) -> str:
    return f"The answer is {answer}."


def answers(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


class _Codes:
    """One task per key. There is nothing to hold out: the codes are random, so each one must be learnt."""

    max_reward = 1.0

    def __init__(self, length: int, seed: int = 0) -> None:
        rng = random.Random(f"codes/{length}/{seed}")
        self._tasks = [ask(key, answer=letters(rng, length)) for key in KEYS]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    def solution(self, task: Task) -> str:
        return task.data["answer"]


def share(answer: str, task: Task) -> float:
    """The share of places with the right letter."""
    wanted = task.data["answer"]
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(answer), len(wanted))


class Exact(_Codes, SingleTurn):
    """All letters must be right."""

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(answers(messages)[-1] == task.data["answer"])


class Share(_Codes, SingleTurn):
    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return share(answers(messages)[-1], task)


class Feedback(Exact):
    """The reward comes with the right answer as a hint, which only the teacher sees."""

    def reward(self, task: Task, messages: Sequence[Message]) -> Reward:
        return Reward(total=super().reward(task, messages), hint=hint(task.data["answer"]))


class FirstTurn(_Codes, MultiTurn):
    """The first answer is scored. The second one is talk, on which the reward does not depend."""

    max_turns = 2

    async def reply(self, task: Task, messages: Sequence[Message]) -> str:
        return NEXT

    def reward(self, task: Task, messages: Sequence[Message]) -> Reward:
        first, *others = answers(messages)
        return Reward(turns=[share(first, task), *(0.0 for _ in others)])


class ChanceTurn(FirstTurn):
    """The reward of the second turn is chance: a coin that depends on its whole text."""

    max_reward = 2.0

    def reward(self, task: Task, messages: Sequence[Message]) -> Reward:
        first, *others = answers(messages)
        coins = [float(random.Random(other).random() < 0.5) for other in others]
        return Reward(parts={"first": share(first, task), "chance": sum(coins)}, turns=[share(first, task), *coins])


class Ranked(_Codes, SingleTurn):
    """A judge that can only compare: the reward is the share of the other answers of the group that are worse.
    `quality` is recorded without a weight."""

    max_reward = None
    weights = {"quality": 0.0}

    def reward_group(self, task: Task, conversations: Sequence[Sequence[Message]]) -> list[dict[str, float]]:
        found = [share(answers(messages)[-1], task) for messages in conversations]
        return [{"judge": self.judge(value, found), "quality": value} for value in found]

    def judge(self, value: float, group: Sequence[float]) -> float:
        return sum(other < value for other in group) / max(1, len(group) - 1)


class Constant(Ranked):
    """A judge that gives every answer the same grade."""

    def judge(self, value: float, group: Sequence[float]) -> float:
        return 1.0


class AnyOf(_Codes, SingleTurn):
    """Many right answers: as many letters as the code has, each of which is one of four that the key allows."""

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        answer, code = answers(messages)[-1], task.data["answer"]
        allowed = random.Random(f"{task.messages[0]['content']}/{code}").sample(LETTERS, 4)
        return sum(letter in allowed for letter in answer) / max(len(answer), len(code))


def warm_up_rows(seed: int, count: int, length: int, hinted: float) -> Iterator[str]:
    """Conversations in the format of the tasks, with random answers. A share `hinted` has the answer in the prompt, and
    half of the others have the second turn of `FirstTurn`."""
    rng = random.Random(f"warm-up/{seed}/{hinted}")
    for _ in range(count):
        answer, prompt = letters(rng, length), rng.choice(KEYS)
        talk = rng.random() < 0.5
        if rng.random() < hinted:
            prompt, talk = with_hint(prompt, answer), False
        yield _conversation(prompt, answer, *([NEXT, letters(rng, TALK)] if talk else []))


def solved_rows(environment: Exact, count: int) -> Iterator[str]:
    """For the teacher: every key with its code, again and again."""
    tasks = environment.tasks("train")
    for number in range(count):
        task = tasks[number % len(tasks)]
        yield _conversation(task.messages[0]["content"], environment.solution(task))


def _conversation(*texts: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": messages}) + "\n"
