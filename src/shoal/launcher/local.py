"""`python -m shoal.launcher.local script.py --config file.yaml key=value …` calls `main` of the script.

The script calls `load_config` and `train`, which run the same checks and training as `shoal grpo`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shoal.cli.entry import guarded
from shoal.cli.output import say
from shoal.config.load import COMMAND_LINE
from shoal.config.problems import printable
from shoal.core.errors import EXIT_DONE, ConfigError
from shoal.envs.user_code import load_object
from shoal.launcher.read import KEYS, USAGE, parse_arguments, read_flat
from shoal.launcher.translate import LauncherTask, translate


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _launch(arguments), arguments)


def _launch(arguments: list[str]) -> int:
    if not arguments:
        raise ConfigError(f"{COMMAND_LINE}: the script is missing; {USAGE}")
    if arguments[0] in ("--help", "-h"):
        say(_help())
        return EXIT_DONE
    script, *rest = arguments
    if not script.endswith(".py"):
        raise ConfigError(f"{COMMAND_LINE}: {printable(script)}: the first argument is a Python script; {USAGE}")
    # Before the script is loaded, so that errors in a file are reported without the imports of the script.
    translate(read_flat(parse_arguments(rest)), LauncherTask())
    load_object(f"{script}:main")(rest)
    return EXIT_DONE


def _help() -> str:
    width = max(map(len, KEYS))
    rows = "\n".join(f"  {name:<{width}}  {', '.join(key.keys)}" for name, key in KEYS.items())
    return f"Usage: {USAGE}\n\nKeys, and the schema keys they set:\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
