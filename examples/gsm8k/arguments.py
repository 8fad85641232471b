"""Argument parsing of the scripts here. A wrong argument gives a one-line error that names it, and exit code 2."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shoal.core.errors import ArgumentError, ConfigError
from shoal.envs.registry import load_environment


class Parser(argparse.ArgumentParser):
    """Like argparse.ArgumentParser, but raises an error instead of printing it and exiting."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"command line: {message}; see --help")


def at_least(smallest: int | float) -> Callable[[str], int | float]:
    """An argparse type: a number of the type of `smallest` and not below it."""
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
    """Put the name of the argument in front of configuration errors raised inside the block."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"command line: {argument}: {error}") from error


def gsm8k(data: str | None):
    """Read and check the questions of `--data`, or of the hub without it."""
    with naming("--data"):
        environment = load_environment("gsm8k", {"path": data} if data else {})
        environment.tasks("train")
    return environment


def folder(name: str) -> Path:
    """An argparse type: a folder to write into. It must be new or empty."""
    if Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name!r} is a file; name a folder")
    if Path(name).is_dir() and any(Path(name).iterdir()):
        raise argparse.ArgumentTypeError(f"{name!r} is not empty, and files are never overwritten; name another folder")
    return Path(name)
