"""User code found through PYTHONPATH: environments, rewards, losses, advantages and filters."""

from __future__ import annotations

import os
import signal
import time
from difflib import SequenceMatcher
from pathlib import Path

from shoal.envs import MultiTurn, SingleTurn, answer_of, ask
from shoal.envs.registry import load_environment

REVERSE_ARGS = {"system_prompt": "Reverse.", "min_len": 3, "max_len": 6, "num_train": 200, "num_eval": 20}
WORDS = ("tide", "kelp", "reef", "foam", "gull", "sand", "crab", "salt", "wave", "rock")


class TwoWords(MultiTurn):
    """Reverse two words; half of the reward each."""

    max_turns = 2

    def tasks(self, split):
        return [ask(first, system="Reverse.", second=second) for first in WORDS for second in WORDS if first != second]

    async def reply(self, task, messages):
        return task.data["second"]

    def reward(self, task, messages):
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        words = [task.messages[-1]["content"], task.data["second"]]
        scores = [likeness(answer, word) for answer, word in zip(answers, words, strict=False)]
        return {"first": scores[0] / 2, "second": (scores[1] if len(scores) > 1 else 0.0) / 2}


class Solved(SingleTurn):
    """Every answer is right, or every answer is wrong."""

    def __init__(self, right: bool = True) -> None:
        self._right = right

    def tasks(self, split):
        return [ask(f"{word}?", system="Reverse.") for word in WORDS]

    def reward(self, task, messages):
        return float(self._right)


def likeness(answer: str, word: str) -> float:
    found = answer.split("<reversed_text>")[-1].split("</reversed_text>")[0]
    return SequenceMatcher(None, found, word[::-1]).ratio()


def digits(task, messages):
    """The share of digits, which random weights sometimes write and can learn."""
    text = messages[-1]["content"]
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def flaky_reward(task, messages):
    """The first letter of the prompt decides: a tenth each hangs, raises, ends the process or returns nothing."""
    kind = ord(task.data["answer"][-1]) % 10
    if kind == 0:
        time.sleep(3600)
    if kind == 1:
        raise ValueError("this prompt cannot be judged")
    if kind == 2:
        os._exit(3)
    if kind == 3:
        return None
    return likeness(answer_of(messages), task.data["answer"][::-1])


def slow_reward(task, messages):
    time.sleep(0.05)
    return likeness(answer_of(messages), task.data["answer"][::-1])


def always_broken_reward(completion):
    return lookup({}, completion)


def lookup(table, key):
    return table["the key"]


def hanging_reward(task, messages):
    time.sleep(3600)


def server_killing_reward(task, messages):
    """Kills the reward server in the first call of a run, and suspends the keeper above it."""
    marker = Path("server-killed").absolute()
    if not marker.exists():
        marker.touch()
        keeper = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGSTOP)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return likeness(answer_of(messages), task.data["answer"][::-1])


_calls = 0


def nan_loss(inputs, at=()):
    """A policy gradient that is nan at the calls named in `at`, or at every call."""
    global _calls
    _calls += 1
    loss = -inputs.policy_logprobs * inputs.advantages
    return loss * float("nan") if _calls in at or not at else loss


def hanging_loss(inputs):
    time.sleep(3600)


def best_minus_rest(groups_rewards):
    """The best rollouts of a group get 1, the others -1."""
    return [[1.0 if reward == max(group) else -1.0 for reward in group] for group in groups_rewards]


def not_too_good(group):
    return sum(group.rewards) / len(group.rewards) < 0.3


def raises(*args):
    raise KeyError("nothing here")


def one_number(*args):
    return 1.0


class Leaky(SingleTurn):
    """Puts a secret into prompts and into error messages."""

    def tasks(self, split):
        return [ask(f"{word} {os.environ['SHOP_API_KEY']}", system="Reverse.") for word in WORDS]

    def reward(self, task, messages):
        if task.messages[-1]["content"].startswith("reef"):
            raise ValueError(f"could not judge {task.messages[-1]['content']}")
        return len(answer_of(messages)) / 20


class NoJudge(SingleTurn):
    """An environment without a reward."""

    def tasks(self, split):
        return [ask(f"{word}?") for word in WORDS]


def broken_reward(task, messages):
    raise KeyError(f"no column {messages[-1]['content'][:3]}")


def patient_with_held_out(task, messages):
    """Held-out rewards wait for the file `go` in the run folder. The file `evaluating` shows that one waits."""
    environment = load_environment("reverse-text", REVERSE_ARGS)
    held_out = {task.messages[-1]["content"] for task in environment.tasks("eval")}
    while task.messages[-1]["content"] in held_out and not Path("go").exists():
        Path("evaluating").touch()
        time.sleep(0.01)
    return likeness(answer_of(messages), task.data["answer"][::-1])
