"""`shoal envs`: list the environments, show one with a task, or create a package with a new one."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from cyclopts import App

from shoal.build.load import environment_problem
from shoal.cli.output import say
from shoal.config.reference import schema_file
from shoal.core.errors import ConfigError, StorageError
from shoal.envs.registry import BUILT_IN, arguments_of, shown_default, summary, takes_dataset

TEMPLATES = "examples_data/environment"
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")


def scaffold(name: str, folder: Path) -> list[Path]:
    """Write the package and return its files. `my-env` is the folder, `my_env` the module, `MyEnv` the class."""
    if not NAME.match(name):
        what = "a name may contain only lower-case letters, digits and dashes, such as my-env"
        raise ConfigError(f"command line: {name!r}: {what}")
    words = {"NAME": name, "MODULE": name.replace("-", "_"), "CLASS": "".join(p.capitalize() for p in name.split("-"))}
    if folder.exists():
        raise ConfigError(f"command line: {folder}: exists already; choose another name")
    written = []
    try:
        for template in sorted((files("shoal") / TEMPLATES).iterdir(), key=lambda entry: entry.name):
            path = folder / _filled(template.name.removesuffix(".txt").replace("__", "/"), words)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(template.read_text(encoding="utf-8"), words), encoding="utf-8")
            written.append(path)
        schema, text = schema_file("run")
        (folder / schema).write_text(text, encoding="utf-8")
        written.append(folder / schema)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
    return written


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"%{word}%", value)
    return text


app = App(name="envs", help="List environments, show one, or create one.", result_action="return_value")


@app.default
def list_environments() -> None:
    """List the built-in environments."""
    width = max(len(id) for id in BUILT_IN)
    for id, environment in BUILT_IN.items():
        say(f"{id:<{width}}  {summary(environment)}")
    say("")
    say("reasoning-gym:TASK and verifiers:ID are environments of those packages; module:function is one of yours.")
    say("More: shoal envs show ID. Create one: shoal envs new NAME")


@app.command
def show(id: str) -> None:
    """Show an environment: its arguments, and one task with its answer.

    Parameters
    ----------
    id
        An id from `shoal envs`, or reasoning-gym:TASK, or module:function.
    """
    problem = environment_problem(id)
    if problem is not None:
        raise ConfigError(f"command line: {problem[0]}; {problem[1]}")
    environment = BUILT_IN.get(id)
    if environment is not None:
        say(f"{id}: {summary(environment)}")
        for name, argument in arguments_of(environment).model_fields.items():
            say(f"  {name} ({shown_default(argument)}): {argument.description}")
        if takes_dataset(environment):
            say("  reads orch.dataset")
    if environment is None or not takes_dataset(environment) or id == "reverse-text":
        _show_task(id)


@app.command
def new(name: str, folder: str | None = None) -> None:
    """Create a package with a new environment, its settings for a run and a passing test.

    Parameters
    ----------
    name
        Its name, such as my-env.
    folder
        Where to write it. Default: a folder of that name.
    """

    target = Path(folder or name)
    for path in scaffold(name, target):
        say(str(path))
    say(f"try: cd {target} && pytest")


def _show_task(id: str) -> None:
    from shoal.envs.registry import load_environment

    environment = load_environment(id)
    tasks = environment.tasks("train")
    say(f"one of {len(tasks)} tasks:")
    for message in tasks[0].messages:
        say(f"  {message['role']}: {message['content'] or '(written by reset)'}")
    if tools := [getattr(tool, "__name__", tool) for tool in getattr(environment, "tools", ())]:
        say(f"  tools: {', '.join(tools)}")
    solution = getattr(environment, "solution", None)
    answer = solution(tasks[0]) if callable(solution) else None
    if answer is not None:
        say(f"  answer: {answer}")
