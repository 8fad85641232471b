"""The environments with a dataset: `dataset` (the user's own rows) and `gsm8k` (grade-school word problems)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from shoal.core.errors import ConfigError, DataError
from shoal.core.types import Message, Task
from shoal.envs.base import SingleTurn, ask
from shoal.envs.datasets import DatasetSpec, read_splits, to_messages
from shoal.envs.user_code import load_object
from shoal.rewards import math_parser
from shoal.rewards.functions import FunctionReward, RewardFunctions
from shoal.rewards.http_judge import HttpJudge, RelativeJudge
from shoal.rewards.numeric import last_number, same_number
from shoal.rewards.outcome import answer_of

Reward = Callable[[Task, Sequence[Message]], Any]


def exact(task: Task, messages: Sequence[Message]) -> float:
    """1 if the answer equals the expected text, ignoring surrounding white space."""
    return float(answer_of(messages).strip() == str(task.data["answer"]).strip())


def numeric(task: Task, messages: Sequence[Message]) -> float:
    """1 if the last number of the answer is the expected number."""
    number = last_number(answer_of(messages))
    return float(number is not None and same_number(number, str(task.data["answer"])))


def math(task: Task, messages: Sequence[Message]) -> float:
    """1 if the \\boxed{}, #### or "answer is" answer equals the expected number or expression."""
    return float(math_parser.process_results(answer_of(messages), str(task.data["answer"]))[0])


GRADERS: dict[str, Reward] = {"math": math, "numeric": numeric, "exact": exact}
JUDGES = {"judge": HttpJudge, "relative-judge": RelativeJudge}


def _judge(reward: str, settings: Mapping[str, Any]) -> Any:
    try:
        return JUDGES[reward](**settings)
    except TypeError as error:
        raise ConfigError(f"dataset: judge: {str(error).partition(') ')[2] or error}") from None


class DatasetEnvironment(SingleTurn):
    """Prompts from your own dataset, graded against its answer column or by your function."""

    name = "dataset"

    def __init__(
        self,
        reward: Annotated[
            str,
            Field(description="`math`, `numeric`, `exact`, `judge`, `relative-judge` or `module:function`"),
        ] = "math",
        system_prompt: Annotated[str | None, Field(description="added before every prompt without one")] = None,
        judge: Annotated[
            Mapping[str, Any] | None,
            Field(
                description="a judge over HTTP: `{url, model, best, api_key_var, timeout_s, retries}`; relative-judge "
                "also takes `rubric`, `seed` and `request`"
            ),
        ] = None,
        dataset: DatasetSpec | None = None,
    ) -> None:
        if dataset is None:
            raise ConfigError("environment 'dataset' needs a dataset: set orch.dataset.path or orch.dataset.name")
        if reward not in (*GRADERS, *JUDGES) and ":" not in reward:
            known = ", ".join((*GRADERS, *JUDGES))
            raise ConfigError(f"dataset: unknown reward {reward!r}; use {known} or module:function")
        if (reward in JUDGES) != (judge is not None):
            raise ConfigError(
                "dataset: `reward: judge` or `relative-judge` needs `judge: {url: …}`, and `judge` needs one of these "
                "rewards"
            )
        self._dataset = dataset
        self._grader = _judge(reward, judge) if judge is not None else GRADERS.get(reward) or load_object(reward)
        functions = RewardFunctions([self._grader], label=f"dataset: reward {reward}")
        self._scorer = FunctionReward(functions)
        self.max_reward = 1.0 if reward in GRADERS else None
        self.reward_group = self._scorer.reward_group
        # The pool reads both attributes from the environment, not from its grader.
        self.weights = getattr(self._grader, "weights", {})
        self.keep_env = functions.keep_env
        self._needed = ("prompt", *(("answer",) if reward in GRADERS else functions.columns()))
        self._system_prompt = system_prompt
        self._splits: dict[str, list[Task]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if self._splits is None:
            self._splits = read_splits(self._dataset, self._needed, self._task)
        return self._splits[split]

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        return self._scorer.reward(task, messages)

    def prepare(self) -> None:
        if self._grader is math:
            math_parser.prepare()
        else:
            self._scorer.prepare()

    def _task(self, row: Mapping[str, Any]) -> Task:
        messages = to_messages(row["prompt"])
        if self._system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        return Task(messages, {key: value for key, value in row.items() if key != "prompt"})


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
