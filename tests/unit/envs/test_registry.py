"""Loading environments by id: built in, from a package, from user code; and the error messages."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, DataError, UserCodeError
from shoal.core.types import Task
from shoal.envs.base import ask
from shoal.envs.datasets import DatasetSpec
from shoal.envs.registry import BUILT_IN, PACKAGES, arguments_of, load_environment, problem_with, summary, with_tables
from shoal.envs.user_code import checked_tasks, load_filter

USER_CODE = """
from shoal.envs import SingleTurn, ask

class Mine(SingleTurn):
    def __init__(self, size=2, dataset=None):
        self.size, self.dataset = size, dataset
    def tasks(self, split):
        return [ask(f"{split} {n}") for n in range(self.size)]
    def reward(self, task, messages):
        return 1.0

def make(size):
    return Mine(size)

class Plain:
    def tasks(self, split):
        return [ask("x")]
    def reward(self, task, messages):
        return 0.0

class Item:
    prompt = "Say hi."
    def get_reward(self, completion):
        return float(completion == "hi")

an_object = Mine(7)
an_item = Item()
items = [Item(), Item()]
splits = {"train": [Item()], "eval": [Item(), Item()]}
not_an_environment = 3
promptless = type("Promptless", (), {"get_reward": lambda self, completion: 1})()

def breaks():
    raise OSError("no disk")
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_shoal_env.py").write_text(USER_CODE)
    (tmp_path / "my_broken_env.py").write_text("1 / 0")
    (tmp_path / "my_needy_env.py").write_text("import not_installed_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "my_shoal_env"
    for name in ("my_shoal_env", "my_broken_env", "my_needy_env", "shoal_user_my_shoal_env"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("environment", [*BUILT_IN.values(), *PACKAGES.values()])
def test_every_parameter_is_a_described_argument(environment):
    """A parameter without `Annotated` would silently not be an argument."""
    parameters = inspect.signature(environment).parameters
    fields = arguments_of(environment).model_fields
    supplied = {name for name in parameters if name not in fields}
    assert supplied <= {"dataset", "task", "id", "config"}, supplied
    assert all(field.description for field in fields.values())
    assert {name: field.get_default() for name, field in fields.items() if not field.is_required()} == {
        name: parameters[name].default for name in fields if parameters[name].default is not inspect.Parameter.empty
    }
    assert summary(environment).endswith(".")


@pytest.mark.parametrize(
    "id, args, name, wanted",
    [
        ("arithmetic", {"level": 6}, "level", "5"),
        ("arithmetic", {"level": "2"}, "level", "integer"),
        ("arithmetic", {"level": True}, "level", "integer"),
        ("arithmetic", {"operations": "+/"}, "operations", r"\+"),
        ("arithmetic", {"operations": ""}, "operations", "match"),
        ("arithmetic", {"operations": []}, "operations", ""),
        ("arithmetic", {"num_eval": 0}, "num_eval", "1"),
        ("countdown", {"min_numbers": 1}, "min_numbers", "2"),
        ("countdown", {"format_reward": 1}, "format_reward", "1"),
        ("countdown", {"format_reward": float("nan")}, "format_reward", "finite"),
        ("reverse-text", {"min_len": 1}, "min_len", "2"),
        ("gsm8k", {"path": 3}, "path", "string"),
        ("reasoning-gym:chain_sum", {"num_train": "many"}, "num_train", "integer"),
        ("verifiers:gsm8k", {}, "python", "interpreter"),
        ("verifiers:gsm8k", {"python": "/usr/bin/python3", "max_turns": "x"}, "max_turns", "integer"),
    ],
)
def test_wrong_values_name_the_argument(id, args, name, wanted):
    problem = problem_with(id, args) or ""
    assert f"args.{name}" in problem and re.search(wanted, problem)
    with pytest.raises(ConfigError, match=f"args.{name}"):
        load_environment(id, args)


def test_right_values_have_no_problem():
    assert problem_with("arithmetic", {"level": 5, "operations": ["+", "-"]}) is None
    assert load_environment("arithmetic", {"operations": ["-"]}).tasks("train")[0].data["answer"] >= 0
    assert problem_with("countdown", {"format_reward": 0}) is None
    assert problem_with("reasoning-gym:chain_sum", {"any_option_of_the_task": 1}) is None


def test_catalogue_imports_little():
    program = (
        "import sys, shoal.envs.registry\n"
        "heavy = 'torch', 'transformers', 'datasets', 'sympy', 'reasoning_gym', 'pyarrow'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "id, args, words",
    [
        ("reverse_text", {}, "unknown environment 'reverse_text'; nearest is 'reverse-text'"),
        ("gsm-8k", {}, "nearest is 'gsm8k'"),
        ("reasoning-gim", {}, "reasoning-gym:<task>"),
        ("zzz", {}, "built in are reverse-text"),
        ("verifiers", {}, "unknown environment"),
        ("mine.py", {}, "'mine.py' is a file; name the environment in it, as mine.py:MyEnv"),
        ("arithmetic", {"levl": 2}, "no argument 'levl'; nearest is 'level'"),
        ("reasoning-gym:", {}, "reasoning-gym:chain_sum"),
    ],
)
def test_unknown_names_are_reported_before_loading(id, args, words):
    assert words in (problem_with(id, args) or "")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_environment(id, args)


def test_known_names_have_no_problem():
    for id in (*BUILT_IN, "reasoning-gym:chain_sum", "my.module:Thing"):
        assert problem_with(id) is None


def test_names():
    assert load_environment("arithmetic").name == "arithmetic"
    assert load_environment("arithmetic", name="sums").name == "sums"


@pytest.mark.parametrize(
    "attribute, args, train, held_out",
    [
        ("Mine", {}, 2, 2),
        ("Mine", {"size": 5}, 5, 5),
        ("make", {"size": 4}, 4, 4),
        ("Plain", {}, 1, 1),
        ("an_object", {}, 7, 7),
        ("an_item", {}, 1, 0),
        ("items", {}, 2, 0),
        ("splits", {}, 1, 2),
    ],
)
@pytest.mark.parametrize("module", ["my_shoal_env", "my_shoal_env.py"])
def test_user_code(user_module, module, attribute, args, train, held_out):
    environment = load_environment(f"{module}:{attribute}", args, name="mine")
    assert environment.name == "mine"
    assert (len(environment.tasks("train")), len(environment.tasks("eval"))) == (train, held_out)
    task = environment.tasks("train")[0]
    assert environment.start(task).messages == task.messages
    score = environment.reward(task, [{"role": "assistant", "content": "hi"}])
    assert score == (0.0 if attribute == "Plain" else 1.0)


@pytest.mark.parametrize(
    "id, args, words",
    [
        ("my_shoal_env:Mien", {}, "nearest is 'Mine'"),
        ("my_shoal_env:Mine", {"sise": 1}, "unexpected keyword argument 'sise'"),
        ("my_shoal_env:make", {}, "missing a required argument: 'size'"),
        ("my_shoal_env:an_object", {"size": 1}, "takes neither args nor a dataset"),
        ("my_shoal_env:not_an_environment", {}, "is an int, not an environment"),
        ("my_shoal_env:promptless", {}, "has no prompt"),
        ("my_shoal_env:breaks", {}, "OSError: no disk"),
        ("my_broken_env:x", {}, "importing it raised ZeroDivisionError"),
        ("my_needy_env:x", {}, "needs 'not_installed_at_all'"),
        ("my_absent_env:x", {}, "no module 'my_absent_env'"),
        ("absent.py:x", {}, "no such file"),
        ("my_shoal_env:", {}, "write module:attribute"),
    ],
)
def test_user_code_that_cannot_be_used(user_module, id, args, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_environment(id, args)


def test_dataset_reaches_environments_that_accept_one(user_module):
    spec = DatasetSpec(path="rows.jsonl")
    assert load_environment("my_shoal_env:Mine", dataset=spec).dataset is spec  # type: ignore[attr-defined]
    for id in ("my_shoal_env:make", "arithmetic", "reasoning-gym:chain_sum"):
        with pytest.raises(ConfigError, match="takes no dataset"):
            load_environment(id, dataset=spec)
    with pytest.raises(ConfigError, match="needs a dataset"):
        load_environment("dataset")


def test_dataset_environment_grades_in_four_ways(user_module):
    Path("grade.py").write_text("async def grade(task, messages):\n    return {'given': float(task.data['answer'])}\n")
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "1 + 2?", "answer": "3"}\n')
    spec = DatasetSpec(path="rows.jsonl")
    say = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    for reward, answer, expected in [
        ("exact", " 2 ", 1.0),
        ("exact", "= 2", 0.0),
        ("numeric", "= 2", 1.0),
        ("math", "\\boxed{4/2}", 1.0),
        ("grade.py:grade", "", {"given": 2.0}),
    ]:
        environment = load_environment("dataset", {"reward": reward, "system_prompt": "Be short."}, dataset=spec)
        task = environment.tasks("train")[0]
        assert task.messages[0] == {"role": "system", "content": "Be short."}
        assert environment.reward(task, say(answer)) == expected
    with pytest.raises(ConfigError, match="unknown reward 'fuzzy'"):
        load_environment("dataset", {"reward": "fuzzy"}, dataset=spec)


def test_reasoning_gym_tasks_by_name():
    with pytest.raises(ConfigError, match="nearest is 'chain_sum'"):
        load_environment("reasoning-gym:chain_sun")
    with pytest.raises(ConfigError, match="max_terms"):
        load_environment("reasoning-gym:chain_sum", {"max_terms": 0})
    with pytest.raises(ConfigError, match="no_such_option"):
        load_environment("reasoning-gym:chain_sum", {"no_such_option": 0})


def test_reasoning_gym_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'shoal[reasoning-gym]'")):
        load_environment("reasoning-gym:chain_sum")


DOCS = Path(__file__).parents[3] / "docs" / "environments.md"


def test_documentation_lists_every_environment_and_argument():
    page = DOCS.read_text()
    for id in (*BUILT_IN, *(prefix.rstrip(":") for prefix in PACKAGES)):
        assert page.count(f"<!-- arguments of {id} -->") == 1
    assert with_tables(page) == page, "run: python -m shoal.envs.registry docs/environments.md"
    assert with_tables(page.replace("| `level` | `1` |", "| `level` | `7` |")) == page


def test_documentation_starts_with_a_working_environment(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None and len(code[1].strip().splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    Path("capitals.py").write_text(code[1])
    environment = load_environment("capitals.py:Capitals")
    task = environment.tasks("train")[0]
    assert environment.reward(task, [{"role": "assistant", "content": f"It is {task.data['answer']}!"}]) == 1.0
    assert environment.reward(task, [{"role": "assistant", "content": "No idea."}]) == 0.0


class Late:
    """Forty tasks, of which one cannot be made."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return ask(f"w{index}") if index != 31 else {}["row 31"]

    def shuffled(self):
        return "as before"


def raises(split):
    raise RuntimeError("the file is gone")


@pytest.mark.parametrize(
    "tasks, words",
    [
        (raises, "raised RuntimeError: the file is gone"),
        (lambda split: (ask("x") for _ in range(3)), "returned generator; return a list of tasks"),
        (lambda split: None, "returned NoneType; return a list of tasks"),
        (lambda split: [ask("x"), None], "[1] is NoneType, not a task"),
        (lambda split: [ask("x"), Task(["y"], {})], "[1]: messages must be a list"),  # type: ignore[list-item]
        (lambda split: [ask("\ud800")], "[0] contains a lone surrogate"),
    ],
)
def test_invalid_tasks_are_environment_errors(tasks, words):
    """Exit code 2 with its name, not a bug of Shoal."""
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        checked_tasks("mine", tasks)("train")
    assert str(caught.value).startswith("orch.env: mine: tasks('train')")


def test_lazily_made_tasks_are_checked_when_made():
    tasks = checked_tasks("mine", lambda split: Late())("eval")
    assert len(tasks) == 40 and tasks[30].messages == ask("w30").messages
    with pytest.raises(DataError, match=re.escape("orch.env: mine: tasks('eval')[31] raised KeyError: 'row 31'")):
        tasks[31]


def test_environment_receives_its_own_tasks():
    made = [ask("x"), ask("y")]
    assert checked_tasks("mine", lambda split: made)("train") is made
    tasks: Any = checked_tasks("mine", lambda split: Late())("train")
    assert tasks.shuffled() == "as before"
    with pytest.raises(AttributeError):
        tasks.nothing()


@pytest.mark.parametrize("answer, kept", [("True", True), ("False", False), ("np.bool_(False)", False)])
def test_filter_returns_a_bool(tmp_path, answer, kept):
    (tmp_path / "mine.py").write_text(f"import numpy as np\n\n\ndef keep(group):\n    return {answer}\n")
    assert load_filter(f"{tmp_path}/mine.py:keep")(None) is kept


@pytest.mark.parametrize("answer", ["'no'", "None", "float('nan')", "[]"])
def test_non_bool_filter_is_reported(tmp_path, answer):
    (tmp_path / "mine.py").write_text(f"def keep(group):\n    return {answer}\n")
    with pytest.raises(UserCodeError, match=r"mine\.py:keep returned .*; return True or False"):
        load_filter(f"{tmp_path}/mine.py:keep")(None)
