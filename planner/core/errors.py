"""Errors and exit codes.

    PlannerError            exit 2: no answer
    ├── UsageError          an option or argument is wrong
    ├── MissingPackageError a package is not installed that comes with an extra
    ├── FileError           a file is missing, unreadable or invalid (carries path and line)
    │   └── StaleError      exit 1: it was made from something that has changed since
    ├── ModelError          the user's model could not be loaded, cut, or run
    ├── MeasurementError    a layer could not be measured
    ├── TrainingError       a stage failed while it trained
    ├── SolverError         the solver failed, or ran out of time
    └── InfeasibleError     exit 1: the question was answered, and the answer is no plan

Every error says what happened with the values, and in `hint` what to do.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `gpipe-plan` command."""

    OK = 0
    """Done; for `check`: the plan fits."""
    NO = 1
    """The answer is no: over the cap, no feasible plan, plan or profile stale."""
    ERROR = 2
    """No answer: bad usage, unreadable or invalid file, model did not import, solver failed, bug."""
    INTERRUPTED = 130
    """Interrupted (Ctrl-C)."""


class PlannerError(Exception):
    """Base of every error this package raises on purpose.

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
    """An option or argument is wrong or contradicts another."""


class MissingPackageError(PlannerError):
    """A package is not installed that comes with an extra (`planner.core.extras`); the hint is what to type."""


class FileError(PlannerError):
    """A file is missing, unreadable, or its content is invalid.

    Args:
        message: What is wrong.
        path: The file as the user named it.
        line: Line number in it, from 1, where known.
        hint: What to do about it.
    """

    def __init__(self, message: str, *, path: str, line: int | None = None, hint: str = "") -> None:
        place = path if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {message}", hint=hint)
        self.path = path
        self.line = line


class StaleError(FileError):
    """A file was made from another one, which has changed since: the answer is no, make it anew."""

    exit_code = ExitCode.NO


class ModelError(PlannerError):
    """The user's model could not be loaded, turned into a chain, or run."""


class MeasurementError(PlannerError):
    """A layer could not be measured on this device."""


class TrainingError(PlannerError):
    """A stage failed while it trained: it died, hung, ran out of memory, or computed what is no number."""


class SolverError(PlannerError):
    """The solver gave no answer: it failed, or its time ran out before it found a plan."""


class InfeasibleError(PlannerError):
    """The problem was solved: no plan satisfies the limits."""

    exit_code = ExitCode.NO
