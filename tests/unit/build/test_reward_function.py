"""`orch.reward.function` scores every environment, in every form of a reward function."""

from pathlib import Path

import pytest

from shoal.build.load import PythonObjects
from shoal.build.workspace import _make_environments
from shoal.config.schema import RunConfig
from shoal.core.errors import ConfigError

CODE = """
def conversation(task, messages):
    return float(messages[-1]["content"] == str(task.data["answer"]))

def columns(completion, answer):
    return float(completion == str(answer))

def rank(prompts, completions, **columns):
    order = sorted(completions, key=len)
    return [float(order.index(completion)) for completion in completions]

def wrong(a, b, c):
    return 1.0
"""
OWN = """
from shoal.envs import SingleTurn, ask

class Own(SingleTurn):
    def tasks(self, split):
        return [ask("say hi")]

    def reward(self, %s):
        return 1.0
"""


def environment(tmp_path: Path, name: str):
    (tmp_path / "mine.py").write_text(CODE)
    orch = {"env": "arithmetic", "reward": {"function": f"{tmp_path}/mine.py:{name}"}}
    config = RunConfig.model_validate({"train": {"model": "unused"}, "orch": orch})
    return _make_environments(config, PythonObjects())["arithmetic"]


@pytest.mark.parametrize("name", ["conversation", "columns"])
def test_reward_function_replaces_the_environment_reward(tmp_path: Path, name: str):
    made = environment(tmp_path, name)
    task = made.tasks("train")[0]
    right, wrong = ([{"role": "assistant", "content": text}] for text in (str(task.data["answer"]), "no"))
    assert (made.reward(task, right), made.reward(task, wrong)) == (1.0, 0.0)
    assert getattr(made, "reward_group", None) is None


def test_group_function_can_rank(tmp_path: Path):
    made = environment(tmp_path, "rank")
    group = [[{"role": "assistant", "content": text}] for text in ("bb", "a", "ccc")]
    assert made.reward_group(made.tasks("train")[0], group) == [1.0, 0.0, 2.0]  # type: ignore[attr-defined]


def test_another_signature_is_refused_with_the_accepted_forms(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"orch\.reward\.function.*completion.*task, messages"):
        environment(tmp_path, "wrong")


def test_columns_of_an_environment_without_tasks_are_not_checked(tmp_path: Path):
    """The prompt stream reports it with one message."""
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "own.py").write_text(OWN.replace('[ask("say hi")]', "[]") % "task, messages")
    orch = {"env": f"{tmp_path}/own.py:Own", "reward": {"function": f"{tmp_path}/mine.py:columns"}}
    config = RunConfig.model_validate({"train": {"model": "unused"}, "orch": orch})
    (made,) = _make_environments(config, PythonObjects()).values()
    assert not made.tasks("train")


@pytest.mark.parametrize("parameters", ["answer", "completion, answer, row", "", "task, messages, extra"])
def test_wrong_signature_of_a_reward_method_is_refused_before_training(tmp_path: Path, parameters: str):
    (tmp_path / "own.py").write_text(OWN % parameters)
    config = RunConfig.model_validate({"train": {"model": "unused"}, "orch": {"env": f"{tmp_path}/own.py:Own"}})
    with pytest.raises(ConfigError, match=r"Own.reward has the parameters .*; write reward\(self, task, messages\)"):
        _make_environments(config, PythonObjects())


@pytest.mark.parametrize("parameters", ["task, messages", "task, messages, extra=1", "*arguments", "a, b"])
def test_right_signature_of_a_reward_method(tmp_path: Path, parameters: str):
    (tmp_path / "own.py").write_text(OWN % parameters)
    config = RunConfig.model_validate({"train": {"model": "unused"}, "orch": {"env": f"{tmp_path}/own.py:Own"}})
    (made,) = _make_environments(config, PythonObjects()).values()
    assert made.reward(made.tasks("train")[0], []) == 1.0
