"""Errors: exit code, message and hint."""

import pytest

from planner.core import errors
from planner.core.errors import (
    ExitCode,
    FileError,
    InfeasibleError,
    MeasurementError,
    ModelError,
    NoPlanFoundError,
    PlannerError,
    UsageError,
)


def test_exit_codes_are_the_documented_numbers() -> None:
    assert {code.name: int(code) for code in ExitCode} == {"OK": 0, "NO": 1, "ERROR": 2, "INTERRUPTED": 130}


@pytest.mark.parametrize("kind", [PlannerError, UsageError, ModelError, MeasurementError])
def test_errors_without_an_answer_exit_with_2(kind: type[PlannerError]) -> None:
    error = kind("it broke", hint="mend it")
    assert error.exit_code == 2
    assert isinstance(error, PlannerError)
    assert (error.message, error.hint, str(error)) == ("it broke", "mend it", "it broke")


def test_infeasible_problems_exit_with_1() -> None:
    assert InfeasibleError("no plan fits").exit_code == 1
    assert NoPlanFoundError("no plan fits, among the searched plans").exit_code == 1
    assert issubclass(InfeasibleError, PlannerError)


def test_missing_hints_are_empty() -> None:
    assert UsageError("no").hint == ""


@pytest.mark.parametrize(("line", "place"), [(17, "plan.yaml:17: bad"), (None, "plan.yaml: bad")])
def test_file_errors_begin_with_file_and_line(line: int | None, place: str) -> None:
    error = FileError("bad", path="plan.yaml", line=line, hint="mend it")
    assert str(error) == error.message == place
    assert (error.path, error.line, error.hint, error.exit_code) == ("plan.yaml", line, "mend it", 2)


def test_every_public_error_has_a_docstring() -> None:
    public = [value for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")]
    assert len(public) > 3
    assert [kind for kind in public if not (kind.__doc__ or "").strip()] == []
