"""The first phase of a run: `load` checks a configuration and returns the `Run` that it describes.

Nothing is written, and neither torch nor user code is imported. `shoal grpo` and the launcher call `load`; the Python
surfaces create a `Run` themselves, with the objects of their script.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from shoal.config.load import ConfigDraft, load_run, load_supervised
from shoal.config.orch import OrchConfig
from shoal.config.problems import Findings, show
from shoal.config.resolve import difference_lines, forbidden_changes, resolve_run, resolve_supervised
from shoal.config.rules import check_run, check_split
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError
from shoal.core.protocols import Environment
from shoal.envs.registry import BUILT_IN, REASONING_GYM, VERIFIERS, problem_with, takes_data, takes_dataset
from shoal.runs.files import LOCK_NAME
from shoal.runs.run_dir import is_used

MAX_CHANGES = 12  # listed when a run resumes with another configuration

DEFAULT_LOSS = (
    "train.loss.type: is masked, the default: no clip, but tokens and rollouts far from the sampler are dropped, so "
    "that stale rollouts do no harm; set it to grpo for the clipped loss"
)


@dataclass(frozen=True)
class PythonObjects:
    """Objects of a script that replace what the configuration names."""

    environments: Mapping[str, Environment] = field(default_factory=dict)  # by label
    model: Any = None  # a transformers model; trained in place
    tokenizer: Any = None
    processes: int = 1  # that a launcher started to train together
    local_rank: int = 0


@dataclass(frozen=True)
class Run:
    """What to train, and how it was requested."""

    config: RunConfig  # checked and resolved
    resume: bool = False
    objects: PythonObjects = field(default_factory=PythonObjects)
    notices: tuple[str, ...] = ()  # shown when the run starts
    next_command: str | None = None  # how to continue; None = `shoal grpo … --resume`
    wording: Callable[[str], str] = str  # replaces configuration keys by the names of the surface that started the run
    component: Literal["grpo", "orch"] = "grpo"  # orch trains in another process; also the name of the log file

    @property
    def path(self) -> Path:
        return Path(self.config.train.output_dir)

    @property
    def trains(self) -> bool:
        """Whether this process, or processes that it starts, hold the policy."""
        return self.component == "grpo"

    @property
    def command(self) -> str:
        """How to continue the run."""
        return self.next_command or resume_command(self.config)


def load(
    draft: ConfigDraft[RunConfig], *, resume: bool = False, split: bool = False, wording: Callable[[str], str] = str
) -> Run:
    """Check a configuration together with everything that it names. Raises ConfigError with all problems found.

    With `split` the orchestrator prints the advice of the rules later, so it is not among the notices.
    """
    findings = check_launch(draft.config, split)
    findings.raise_errors(draft.origins)
    config = resolve_run(draft.config)
    advice = [] if split else findings.notice_lines()
    notices = advice + check_run_folder(draft, config, resume)
    if not draft.config.train.loss.model_fields_set:
        notices.append(DEFAULT_LOSS)
    resume = resume or config.train.resume_from_checkpoint
    return Run(config, resume, notices=tuple(wording(line) for line in notices), wording=wording)


def check_launch(config: RunConfig, split: bool = False) -> Findings:
    """The rules, and the environments and functions that the configuration names."""
    findings = check_split(config) if split else check_run(config)
    check_environments(config.orch, findings)
    check_user_code(config.orch, findings)
    check_user_code(config.train, findings)
    return findings


def resume_command(config: RunConfig | SupervisedConfig) -> str:
    return f"shoal {config.verb} {shlex.quote(str(Path(config.train.output_dir) / 'config.yaml'))} --resume"


def check_environments(orch: OrchConfig, findings: Findings) -> None:
    """Environment ids, argument names and data. No environment is created."""
    for key, envs in orch.env_lists:
        for index, env in enumerate(envs):
            problem = environment_problem(env.id, env.args)
            if problem is not None:
                part = "id" if environment_problem(env.id) is not None else "args"
                findings.error(f"{key}.{index}.{part}", *problem)
            elif env.id == "gsm8k":
                _check_data_folder(f"{key}.{index}.args.path", env.args.get("path"), findings)
    _check_dataset_use(orch, findings)


def environment_problem(id: str, args: Mapping[str, Any] | None = None) -> tuple[str, str] | None:
    """(problem, remedy) if the environment cannot be created, else None."""
    problem = problem_with(id, args)
    if problem is not None:
        what, _, fix = problem.partition("; ")
        return what, f"{fix}; `shoal envs` lists them" if fix else "`shoal envs` lists them"
    if id.startswith(REASONING_GYM):
        if importlib.util.find_spec("reasoning_gym") is None:
            return f"{show(id)} needs the package reasoning-gym", "pip install 'shoal[reasoning-gym]'"
        return None
    return None if id in BUILT_IN or id.startswith(VERIFIERS) else user_code_problem(id)


def _check_data_folder(key: str, path: object, findings: Findings) -> None:
    if path is not None and (not isinstance(path, str) or not Path(path).expanduser().exists()):
        findings.error(key, f"{show(path)} does not exist", "name the folder with train.jsonl and test.jsonl")


def _check_dataset_use(orch: OrchConfig, findings: Findings) -> None:
    if orch.dataset is not None and not any(takes_data(env.id) for env in orch.env):
        what = f"is not used: {', '.join(env.id for env in orch.env)} generates its own tasks"
        able = ", ".join(id for id, environment in BUILT_IN.items() if takes_dataset(environment))
        findings.error("orch.dataset", what, f"remove it, or use one of {able}")
    for index, env in enumerate(orch.env):
        if env.id == "dataset" and orch.dataset is None:
            findings.error(f"orch.env.{index}.id", "'dataset' needs data", "set orch.dataset.path or orch.dataset.name")


def check_user_code(section: OrchConfig | TrainConfig, findings: Findings) -> None:
    """Functions named as module:function, except environments."""
    for key, name in user_functions(section).items():
        problem = user_code_problem(name)
        if problem is not None:
            findings.error(key, *problem)


def user_functions(section: OrchConfig | TrainConfig) -> dict[str, str]:
    """Configuration key → module:function, for each key that is set."""
    if isinstance(section, TrainConfig):
        return {"train.loss.type": section.loss.type} if section.loss.custom else {}
    named = {
        "orch.advantage.function": section.advantage.function,
        "orch.reward.function": section.reward.function,
        "orch.groups.filter": section.groups.filter,
    }
    return {key: name for key, name in named.items() if name is not None}


def user_code_problem(name: str) -> tuple[str, str] | None:
    """(problem, remedy) if the module of `module:function` or `file.py:function` cannot be found. Imports nothing."""
    module, _, _ = name.rpartition(":")
    if module.endswith(".py"):
        if Path(module).expanduser().is_file():
            return None
        return f"there is no file {show(module)} for {show(name)}", "check the path, or run in the folder that has it"
    if PathFinder.find_spec(module.split(".")[0], [*sys.path, str(Path.cwd())]) is not None:
        return None
    return f"there is no module {show(module)} for {show(name)}", "install it, or run in the folder that has it"


def check_run_folder(draft: ConfigDraft[Any], config: RunConfig | SupervisedConfig, flag: bool) -> list[str]:
    """Raises ConfigError if the run may not use its folder. Returns notices, such as what a resume changes.

    `flag`: --resume is given, so there must be a run. With train.resume_from_checkpoint it may also start.
    """
    folder = Path(config.train.output_dir)
    shown = show(config.train.output_dir)
    place = f"{draft.origins.at(('train', 'output_dir'))}: train.output_dir"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{place}: {shown} is a file; name a folder")
    key = config.train.resume_from_checkpoint
    if not is_used(folder):
        if flag and not key and not _was_started(folder):
            raise ConfigError(
                f"{place}: --resume: {shown} has no run; check the path, or leave --resume out to start a run there "
                "(train.resume_from_checkpoint=true does either)"
            )
        start = f"train.output_dir: nothing to resume in {shown} yet, starting from the first step"
        return [start] if flag or key else []
    if not (flag or key):
        raise ConfigError(
            f"{place}: {shown} already holds a run; continue it with --resume, "
            "or choose another folder with train.output_dir=DIR"
        )
    return _resume_changes(config, folder)


def _was_started(folder: Path) -> bool:
    """A run that was killed before its first record leaves its lock, or the logs of its processes."""
    return (folder / LOCK_NAME).exists() or (folder / "logs").is_dir()


def _resume_changes(config: RunConfig | SupervisedConfig, folder: Path) -> list[str]:
    """Rates and lengths may change and are reported. Keys that determine the data or the weights may not."""
    file = folder / "config.yaml"
    if not file.is_file():
        return []
    earlier: Any
    if isinstance(config, SupervisedConfig):
        earlier = resolve_supervised(load_supervised(type(config), str(file)).config)
    else:
        earlier = resolve_run(load_run(str(file)).config)
    if forbidden := forbidden_changes(earlier, config):
        remedy = "a resumed run may not change this; restore the value, or start another run"
        raise ConfigError("\n".join(f"{file}: {line}; {remedy}" for line in forbidden))
    ignored = ("train.resume_from_checkpoint",)
    changes = [line for line in difference_lines(earlier, config) if not line.startswith(ignored)]
    return [f"resume changes {line}" for line in changes[:MAX_CHANGES]]
