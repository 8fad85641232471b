"""What `--dry-run` adds to the checks of every start: user code is imported, and the machine is compared with the
configuration."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from shoal.build.load import user_functions
from shoal.cli.output import notices, say
from shoal.config.orch import OrchConfig
from shoal.config.problems import about
from shoal.config.resolve import as_yaml
from shoal.config.schema import RunConfig, SupervisedConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import HardwareError
from shoal.envs.registry import BUILT_IN, OWN_TASKS, takes_data
from shoal.runs.run_dir import is_used, write_config
from shoal.watch.machine import has_gpu


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
