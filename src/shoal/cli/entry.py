"""Where the `shoal` command starts: the verbs, and the one place where an error becomes a message and an exit code.

Verbs are named by import path and loaded when they are called, so `shoal --help` imports none of them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from shoal.cli.bytecode import kept_bytecode
from shoal.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STORAGE,
    EXIT_USAGE,
    DeadlineError,
    ShoalError,
    Terminated,
)

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

FAILED_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # no bug, wherever it is met
YOUNG_OBJECTS = 50_000  # that Python makes before it looks for cycles among them
VERBS = {
    "grpo": ("shoal.cli.grpo:grpo", "Train with GRPO: one command, one process a device."),
    "grpo-infer": (
        "shoal.cli.infer:grpo_infer",
        "Serve a model over HTTP (OpenAI-compatible); the split layout's server.",
    ),
    "grpo-orch": ("shoal.cli.split:grpo_orch", "Split layout: the orchestrator."),
    "grpo-train": ("shoal.cli.split:grpo_train", "Split layout: the trainer."),
    "sft": ("shoal.cli.sft:sft", "Train on given completions (supervised)."),
    "eval": ("shoal.cli.eval:evaluate", "Score a model on an environment, or compare two."),
    "report": ("shoal.cli.report:report", "Write one page about one or several runs."),
    "watch": ("shoal.cli.watch:watch", "Serve a live page of a run on this machine."),
    "show": ("shoal.cli.show:show", "Print rollouts of a run, tokens tinted."),
    "doctor": ("shoal.cli.doctor:doctor", "Say what goes wrong in a run, or check the machine."),
    "explain": ("shoal.cli.explain:explain", "Say what a metric means and what to change."),
    "export": ("shoal.cli.export:export", "Write a folder to publish: adapters merged, a model card."),
    "envs": ("shoal.cli.envs:app", "List the environments, show one, or start one."),
    "shapes": ("shoal.cli.shapes:shapes", "List the layouts a recipe may ask for."),
    "make-model": ("shoal.cli.make_model:make_model", "Build a small or a random model."),
    "init": ("shoal.cli.init:init", "Write the example configurations into a folder."),
    "config-reference": ("shoal.cli.config_reference:config_reference", "Print every configuration key."),
    "demo": ("shoal.cli.demo:demo", "Train a tiny model on the CPU, end to end."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises and never shows a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: run_command(arguments), arguments)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Libraries and a model are a million objects that stay. Looking through them for cycles as often as Python would
    takes a fifth of the time to import them, and later a fifth of a second in the middle of a step."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _fill_streams() -> None:
    """What was closed before Python started leads nowhere; else the next file that is opened would be the output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each gets the lowest number: its own
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # for whatever this process starts as well
            setattr(sys, name, os.fdopen(nowhere, mode))


def _say(message: str, _: BaseException) -> None:
    from shoal.cli.output import complain

    complain(message)


def _mute_output() -> None:
    from shoal.cli.output import mute

    mute(sys.stdout)


def _leave(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def guarded(
    work: Callable[[], int], arguments: Sequence[str], tell: Callable[[str, BaseException], None] = _say
) -> int:
    """What any command of Shoal ends with: an exit code, and one line where something went wrong, for `tell`."""
    _fill_streams()
    code = EXIT_DONE
    try:
        with _few_collections(), kept_bytecode():
            code = work()
        sys.stdout.flush()  # a full disk is noticed here, and not when the exit code is settled
        return code
    except DeadlineError as error:
        tell(str(error), error)
        _leave(error.exit_code)  # a thread hangs, and Python would wait for it
    except ShoalError as error:
        tell(str(error), error)
        return error.exit_code
    except Terminated as error:
        tell(str(error), error)
        _leave(error.exit_code)  # raised anywhere, perhaps where a thread was being started: none is waited for
    except KeyboardInterrupt as error:
        tell("interrupted", error)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _mute_output()  # the reader went away (`shoal envs | head`)
        return code
    except OSError as error:
        if error.errno not in FAILED_DISK:
            return _bug(error, arguments, tell)
        _mute_output()
        tell(_storage_problem(error), error)
        return EXIT_STORAGE
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_USAGE
    except ModuleNotFoundError as error:
        if not error.name or "." in error.name or error.name == "shoal":  # a part of what is there: versions differ
            return _bug(error, arguments, tell)
        tell(_missing(error.name, error), error)
        return EXIT_USAGE
    except Exception as error:
        return _bug(error, arguments, tell)


def _storage_problem(error: OSError) -> str:
    """Whatever writes a file says which; what has no name is stdout (`shoal report RUN --json > FILE`)."""
    from shoal.observability.atomic import storage_error

    return str(storage_error(f"write {error.filename or 'the output'}", error))


def _missing(package: str, error: ModuleNotFoundError) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    importer = trace.tb_frame.f_globals.get("__name__", "").split(".")[0] if trace else ""
    wanted = f", which {importer} imports," if importer not in ("", "shoal", "importlib") else ""
    again = "install Shoal again with all it needs (`make venv` in a clone)"
    return f"the Python package {package}{wanted} is missing; {again}"


def _bug(error: Exception, arguments: Sequence[str], tell: Callable[[str, BaseException], None]) -> int:
    from shoal.cli.crash import write_crash_bundle

    bundle = write_crash_bundle(error, arguments)
    tell(f"a bug in Shoal: {type(error).__name__}; the details are in {bundle}", error)
    return EXIT_BUG


def _overview() -> str:
    """What `shoal --help` prints. Made here, because loading a parser for it would take most of the time."""
    width = max(len(name) for name in VERBS)
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items())
    return (
        "Usage: shoal COMMAND [ARGS]\n\nPost-train language models with GRPO.\n\n"
        f"Commands:\n{verbs}\n\nMore about one: shoal COMMAND --help. Version: shoal --version"
    )


def run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_overview())
        return EXIT_DONE
    return _dispatch(arguments)


def make_app() -> App:
    """The parser of all verbs; none of them is imported yet."""
    from cyclopts import App

    import shoal

    app = App(
        name="shoal",
        help="Post-train language models with GRPO.",
        version=shoal.__version__,
        help_flags=["--help", "-h"],
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    for name, (target, summary) in VERBS.items():
        app.command(target, name=name, help=summary)
    return app


def _dispatch(arguments: list[str]) -> int:
    from cyclopts import CycloptsError

    try:
        result = make_app()(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        hint = _key_hint(str(error)) if arguments[0].startswith("grpo") else ""
        verb = " ".join(["shoal", *(error.command_chain or ())])
        return _complain(f"{_usage_problem(error)}; {hint}see `{verb} --help`", EXIT_USAGE)
    return result if isinstance(result, int) else EXIT_DONE


def _usage_problem(error: CycloptsError) -> str:
    """Cyclopts' own words, which name the nearest command or flag; the list of all commands is left to --help."""
    from cyclopts import MissingArgumentError

    missing = error.argument if isinstance(error, MissingArgumentError) else None
    if missing is not None and missing.index is not None:  # it stands by its place, and nobody writes its name
        return f"`shoal {' '.join(error.command_chain or ())}` needs {missing.names[0].lstrip('-').upper()}"
    return " ".join(str(error).split()).split(" Available commands:")[0].rstrip(".")


def _key_hint(message: str) -> str:
    """A key written as an option: `--learning_rate 1e-5` for `train.learning_rate=1e-5`."""
    from shoal.config.schema import SECTIONS

    found = re.search(r"Unknown option: .?--([\w-]+)", message)
    key = found.group(1).replace("-", "_") if found else ""
    section = next((name for name, known in SECTIONS.items() if key in known.model_fields), None)
    return f"keys are written as {section}.{key}=VALUE; " if section else ""


def _complain(message: str, code: int) -> int:
    from shoal.cli.output import complain

    complain(message)
    return code
