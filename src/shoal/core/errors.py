"""The errors that Shoal raises on purpose, each with the exit code of the command.

Any other exception is a bug: the command exits with code 70 and writes a crash bundle.
"""

from __future__ import annotations

from typing import Any

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_STORAGE = 4
EXIT_LOCKED = 5
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class ShoalError(Exception):
    """Base class. Users see the message as it is, so it says what to do."""

    exit_code = EXIT_BUG


class ConfigError(ShoalError):
    """The command line, the configuration or the data is wrong. Raised before a model loads."""

    exit_code = EXIT_USAGE


class ArgumentError(ConfigError, ValueError):
    """An argument of a Python function is wrong; the message starts with its name."""


class DataError(ConfigError):
    """A data set cannot be read or has no usable rows."""


class UsedFolderError(ConfigError):
    """The folder already has a run, and --resume was not given."""


class HardwareError(ConfigError):
    """This machine does not support a valid configuration; the message names a setting that works."""


class ModelError(ConfigError):
    """A model cannot be loaded, or its architecture is not supported."""


class StoppedByPolicy(ShoalError):
    """The run stopped because training cannot continue usefully, such as after repeated non-finite gradients."""

    exit_code = EXIT_STOPPED


class MemoryStop(StoppedByPolicy):
    """The device ran out of memory while training."""


class UserCodeError(StoppedByPolicy, ValueError):
    """A loss, an advantage or a filter written by the user raised an error or returned an unusable value."""


class EpisodeError(Exception):
    """A stateful environment failed in one rollout. `score` has the status and the error of that rollout."""

    def __init__(self, score: Any) -> None:
        super().__init__(score.error)
        self.score = score


class RewardServerError(StoppedByPolicy):
    """The process that runs the rewards ended, so no rollout can be scored."""


class EngineError(StoppedByPolicy):
    """The rollout engine stopped, or violated its protocol."""


class RequestError(EngineError):
    """The engine rejects one request; other requests are not affected."""


class NonFiniteError(EngineError):
    """The served weights produce NaN or infinity. They are not saved; the last checkpoint stays the newest."""


class DeadlineError(StoppedByPolicy):
    """A wait passed its deadline; the message names what was waited for."""


class LostRanksError(DeadlineError):
    """Other processes of this run ended or do not respond; their logs have the reason."""


class StorageError(ShoalError):
    """The run directory could not be written or a checkpoint could not be read."""

    exit_code = EXIT_STORAGE


class RunLockedError(ShoalError):
    """Another process uses the run directory; the message names the process."""

    exit_code = EXIT_LOCKED


class Interrupted(ShoalError):
    """A signal stopped the run, and the state was saved."""

    def __init__(self, message: str, exit_code: int = EXIT_INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """A signal ended the process before training began. Like Ctrl-C, it passes handlers of `Exception`."""

    def __init__(self, message: str, exit_code: int = EXIT_TERMINATED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
