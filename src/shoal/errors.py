"""Every error Shoal raises on purpose, as one tree. Each class knows the exit code the command ends with.

Anything else is a bug, unless a Python package is missing: the command ends with 70 and leaves a crash bundle.
"""

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_STOPPED = 3
EXIT_STORAGE = 4
EXIT_LOCKED = 5
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class ShoalError(Exception):
    """Base of the tree. The message is shown to the user as it is, so it says what to do."""

    exit_code = EXIT_BUG


class ConfigError(ShoalError):
    """Wrong command line, configuration or data, found before any model loads."""

    exit_code = EXIT_USAGE


class ArgumentError(ConfigError, ValueError):
    """A wrong argument of a Python surface; the message starts with its name."""


class DataError(ConfigError):
    """A data set that cannot be read or holds nothing usable."""


class UsedFolderError(ConfigError):
    """The folder holds a run already, and --resume was not said."""


class HardwareError(ConfigError):
    """The configuration is valid but this machine cannot do it; the message names a setting that works."""


class ModelError(ConfigError):
    """A model that cannot be loaded, or whose architecture Shoal refuses by name."""


class StoppedByPolicy(ShoalError):
    """A budget ran out (non-finite steps, reward failures, flat groups, engine errors); state is saved."""

    exit_code = EXIT_STOPPED


class MemoryStop(StoppedByPolicy):
    """The device ran out of memory while training."""


class UserCodeError(StoppedByPolicy, ValueError):
    """A loss, an advantage or a filter of the user's own raised, or returned what cannot be used."""


class RewardServerError(StoppedByPolicy):
    """The process that runs all rewards is gone; no rollout could be scored any more."""


class EngineError(StoppedByPolicy):
    """The rollout engine died or broke its contract."""


class RequestError(EngineError):
    """The engine refuses one request for what it asks; the others and the engine are unharmed."""


class NonFiniteError(EngineError):
    """The weights that are served compute what is no number. They are not worth a checkpoint; the last one stands."""


class DeadlineError(StoppedByPolicy):
    """A wait passed its deadline; the message names who waited for whom."""


class LostRanksError(DeadlineError):
    """The other processes of this run are gone, or do not answer; the reason is with one of them."""


class StorageError(ShoalError):
    """The run directory could not be written or a checkpoint could not be read."""

    exit_code = EXIT_STORAGE


class RunLockedError(ShoalError):
    """Another process holds the run directory; the message names it."""

    exit_code = EXIT_LOCKED


class Interrupted(ShoalError):
    """SIGINT or SIGTERM arrived and the state was saved."""

    def __init__(self, message: str, exit_code: int = EXIT_INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(KeyboardInterrupt):
    """A signal before there was a step to finish. As Ctrl-C is: no handler of other errors takes it."""

    def __init__(self, message: str, exit_code: int = EXIT_TERMINATED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
