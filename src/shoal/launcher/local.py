"""`python -m shoal.launcher.local script.py --config file.yaml key=value …`: runs the script's `main` with the rest.

Sampling and training run in this process, so there is no server to manage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shoal.cli.entry import guarded
from shoal.cli.output import say
from shoal.config.load import COMMAND_LINE
from shoal.config.problems import printable
from shoal.envs.user_code import load_object
from shoal.errors import EXIT_DONE, ConfigError
from shoal.launcher.read import USAGE, parse_arguments, read_flat
from shoal.launcher.translate import Task, translate
from shoal.surfaces.launcher import KEYS, SCHEMA_KEYS


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _launch(arguments), arguments)


def _launch(arguments: list[str]) -> int:
    if not arguments:
        raise ConfigError(f"{COMMAND_LINE}: there is no script; {USAGE}")
    if arguments[0] in ("--help", "-h"):
        say(_help())
        return EXIT_DONE
    script, *rest = arguments
    if not script.endswith(".py"):
        raise ConfigError(f"{COMMAND_LINE}: {printable(script)}: the first argument is a Python script; {USAGE}")
    # Before the script is loaded: what is wrong in a file is said without what the script may import.
    translate(read_flat(parse_arguments(rest)), Task())
    load_object(f"{script}:main")(rest)
    return EXIT_DONE


def _help() -> str:
    width = max(map(len, KEYS))
    rows = "\n".join(f"  {key:<{width}}  {SCHEMA_KEYS[key]}" for key in KEYS)
    return f"Usage: {USAGE}\n\nKeys, and what they are in the configuration of a run:\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
