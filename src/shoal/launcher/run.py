"""From the launcher's arguments to a training run: what a script calls, and what ends its process.

The checks, the run directory and the training are those of `shoal grpo`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.entry import guarded
from shoal.cli.grpo import train_loaded
from shoal.cli.output import notices
from shoal.config.schema import RunConfig
from shoal.errors import EXIT_DONE, ConfigError
from shoal.launcher.read import Arguments, parse_arguments, read_flat
from shoal.launcher.translate import Task, Translated, translate


@dataclass(frozen=True)
class LaunchConfig:
    """What `load_config` read: the run in the one schema (`run`), and the flags it was started with."""

    translated: Translated
    arguments: Arguments

    @property
    def run(self) -> RunConfig:
        return self.translated.loaded.config


def load_config(arguments: Sequence[str], *, env: str = "gsm8k", reward: Callable | str | None = None) -> LaunchConfig:
    """Read `--config file.yaml key=value …`. A reward of the script's own is a function of (task, messages)."""
    parsed = parse_arguments(arguments)
    return LaunchConfig(translate(read_flat(parsed), Task(env, _named(reward))), parsed)


def train(config: LaunchConfig) -> Path:
    """Train as the configuration says; returns the run directory, outputs/<experiment>/<trial>."""
    translated, arguments = config.translated, config.arguments
    notices(translated.notices)
    os.environ.update(translated.environment)
    try:
        train_loaded(translated.loaded, resume=arguments.resume, dry_run=arguments.dry_run, wording=translated.wording)
    except ConfigError as error:
        raise type(error)(translated.wording(str(error))) from None
    return Path(config.run.train.output_dir)


def run(main: Callable[[list[str]], object], arguments: Sequence[str] | None = None) -> int:
    """`sys.exit(run(main))`: call a script's main with the arguments; errors become one line and an exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)

    def work() -> int:
        main(words)
        return EXIT_DONE

    return guarded(work, words)


def _named(reward: Callable | str | None) -> str | None:
    """`file.py:function`: the name under which the configuration keeps a function, so that a resumed run finds it."""
    if reward is None or isinstance(reward, str):
        return reward
    file = Path(reward.__code__.co_filename)
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{reward.__qualname__}"
