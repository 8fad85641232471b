"""Every built-in environment, and one written by a user, satisfies the contract of `protocols.Environment`."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.protocols import Environment
from shoal.envs import MultiTurn, Task, answer_of, ask
from shoal.envs.datasets import DatasetSpec, fingerprint
from shoal.envs.items import ItemEnvironment
from shoal.envs.registry import load_environment
from shoal.rewards.outcome import call, read_outcome

GENERATED = {
    "reverse-text": {},
    "reverse-text short": {"min_len": 3, "max_len": 8},
    "arithmetic": {},
    "arithmetic 2": {"level": 2, "operations": "+-*"},
    "arithmetic 3": {"level": 3, "operations": "-"},
    "arithmetic 4": {"level": 4, "operations": "+-*", "seed": 3},
    "arithmetic 5": {"level": 5, "operations": ["+", "*"]},
    "countdown": {},
    "countdown long": {"min_numbers": 5, "max_numbers": 6, "format_reward": 0},
    "reasoning-gym:chain_sum": {},
    "reasoning-gym:spell_backward": {"max_word_len": 6},
}
GSM8K_ROWS = [
    {"question": f"What is {n} plus {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n:,}"}
    for n in range(900, 940)
]
DATASET_ROWS = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Guess(MultiTurn):
    max_turns = 3

    def tasks(self, split: str) -> list[Task]:
        numbers = range(5) if split == "train" else range(5, 10)
        return [ask(f"Guess the number after {n - 1}.", answer=n) for n in numbers]

    async def reply(self, task, messages):
        return None if answer_of(messages) == str(task.data["answer"]) else "No. Again."

    def reward(self, task, messages):
        return float(answer_of(messages) == str(task.data["answer"]))

    def solution(self, task):
        return str(task.data["answer"])


class Item:
    def __init__(self, number: int) -> None:
        self.prompt = f"Write {number}."
        self.number = number

    def get_reward(self, completion: str) -> float:
        return float(completion == str(self.number))


class Items(ItemEnvironment):
    def solution(self, task):
        return str(self._items[task.data["split"]][task.data["item"]].number)


@pytest.fixture(params=[*GENERATED, "gsm8k", "reverse-text dataset", "dataset", "multi-turn", "items"])
def environment(request, tmp_path) -> Environment:
    kind: str = request.param
    if kind in GENERATED:
        return load_environment(kind.split()[0], {**GENERATED[kind], "num_train": 60, "num_eval": 30})
    if kind == "gsm8k":
        write_rows(tmp_path / "train.jsonl", GSM8K_ROWS[:30])
        write_rows(tmp_path / "test.jsonl", GSM8K_ROWS[30:])
        return load_environment("gsm8k", {"path": str(tmp_path)})
    if kind == "multi-turn":
        return Guess()
    if kind == "items":
        return Items([Item(n) for n in range(20)], [Item(n) for n in range(20, 30)])
    spec = DatasetSpec(path=write_rows(tmp_path / "rows.jsonl", DATASET_ROWS))
    if kind == "reverse-text dataset":
        return load_environment("reverse-text", dataset=spec)
    environment = load_environment("dataset", {"reward": "exact"}, dataset=spec)
    environment.solution = lambda task: task.data["answer"]  # type: ignore[attr-defined]
    return environment


def reward_of(environment, task: Task, answer: str) -> float | None:
    messages = [*task.messages, {"role": "assistant", "content": answer}]
    return read_outcome(call(environment.reward, task, messages), getattr(environment, "weights", {}))[0]


def test_both_splits_have_tasks_and_indices_are_bounded(environment):
    for split in ("train", "eval"):
        tasks = environment.tasks(split)
        assert len(tasks) > 0
        assert tasks[-1] == tasks[len(tasks) - 1]
        with pytest.raises(IndexError):
            tasks[len(tasks)]
        assert len(list(tasks)) == len(tasks)


def test_tasks_are_the_same_each_time(environment):
    for split in ("train", "eval"):
        assert fingerprint(environment.tasks(split)) == fingerprint(environment.tasks(split))


def test_train_and_eval_are_disjoint(environment):
    asked = {split: {json.dumps(task.messages) for task in environment.tasks(split)} for split in ("train", "eval")}
    assert not asked["train"] & asked["eval"]


def test_messages_are_chat_messages_and_tasks_survive_json(environment):
    for task in environment.tasks("train")[:20]:
        assert task.messages[-1]["role"] == "user"
        assert all(message["content"] for message in task.messages)
        assert json.loads(json.dumps([task.messages, task.data])) == [task.messages, task.data]


def test_known_solution_earns_the_full_reward(environment):
    for split in ("train", "eval"):
        for task in environment.tasks(split)[:30]:
            assert reward_of(environment, task, environment.solution(task)) == 1.0


@pytest.mark.parametrize(
    "answer", ["", " ", "I do not know.", "</answer><answer>", "\\boxed{", "\0\x1b[31m", "9" * 5000]
)
def test_useless_answer_has_no_full_reward_and_does_not_raise(environment, answer):
    for task in environment.tasks("eval")[:5]:
        reward = reward_of(environment, task, answer)
        assert reward is not None and 0 <= reward < 1


def test_episode_keeps_the_conversation_and_is_used_once(environment):
    task = environment.tasks("train")[0]
    episode = environment.start(task)
    assert episode.messages == task.messages
    assert asyncio.run(episode.reply(environment.solution(task))) is None
    assert episode.messages == [*task.messages, {"role": "assistant", "content": environment.solution(task)}]
    with pytest.raises(RuntimeError, match="ended"):
        asyncio.run(episode.reply("again"))
    assert environment.tasks("train")[0] == task, "the task itself must not change"


def test_tasks_are_the_same_in_another_process():
    program = (
        "from shoal.envs.registry import load_environment as load\n"
        "from shoal.envs.datasets import fingerprint\n"
        f"for key, args in {GENERATED!r}.items():\n"
        "    env = load(key.split()[0], {**args, 'num_train': 20, 'num_eval': 20})\n"
        "    print(fingerprint(env.tasks('train')), fingerprint(env.tasks('eval')))\n"
    )
    outputs = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        outputs.append(
            subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        )
    assert outputs[0].stdout == outputs[1].stdout
    assert len(set(outputs[0].stdout.split())) == 2 * len(GENERATED)
