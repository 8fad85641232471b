"""`shoal envs`: what there is to train on, what a task of it looks like, and the start of one of your own."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from shoal.cli.environments import environment_problem
from shoal.cli.output import say
from shoal.envs.catalogue import BUILT_IN
from shoal.errors import ConfigError

app = App(name="envs", help="List the environments, show one, or start one.", result_action="return_value")


@app.default
def list_environments() -> None:
    """List the built-in environments."""
    width = max(len(id) for id in BUILT_IN)
    for info in BUILT_IN.values():
        say(f"{info.id:<{width}}  {info.description}")
    say("")
    say("reasoning-gym:TASK and verifiers:ID are environments of those packages; module:function is your own.")
    say("More: shoal envs show ID. Start one: shoal envs new NAME")


@app.command
def show(id: str) -> None:
    """Show an environment: its arguments, and one task with the answer that is wanted.

    Parameters
    ----------
    id
        As `shoal envs` lists it, or reasoning-gym:TASK, or module:function.
    """
    problem = environment_problem(id)
    if problem is not None:
        raise ConfigError(f"command line: {problem[0]}; {problem[1]}")
    info = BUILT_IN.get(id)
    if info is not None:
        say(f"{info.id}: {info.description}")
        for name, arg in info.args.items():
            say(f"  {name} ({arg.default}): {arg.help}")
        if info.takes_dataset:
            say("  reads orch.dataset")
    if info is None or not info.takes_dataset or id == "reverse-text":
        _show_task(id)


@app.command
def new(name: str, folder: str | None = None) -> None:
    """Start an environment of your own: a package with a test that passes.

    Parameters
    ----------
    name
        Such as my-env.
    folder
        Where to write it; a folder of that name unless given.
    """
    from shoal.cli.envs_new import scaffold

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
        say(f"  {message['role']}: {message['content']}")
    solution = getattr(environment, "solution", None)
    answer = solution(tasks[0]) if callable(solution) else None
    if answer is not None:
        say(f"  answer: {answer}")
