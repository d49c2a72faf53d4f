"""Errors and exit codes.

    PlannerError            exit 2: no result
    ├── UsageError          an option or argument is wrong
    ├── MissingPackageError a package of an extra is not installed
    ├── FileError           a file is missing, unreadable or invalid (carries path and line)
    │   └── StaleError      exit 1: the source of a file has changed since
    ├── ModelError          the user's model could not be loaded, cut, or run
    ├── MeasurementError    a layer could not be measured
    ├── TrainingError       a stage failed during training
    ├── SolverError         the solver failed, or found no plan in time
    │   └── NoPlanFoundError    exit 1: no plan within the limits was found
    └── InfeasibleError     exit 1: no plan satisfies the limits

The message of an error includes the values; `hint` says what to do.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `gpipe-plan` command."""

    OK = 0
    """Success; for `check`, the plan fits."""
    NO = 1
    """Negative result: memory limit exceeded, no feasible plan, or a stale plan or profile."""
    ERROR = 2
    """No result: wrong usage, invalid file, failed import of the model, failed solver, or a bug."""
    INTERRUPTED = 130
    """Interruption (Ctrl-C)."""


class PlannerError(Exception):
    """Base class of all errors of this package.

    Args:
        message: What happened, with the values; lower case, no final full stop.
        hint: What to do about it; empty when the message already says it.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PlannerError):
    """Error in an option or argument, or a contradiction between two of them."""


class MissingPackageError(PlannerError):
    """Error about a missing package of an extra (`planner.core.extras`); the hint is the command to install it."""


class FileError(PlannerError):
    """Error about a missing, unreadable or invalid file.

    Args:
        message: What is wrong.
        path: Path as the user wrote it.
        line: Line number, from 1; None if unknown.
        hint: What to do about it.
    """

    def __init__(self, message: str, *, path: str, line: int | None = None, hint: str = "") -> None:
        place = path if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {message}", hint=hint)
        self.path = path
        self.line = line


class StaleError(FileError):
    """Error about a file that is out of date, because the file that it was made from has changed."""

    exit_code = ExitCode.NO


class ModelError(PlannerError):
    """Error about a user's model that cannot be loaded, turned into a chain, or run."""


class MeasurementError(PlannerError):
    """Error about a layer that cannot be measured on this device."""


class TrainingError(PlannerError):
    """Error about a stage that failed during training: a crash, a hang, lack of memory, or a NaN."""


class SolverError(PlannerError):
    """Error of the solver: it failed, or found no plan within the time limit."""


class NoPlanFoundError(SolverError):
    """Error for a request for which the search found no plan within its limits, although there may be one."""

    exit_code = ExitCode.NO


class InfeasibleError(PlannerError):
    """Error for a request that provably has no plan within its limits."""

    exit_code = ExitCode.NO
