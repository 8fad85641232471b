"""What a command does with the run directory before the run: refuse a used one, compare on resume, end a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.cli.crash import note_run_folder
from shoal.cli.environments import load_code
from shoal.cli.machine import note_machine
from shoal.cli.output import say
from shoal.config.base import Section
from shoal.config.load import Loaded, load_run, load_sft
from shoal.config.problems import show
from shoal.config.resolve import as_yaml, difference_lines, forbidden_changes, resolve_run, resolve_sft
from shoal.config.schema import RunConfig, SftConfig
from shoal.errors import ConfigError
from shoal.observability.run_dir import is_used, write_config

MAX_CHANGES = 12


def prepare_folder(loaded: Loaded[Any], config: RunConfig | SftConfig, resume: bool) -> list[str]:
    """Raises if the run may not start there; returns what to tell the user (what a resume changes)."""
    folder = Path(config.train.output_dir)
    note_run_folder(folder)
    shown = show(config.train.output_dir)
    place = f"{loaded.origins.at(('train', 'output_dir'))}: train.output_dir"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{place}: {shown} is a file; name a folder")
    if not is_used(folder):
        return [f"train.output_dir: nothing to resume in {shown} yet, starting from the first step"] if resume else []
    if not resume:
        raise ConfigError(
            f"{place}: {shown} already holds a run; continue it with --resume, "
            "or choose another folder with train.output_dir=DIR"
        )
    return _resume_changes(config, folder)


def _resume_changes(config: RunConfig | SftConfig, folder: Path) -> list[str]:
    """Rates and lengths may change and are told; what decides the data and the weights may not."""
    earlier = _earlier_config(config, folder / "config.yaml")
    if earlier is None:
        return []
    forbidden = forbidden_changes(earlier, config)
    if forbidden:
        way_out = "a resumed run may not change this; leave it as it was, or start another run"
        raise ConfigError("\n".join(f"{folder / 'config.yaml'}: {line}; {way_out}" for line in forbidden))
    ignored = ("train.resume_from_checkpoint",)
    changes = [line for line in difference_lines(earlier, config) if not line.startswith(ignored)]
    return [f"resume changes {line}" for line in changes[:MAX_CHANGES]]


def _earlier_config(config: Section, file: Path) -> Any:
    if not file.is_file():
        return None
    if isinstance(config, SftConfig):
        return resolve_sft(load_sft(str(file)).config)
    return resolve_run(load_run(str(file)).config)


def end_dry_run(config: RunConfig | SftConfig, resume: bool) -> None:
    """The last of a dry run: code of the user's is loaded, what this machine cannot do is noted, and the resolved
    configuration is printed and written.

    config.yaml alone; in the folder of a run that would be resumed the recorded one stays.
    """
    if isinstance(config, RunConfig):
        load_code(config.orch)
        load_code(config.train)
    note_machine(config.train)
    text, folder = as_yaml(config), Path(config.train.output_dir)
    say(text)
    if not (resume and is_used(folder)):
        write_config(folder, text)
