"""What a script of the launcher calls: `load_config`, `train` and `run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.build.load import load
from shoal.cli.entry import guarded
from shoal.cli.grpo import train_or_dry_run
from shoal.cli.output import notices
from shoal.config.schema import RunConfig
from shoal.core.errors import EXIT_DONE, ConfigError
from shoal.launcher.read import Arguments, parse_arguments, read_flat
from shoal.launcher.translate import LauncherTask, Translated, translate


@dataclass(frozen=True)
class LaunchConfig:
    """The result of `load_config`: the run in the schema (`run`), and the flags."""

    translated: Translated
    arguments: Arguments

    @property
    def run(self) -> RunConfig:
        return self.translated.loaded.config


def load_config(arguments: Sequence[str], *, env: str = "gsm8k", reward: Callable | str | None = None) -> LaunchConfig:
    """Read `--config file.yaml key=value …`. `reward` is a function of (task, messages)."""
    parsed = parse_arguments(arguments)
    return LaunchConfig(translate(read_flat(parsed), LauncherTask(env, _named(reward))), parsed)


def train(config: LaunchConfig) -> Path:
    """Train, and return the run directory, outputs/<experiment>/<trial>."""
    translated, arguments = config.translated, config.arguments
    notices(translated.notices)
    os.environ.update(translated.environment)
    try:
        run = load(translated.loaded, resume=arguments.resume, wording=translated.wording)
        train_or_dry_run(run, arguments.dry_run)
    except ConfigError as error:
        raise type(error)(translated.wording(str(error))) from None
    return Path(config.run.train.output_dir)


def run(main: Callable[[list[str]], object], arguments: Sequence[str] | None = None) -> int:
    """`sys.exit(run(main))`: call `main` with the arguments. Errors become one line and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)

    def work() -> int:
        main(words)
        return EXIT_DONE

    return guarded(work, words)


def _named(reward: Callable | str | None) -> str | None:
    """`file.py:function`, the reference to a function in the configuration, which a resumed run can load."""
    if reward is None or isinstance(reward, str):
        return reward
    file = Path(reward.__code__.co_filename)
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{reward.__qualname__}"
