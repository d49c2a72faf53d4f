"""Every error carries its exit code, what happened, and what to do."""

import pytest

from planner.core import errors
from planner.core.errors import (
    ExitCode,
    FileError,
    InfeasibleError,
    MeasurementError,
    ModelError,
    PlannerError,
    UsageError,
)


def test_exit_codes_are_the_documented_numbers() -> None:
    """They are public: scripts compare with them."""
    assert {code.name: int(code) for code in ExitCode} == {"OK": 0, "NO": 1, "ERROR": 2, "INTERRUPTED": 130}


@pytest.mark.parametrize("kind", [PlannerError, UsageError, ModelError, MeasurementError])
def test_an_error_without_an_answer_exits_with_2(kind: type[PlannerError]) -> None:
    """Bad usage, a broken model and a failed measurement answer nothing."""
    error = kind("it broke", hint="mend it")
    assert error.exit_code == 2
    assert isinstance(error, PlannerError)
    assert (error.message, error.hint, str(error)) == ("it broke", "mend it", "it broke")


def test_an_infeasible_problem_exits_with_1() -> None:
    """The question was answered, and the answer is no."""
    assert InfeasibleError("no plan fits").exit_code == 1
    assert issubclass(InfeasibleError, PlannerError)


def test_a_hint_may_be_left_out() -> None:
    """Then it is empty, not None."""
    assert UsageError("no").hint == ""


@pytest.mark.parametrize(("line", "place"), [(17, "plan.yaml:17: bad"), (None, "plan.yaml: bad")])
def test_a_file_error_begins_with_its_place(line: int | None, place: str) -> None:
    """`file:line: what`, so that editors can jump there; without a line only the file."""
    error = FileError("bad", path="plan.yaml", line=line, hint="mend it")
    assert str(error) == error.message == place
    assert (error.path, error.line, error.hint, error.exit_code) == ("plan.yaml", line, "mend it", 2)


def test_everything_public_is_documented() -> None:
    """Every exported error says in its docstring what it is for."""
    public = [value for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")]
    assert len(public) > 3
    assert [kind for kind in public if not (kind.__doc__ or "").strip()] == []
