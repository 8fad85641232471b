"""What the scripts here ask of their arguments: a wrong one is one line that names it, and exit code 2."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shoal.envs.registry import load_environment
from shoal.errors import ArgumentError, ConfigError


class Parser(argparse.ArgumentParser):
    """As argparse's, but what it would print and exit with is raised."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"command line: {message}; see --help")


def at_least(smallest: int | float) -> Callable[[str], int | float]:
    """The type of a numeric argument, of the kind of `smallest`."""
    kind = type(smallest)

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not smallest <= value < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {smallest}, not {text!r}")
        return value

    return parse


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """What is refused inside was given as `argument`."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"command line: {argument}: {error}") from error


def gsm8k(data: str | None):
    """The questions of `--data`, or of the hub, read and checked."""
    with naming("--data"):
        environment = load_environment("gsm8k", {"path": data} if data else {})
        environment.tasks("train")
    return environment


def folder(name: str) -> Path:
    """The type of an argument that names a folder to write into."""
    if Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is a file; name a folder")
    if Path(name).is_dir() and any(Path(name).iterdir()):
        raise argparse.ArgumentTypeError(f"{name!r} has files in it, and none is overwritten; name another folder")
    return Path(name)
