"""`gsm8k`: grade-school word problems, from a local folder or the Hugging Face hub; graded as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from shoal.core.errors import ConfigError, DataError
from shoal.core.types import Message, Task
from shoal.envs.base import SingleTurn, ask
from shoal.envs.datasets import DatasetSpec, read_splits
from shoal.rewards import math_parser
from shoal.rewards.outcome import answer_of

INSTRUCTION = "Think step by step, then give the final number as \\boxed{number}."
HUB_NAME = "openai/gsm8k:main"
GOLD = re.compile(r"####\s*(-?[\d,]+(?:\.\d+)?)\s*$")


class Gsm8k(SingleTurn):
    """Grade-school word problems, graded as numbers."""

    name = "gsm8k"
    max_reward = 1.0

    def __init__(
        self,
        path: Annotated[
            str | None,
            Field(description="folder with `train.jsonl` and `test.jsonl`; unset = `openai/gsm8k` from the hub"),
        ] = None,
        instruction: Annotated[str, Field(description="replaces the sentence after each question")] = INSTRUCTION,
        dataset: DatasetSpec | None = None,
    ) -> None:
        if path and dataset:
            raise ConfigError("gsm8k: set args.path or dataset, not both")
        spec = dataset or DatasetSpec(path=path, name=None if path else HUB_NAME)
        columns = {"prompt": "question", "answer": "answer", **spec.columns}
        # The dataset on the hub has two configurations, so the name must include one.
        name = HUB_NAME if spec.name == HUB_NAME.partition(":")[0] else spec.name
        self._dataset = DatasetSpec(spec.path, name, spec.split, columns, spec.max_rows)
        self._instruction = instruction
        self._splits: dict[str, list[Task]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if self._splits is None:
            self._splits = read_splits(self._dataset, ("prompt", "answer"), self._task)
        if split not in self._splits:
            raise ConfigError(f"gsm8k: unknown split {split!r}; the splits are train and eval")
        return self._splits[split]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        correct, _ = math_parser.process_results(answer_of(messages), str(task.data["answer"]))
        return float(correct)

    def prepare(self) -> None:
        math_parser.prepare()

    def solution(self, task: Task) -> str:
        return f"{task.data['solution']}\n\\boxed{{{task.data['answer']}}}"

    def _task(self, row: Mapping[str, Any]) -> Task:
        worked, gold = str(row["answer"]), GOLD.search(str(row["answer"]))
        if gold is None:
            raise DataError("the answer does not end in '#### number'")
        # Remove the <<48/2=24>> calculator annotations of the dataset.
        solution = re.sub(r"<<[^>]*>>", "", worked[: gold.start()]).strip()
        prompt = f"{str(row['prompt']).strip()}\n\n{self._instruction}".strip()
        return ask(prompt, answer=gold.group(1).replace(",", ""), solution=solution)
