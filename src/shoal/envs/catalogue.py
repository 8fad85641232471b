"""The built-in environments by id: what each is, its arguments and their defaults. Imports nothing heavy.

Read by the configuration checks, `shoal envs` and the documentation; `registry.py` loads what is named here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.config.base import IN_MEMORY

REASONING_GYM = "reasoning-gym:"
VERIFIERS = "verifiers:"
OWN_TASKS = (REASONING_GYM, VERIFIERS)  # packages whose environments bring their tasks


@dataclass(frozen=True, slots=True)
class Arg:
    default: Any
    help: str


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    id: str
    description: str
    target: str  # module:class
    args: Mapping[str, Arg]
    takes_dataset: bool = False


def _sizes(train: int = 5000) -> dict[str, Arg]:
    return {
        "num_train": Arg(train, "tasks in the train split"),
        "num_eval": Arg(200, "tasks in the eval split"),
        "seed": Arg(0, "which tasks are drawn"),
    }


_ALL = (
    EnvironmentInfo(
        "reverse-text",
        "write a short English text backwards, character by character",
        "shoal.envs.reverse_text:ReverseText",
        {
            "min_len": Arg(8, "characters of the shortest text"),
            "max_len": Arg(40, "characters of the longest text"),
            **_sizes(),
            "system_prompt": Arg("…", "replaces the built-in system prompt"),
        },
        takes_dataset=True,
    ),
    EnvironmentInfo(
        "arithmetic",
        "generated sums in five levels, from one digit to four operands",
        "shoal.envs.arithmetic:Arithmetic",
        {
            "level": Arg(1, "1 to 5: one, two, three digits; three operands; four operands"),
            "operations": Arg("+", "any of + - *, e.g. `+-`"),
            **_sizes(),
        },
    ),
    EnvironmentInfo(
        "gsm8k",
        "grade-school word problems, graded as numbers",
        "shoal.envs.gsm8k:Gsm8k",
        {
            "path": Arg(None, "folder with train.jsonl and test.jsonl; unset = `openai/gsm8k` from the hub"),
            "instruction": Arg("…", "replaces the sentence after each question"),
        },
        takes_dataset=True,
    ),
    EnvironmentInfo(
        "countdown",
        "reach a target from given numbers, each used at most once",
        "shoal.envs.countdown:Countdown",
        {
            "min_numbers": Arg(3, "fewest numbers given"),
            "max_numbers": Arg(4, "most numbers given"),
            "max_number": Arg(50, "largest number given"),
            "max_target": Arg(100, "largest target"),
            "format_reward": Arg(0.1, "reward of a well-formed expression that misses the target"),
            **_sizes(),
        },
    ),
    EnvironmentInfo(
        "dataset",
        "prompts from a dataset of your own, graded against its answer column or by your function",
        "shoal.envs.dataset_env:DatasetEnvironment",
        {
            "reward": Arg("math", "`math`, `numeric`, `exact`, `judge` or `module:function` of (task, messages)"),
            "system_prompt": Arg(None, "put before every prompt that has none"),
            "judge": Arg(None, "a judge over HTTP: `{url, model, best, api_key_var, timeout_s, retries}`"),
        },
        takes_dataset=True,
    ),
)
BUILT_IN: dict[str, EnvironmentInfo] = {info.id: info for info in _ALL}


def takes_data(id: str) -> bool:
    """Whether it reads `orch.dataset`, where there is one; user code may, and is asked when it is loaded."""
    return BUILT_IN[id].takes_dataset if id in BUILT_IN else not id.startswith(OWN_TASKS)


def problem_with(id: str, args: Mapping[str, Any] | None = None) -> str | None:
    """What is wrong with an environment id or its argument names, None if nothing can be told without loading it."""
    if id.startswith(REASONING_GYM):
        return None if id != REASONING_GYM else "name a task, e.g. reasoning-gym:chain_sum"
    if id == IN_MEMORY:
        return "the data of this run is a Python object; run the script that has it again, told to resume"
    if id.startswith(VERIFIERS):
        if id == VERIFIERS:
            return "name an environment, e.g. verifiers:gsm8k-v1"
        return (
            None if args is None or "python" in args else "needs args.python; name the interpreter that has verifiers"
        )
    info = BUILT_IN.get(id)
    if info is None:
        if id.endswith(".py"):
            return f"{id!r} is a file; name the environment in it, as {id}:MyEnv"
        return None if ":" in id else f"unknown environment {id!r}; {_nearest(id)}"
    for name in args or {}:
        if name not in info.args:
            near = difflib.get_close_matches(name, list(info.args), n=1)
            hint = f"nearest is {near[0]!r}" if near else f"it takes {', '.join(info.args)}"
            return f"environment {id!r} has no argument {name!r}; {hint}"
    return None


def _nearest(id: str) -> str:
    near = difflib.get_close_matches(id.replace("_", "-"), [*BUILT_IN, "reasoning-gym"], n=1, cutoff=0.5)
    if near and near[0] == "reasoning-gym":
        return "nearest is 'reasoning-gym:<task>', e.g. reasoning-gym:chain_sum"
    known = f"built in are {', '.join(BUILT_IN)}; reasoning-gym:<task>, verifiers:<id> and module:attribute work too"
    return f"nearest is {near[0]!r}" if near else known
