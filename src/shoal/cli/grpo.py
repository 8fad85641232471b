"""`shoal grpo`: train in one process per device, or start and supervise the three processes of the split layout."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.build.load import Run, check_launch, load, user_functions
from shoal.cli.entry import note_run_folder
from shoal.cli.output import notices, say
from shoal.config.load import ConfigDraft, load_run
from shoal.config.orch import OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_yaml
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, HardwareError
from shoal.envs.registry import BUILT_IN, OWN_TASKS, takes_data
from shoal.runs.files import storage
from shoal.runs.run_dir import is_used, write_config
from shoal.split.supervisor import SERVER_KILL_S, Child, Supervisor, free_port
from shoal.watch.machine import has_gpu

COMPONENTS = ("infer", "train", "orch")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class SplitCommand:
    """The arguments of `shoal grpo --layout split`."""

    run: str | None
    parts: dict[str, str]
    overrides: list[str]
    resume: bool = False
    dry_run: bool = False

    def file_for(self, component: str) -> str | None:
        return self.parts.get(component, self.run)

    def resume_command(self) -> str:
        words = ["shoal", "grpo", *([self.run] if self.run else []), *self.overrides]
        named = [word for name, file in self.parts.items() for word in (f"--{name}", file)]
        return shlex.join([*words, *named, "--layout", "split", "--resume"])


def supervise(command: SplitCommand, draft: ConfigDraft[RunConfig]) -> int | None:
    """Check the whole run, as its processes will do again, then start them. Returns the exit code."""
    run = load(draft, resume=command.resume, split=True)
    config, folder = run.config, run.path
    note_run_folder(folder)
    notices(run.notices)
    if command.dry_run:
        end_dry_run(config, run.resume)
        return None
    with storage(f"create {folder}"):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    implied = _implied(draft.config, config)
    children = [_child(command, name, implied[name], folder, run.resume) for name in COMPONENTS]
    if config.infer.engine_python is not None:
        children[0].kill_s = SERVER_KILL_S
    return Supervisor(children, "grpo-orch", say).run()


def _child(command: SplitCommand, name: str, implied: Sequence[str], folder: Path, resume: bool) -> Child:
    own = [override for override in command.overrides if override.startswith(f"{name}.")]
    words = [f"grpo-{name}", *([file] if (file := command.file_for(name)) else []), *own, *implied]
    if name != "orch":
        return Child(f"grpo-{name}", words, folder / "logs" / f"{name}.out")
    flags = ["--next-command", command.resume_command(), *(["--resume"] if resume else [])]
    again = ["--resume"] if not resume else []
    return Child("grpo-orch", [*words, *flags], restart_arguments=lambda: again if is_used(folder) else [])


def _implied(given: RunConfig, resolved: RunConfig) -> dict[str, list[str]]:
    """Overrides that give each section what it takes from the others. Keys that the user set are left alone."""
    model, folder = resolved.train.model, str(Path(resolved.train.output_dir).resolve())
    implied = {name: [f"{name}.output_dir={quoted(folder)}"] for name in COMPONENTS}
    for name, key in (("train", "train.model"), ("infer", "infer.model"), ("orch", "orch.model.name")):
        implied[name].append(f"{key}={quoted(str(model))}")
    for key, value in _length(resolved).items():
        implied[key.partition(".")[0]].append(f"{key}={'null' if value is None else value}")
    implied["infer"] += [f"infer.{key}={value}" for key, value in _served(given, resolved).items()]
    ours = resolved.infer.engine == "embedded" or resolved.infer.engine_python is not None
    if ours and "client" not in given.orch.model_fields_set:
        port = resolved.infer.port if "port" in given.infer.model_fields_set else free_port()
        implied["infer"].append(f"infer.port={port}")
        implied["orch"].append(f"orch.client.base_url=http://{resolved.infer.host}:{port}/v1")
    return implied


def _length(resolved: RunConfig) -> dict[str, int | None]:
    """The length of the run, for every section. It replaces what the files say, since the command line may differ."""
    steps, epochs = resolved.train.max_steps, resolved.train.epochs
    return {
        "train.max_steps": steps,
        "train.epochs": epochs if steps is None else None,
        "orch.max_steps": steps,
    }


def _served(given: RunConfig, resolved: RunConfig) -> dict[str, object]:
    """What the server must support for this run, for the keys that its section leaves open."""
    train, infer = resolved.train, resolved.infer
    needed: dict[str, object] = {"max_model_len": infer.max_model_len, "max_num_seqs": infer.max_num_seqs}
    if train.lora:
        needed |= {"enable_lora": "true", "max_lora_rank": infer.max_lora_rank}
    if train.recipe in DTYPES:
        needed["dtype"] = DTYPES[train.recipe]
    return {key: value for key, value in needed.items() if key not in given.infer.model_fields_set}


def quoted(value: str | int) -> str:
    """A YAML scalar of the same type: a folder called 1e5 must stay a string."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


FILE_SUFFIXES = (".yaml", ".yml")


def grpo(
    *tokens: Annotated[str, Parameter(show=True, negative=(), allow_leading_hyphen=False)],
    train: str | None = None,
    infer: str | None = None,
    orch: str | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    layout: Literal["colocated", "split"] = "colocated",
) -> int | None:
    """Train with GRPO.

    shoal grpo run.yaml, or shoal grpo --train train.yaml --infer infer.yaml --orch orch.yaml; then any overrides.

    Parameters
    ----------
    tokens
        A file with the sections train, infer and orch, and overrides such as train.learning_rate=1e-5.
    train
        File with the train section.
    infer
        File with the infer section.
    orch
        File with the orch section.
    dry_run
        Check everything, print and write the resolved configuration, and stop.
    resume
        Continue the run in train.output_dir.
    layout
        colocated: one process per device. split: start and supervise grpo-infer, grpo-orch and grpo-train.
    """
    run, overrides = split_tokens(tokens)
    parts = {name: file for name, file in (("train", train), ("infer", infer), ("orch", orch)) if file is not None}
    if layout == "split":
        return supervise(SplitCommand(run, parts, overrides, resume, dry_run), _read(run, parts, overrides, split=True))
    train_or_dry_run(load(_read(run, parts, overrides), resume=resume), dry_run)
    return None


def train_or_dry_run(run: Run, dry_run: bool) -> None:
    note_run_folder(run.path)
    if dry_run:
        notices(run.notices)
        end_dry_run(run.config, run.resume)
        return
    from shoal import api

    api.train(run)


def _read(run: str | None, parts: dict[str, str], overrides: list[str], split: bool = False) -> ConfigDraft[RunConfig]:
    if run is not None and parts:
        given = ", ".join(f"--{name}" for name in parts)
        raise ConfigError(f"command line: {run}: a file for the whole run excludes {given}; give one or the other")
    if run is None and not parts and not overrides:
        raise ConfigError(
            "command line: no configuration; write shoal grpo run.yaml, or shoal grpo --train T --infer I --orch O "
            "(`shoal init DIR` writes examples)"
        )
    if run is None and parts and (missing := [name for name in ("train", "orch") if name not in parts]):
        raise ConfigError(f"command line: --{missing[0]}: is required next to --{next(iter(parts))}; name its file")
    return load_run(run, parts=parts, overrides=overrides, rules=partial(check_launch, split=split))


def split_tokens(tokens: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The configuration file, if the first token names one, and the overrides."""
    if tokens and (tokens[0].endswith(FILE_SUFFIXES) or "=" not in tokens[0]):
        return tokens[0], list(tokens[1:])
    return None, list(tokens)


def end_dry_run(config: RunConfig | SupervisedConfig, resume: bool) -> None:
    """Import user code, compare with this machine, then print and write the resolved configuration.

    Only config.yaml is written. In the folder of a run that would be resumed, the recorded file stays.
    """
    if isinstance(config, RunConfig):
        import_user_code(config.orch)
        import_user_code(config.train)
    note_machine(config.train)
    text, folder = as_yaml(config), Path(config.train.output_dir)
    say(text)
    if not (resume and is_used(folder)):
        write_config(folder, text)


def import_user_code(section: OrchConfig | TrainConfig) -> None:
    """Import everything named as module:attribute, and create the built-in environments. No task is read.

    User environments are imported but not created: they may need the machine of the run. Whatever they print goes to
    stderr, because stdout holds the configuration.
    """
    from shoal.envs.user_code import load_object

    with contextlib.redirect_stdout(sys.stderr):
        if isinstance(section, OrchConfig):
            _import_environments(section)
        for key, name in user_functions(section).items():
            with about(key):
                load_object(name)


def _import_environments(orch: OrchConfig) -> None:
    from shoal.envs.datasets import DatasetSpec
    from shoal.envs.registry import load_environment
    from shoal.envs.user_code import load_object

    for key, env in ((key, env) for key, envs in orch.env_lists for env in envs):
        with about(key):
            if env.id in BUILT_IN:
                data = DatasetSpec(**dict(orch.dataset)) if orch.dataset is not None and takes_data(env.id) else None
                load_environment(env.id, env.args, dataset=data)
            elif not env.id.startswith(OWN_TASKS):
                load_object(env.id)


def note_machine(train: TrainConfig) -> None:
    """Print a notice if this machine lacks a device or package. The run may be meant for another machine."""
    try:
        _check_machine(train)
    except HardwareError as error:
        notices([f"a run on this machine would be refused: {error}"])


def _check_machine(train: TrainConfig) -> None:
    from shoal.models.precision import check_machine

    check_machine(train, "cuda" if train.device != "cpu" and has_gpu() and _torch_has_gpu() else "cpu")
    if train.gpus != 1:
        from shoal.build.ranks import ranks_to_start

        ranks_to_start(train, None)


def _torch_has_gpu() -> bool:
    """A driver alone is not enough: this build of torch must support it."""
    import torch

    return torch.cuda.is_available()
