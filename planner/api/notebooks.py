"""HTML output of results in notebooks."""

from typing import Any


def enable_notebook_display(kind: type[Any]) -> None:
    """Make Jupyter show values of the class `kind` as HTML (`planner.show.notebook`)."""
    kind._repr_html_ = _html


def _html(value: Any) -> str:
    from planner.show.notebook import result_html  # noqa: PLC0415 - for notebooks alone

    return result_html(value)
