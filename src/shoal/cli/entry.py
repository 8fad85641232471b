"""The entry point of the `shoal` command: the list of verbs, and the one place where an error becomes a message and
an exit code.

Verbs are named by import path and imported when they are called, so `shoal --help` imports none of them. An exception
that is not a ShoalError is a bug: its details are written into a crash file.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shoal.core.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STORAGE,
    EXIT_USAGE,
    DeadlineError,
    ShoalError,
    Terminated,
)
from shoal.runs.secrets import redact

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError


LARGEST_PACKAGE = "torch"  # whether its bytecode is cached stands for all packages
OTHERS_WRITE = 0o022


@contextlib.contextmanager
def kept_bytecode() -> Iterator[None]:
    """Cache bytecode in the user's cache folder if Python caches it nowhere: many container images disable it
    (PYTHONDONTWRITEBYTECODE) or are read-only, and then each start compiles four thousand modules again.

    A PYTHONPYCACHEPREFIX that the user set is kept.
    """
    before = sys.pycache_prefix, sys.dont_write_bytecode
    if sys.pycache_prefix is None and _is_compiled_every_time() and (folder := _own_folder()) is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _is_compiled_every_time() -> bool:
    spec = PathFinder.find_spec(LARGEST_PACKAGE)
    if spec is None or spec.origin is None:
        return False
    compiled = Path(cache_from_source(spec.origin))
    folder = compiled.parent if compiled.parent.exists() else compiled.parent.parent
    return not compiled.exists() and (sys.dont_write_bytecode or not os.access(folder, os.W_OK))


def _own_folder() -> Path | None:
    """A folder that only this user can write, because its content is executed. None if there is none."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "shoal" / "bytecode"
        if not cache.is_absolute():
            return None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        return None
    own = found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE
    return folder if own and os.access(folder, os.W_OK) else None


_run_folder: list[Path] = []


def note_run_folder(folder: Path) -> None:
    """Write later crash files into this folder, if it exists by then."""
    _run_folder[:] = [folder]


def write_crash_bundle(error: BaseException, arguments: Sequence[str]) -> Path | str:
    text = redact(_bundle_text(error, arguments))
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    for folder in [*(known for known in _run_folder if known.is_dir()), Path(tempfile.gettempdir())]:
        with suppress(OSError):
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return path
    return "no file, because none could be written"


def _bundle_text(error: BaseException, arguments: Sequence[str]) -> str:
    import shoal

    versions = f"shoal {shoal.__version__}, Python {platform.python_version()}, {platform.platform()}"
    loaded = sorted(name for name in ("torch", "transformers", "peft", "numpy") if name in sys.modules)
    modules = ", ".join(f"{name} {getattr(sys.modules[name], '__version__', '?')}" for name in loaded)
    trace = "".join(traceback.format_exception(error))
    return f"{versions}\n{modules}\narguments: {list(arguments)!r}\n\n{trace}"


FAILED_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # not a bug of Shoal
YOUNG_OBJECTS = 50_000  # new objects before Python collects garbage
VERBS = {
    "grpo": ("shoal.cli.grpo:grpo", "Train with GRPO in one process per device."),
    "grpo-infer": (
        "shoal.cli.split:grpo_infer",
        "Serve a model over HTTP (OpenAI-compatible). Split layout: the server.",
    ),
    "grpo-orch": ("shoal.cli.split:grpo_orch", "Split layout: the orchestrator."),
    "grpo-train": ("shoal.cli.split:grpo_train", "Split layout: the trainer."),
    "serve": ("shoal.cli.serve:serve", "Serve a model or run over HTTP (OpenAI-compatible)."),
    "chat": ("shoal.cli.serve:chat", "Talk to a model or run in the terminal."),
    "sft": ("shoal.cli.sft:sft", "Train on given completions (supervised)."),
    "dpo": ("shoal.cli.sft:dpo", "Train on pairs of a chosen and a rejected completion (preference data)."),
    "eval": ("shoal.cli.eval:evaluate", "Score a model on an environment, or compare two."),
    "report": ("shoal.cli.inspect_run:report", "Write one page about one or several runs."),
    "watch": (
        "shoal.cli.inspect_run:watch",
        "Serve a live page of a run, or of all runs in a folder, on this machine.",
    ),
    "show": ("shoal.cli.inspect_run:show", "Print rollouts of a run with colored tokens."),
    "doctor": ("shoal.cli.inspect_run:doctor", "Diagnose problems in a run, or check the machine."),
    "explain": ("shoal.cli.inspect_run:explain", "Explain a metric: meaning, healthy range, what to change."),
    "export": ("shoal.cli.make_files:export", "Write a folder to publish: merged weights and a model card."),
    "envs": ("shoal.cli.envs:app", "List environments, show one, or create one."),
    "plan": ("shoal.cli.plan:plan", "Predict step time, memory and cost of a run, without a GPU."),
    "shapes": ("shoal.cli.make_files:shapes", "List the layouts that a recipe can request."),
    "make-model": ("shoal.cli.make_files:make_model", "Create a model with random weights."),
    "init": ("shoal.cli.make_files:init", "Write the example configurations into a folder."),
    "config-reference": ("shoal.cli.make_files:config_reference", "Print every configuration key."),
    "schema": ("shoal.cli.make_files:schema", "Print the JSON schema of the configuration, for editors."),
    "demo": ("shoal.cli.make_files:demo", "Train a tiny model on the CPU from start to end."),
}


# Names that other systems use, or that are easily tried.
TAKEN_SECTIONS = {"serve": ("infer",), "chat": ("infer",), "sft": ("train",)}  # of which a command takes overrides
SIMILAR = {"train": "grpo", "rl": "grpo", "infer": "serve", "evaluate": "eval", "generate": "chat", "finetune": "sft"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises and never shows a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: run_command(arguments), arguments)


@contextlib.contextmanager
def _collect_garbage_rarely() -> Iterator[None]:
    """Collect garbage less often. Libraries and a model are a million objects that stay. Scanning them takes a fifth of
    the import time, and later 0.2 s in the middle of a step."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _fill_streams() -> None:
    """Open closed standard streams as /dev/null. Otherwise the next file that is opened would receive the output."""
    for name, mode in (
        ("stdin", "r"),
        ("stdout", "w"),
        ("stderr", "w"),
    ):  # open() returns the lowest number
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # for child processes too
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
    """Run a command and return its exit code. `tell` receives one line if it fails."""
    _fill_streams()
    code = EXIT_DONE
    try:
        with _collect_garbage_rarely(), kept_bytecode():
            code = work()
        sys.stdout.flush()  # a full disk must be noticed before the exit code is known
        return code
    except DeadlineError as error:
        tell(str(error), error)
        _leave(error.exit_code)  # Python would wait for the thread that hangs
    except ShoalError as error:
        tell(str(error), error)
        return error.exit_code
    except Terminated as error:
        tell(str(error), error)
        _leave(error.exit_code)  # may be raised while a thread starts: do not wait for threads
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
        if not error.name or "." in error.name or error.name == "shoal":  # versions do not match
            return _bug(error, arguments, tell)
        tell(_missing(error.name, error), error)
        return EXIT_USAGE
    except Exception as error:
        return _bug(error, arguments, tell)


def _storage_problem(error: OSError) -> str:
    """Errors of files have a name. Without a name it is stdout (`shoal report RUN --json > FILE`)."""
    from shoal.runs.files import storage_error

    return str(storage_error(f"write {error.filename or 'the output'}", error))


def _missing(package: str, error: ModuleNotFoundError) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    importer = trace.tb_frame.f_globals.get("__name__", "").split(".")[0] if trace else ""
    wanted = f", which {importer} imports," if importer not in ("", "shoal", "importlib") else ""
    again = "install Shoal again with its dependencies (`make venv` in a clone)"
    return f"the Python package {package}{wanted} is missing; {again}"


def _bug(error: Exception, arguments: Sequence[str], tell: Callable[[str, BaseException], None]) -> int:

    bundle = write_crash_bundle(error, arguments)
    tell(f"a bug in Shoal: {type(error).__name__}; the details are in {bundle}", error)
    return EXIT_BUG


def _overview() -> str:
    """The text of `shoal --help`. Written without the parser, whose import would take most of the time."""
    width = max(len(name) for name in VERBS)
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items())
    return (
        "Usage: shoal COMMAND [ARGS]\n\nPost-train language models with GRPO.\n\n"
        f"Commands:\n{verbs}\n\nMore about one: shoal COMMAND --help. Version: shoal --version\n"
        "Completion for the current shell: shoal --install-completion"
    )


def run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_overview())
        return EXIT_DONE
    if (meant := SIMILAR.get(arguments[0])) is not None:
        return _complain(f"there is no command {arguments[0]}; use `shoal {meant}`, see `shoal --help`", EXIT_USAGE)
    return _dispatch(arguments)


def make_app() -> App:
    """The parser of all verbs. Imports none of them."""
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
    app.register_install_completion_command(help="Install completion for the current shell.")
    return app


def _dispatch(arguments: list[str]) -> int:
    from cyclopts import CycloptsError

    try:
        result = make_app()(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        hint = _key_hint(arguments[0], str(error))
        verb = " ".join(["shoal", *(error.command_chain or ())])
        return _complain(f"{_usage_problem(error)}; {hint}see `{verb} --help`", EXIT_USAGE)
    return result if isinstance(result, int) else EXIT_DONE


def _usage_problem(error: CycloptsError) -> str:
    """The message of Cyclopts, which names the nearest command or flag, without its list of all commands."""
    from cyclopts import MissingArgumentError, UnusedCliTokensError

    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {' '.join(error.unused_tokens or ())}"
    missing = error.argument if isinstance(error, MissingArgumentError) else None
    if missing is not None and (missing.index is not None or missing.required):
        name = missing.names[0]
        needed = f"{name} VALUE" if missing.index is None else name.lstrip("-").upper()  # a position has no name
        return f"`shoal {' '.join(error.command_chain or ())}` needs {needed}"
    return " ".join(str(error).split()).split(" Available commands:")[0].rstrip(".")


def _key_hint(verb: str, message: str) -> str:
    """A hint if a key was written as an option: `--learning_rate 1e-5` for `train.learning_rate=1e-5`."""
    from shoal.config.schema import SECTIONS

    found = re.search(r"Unknown option: .?--([\w-]+)", message)
    key = found.group(1).replace("-", "_") if found else ""
    taken = SECTIONS if verb.startswith("grpo") else TAKEN_SECTIONS.get(verb, ())
    section = next((name for name in taken if key in SECTIONS[name].model_fields), None)
    return f"keys are written as {section}.{key}=VALUE; " if section else ""


def _complain(message: str, code: int) -> int:
    from shoal.cli.output import complain

    complain(message)
    return code
