"""`shoal envs`: what there is to train on, and what a task of it looks like."""

from __future__ import annotations

from cyclopts import App

from shoal.cli.environments import environment_problem
from shoal.cli.output import say
from shoal.envs.catalogue import BUILT_IN
from shoal.errors import ConfigError

app = App(name="envs", help="List the environments, or show one.", result_action="return_value")


@app.default
def list_environments() -> None:
    """List the built-in environments."""
    width = max(len(id) for id in BUILT_IN)
    for info in BUILT_IN.values():
        say(f"{info.id:<{width}}  {info.description}")
    say("")
    say("reasoning-gym:TASK is any task of that package; module:function is your own. More: shoal envs show ID")


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
