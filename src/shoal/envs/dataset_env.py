"""`dataset`: prompts from a user's dataset, graded against its answer column or by a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Task
from shoal.envs.base import SingleTurn
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
