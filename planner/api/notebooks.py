"""Results that show themselves in notebooks. The core draws nothing, so what returns a result attaches the picture."""

from typing import Any


def shown_in_notebooks(kind: type[Any]) -> None:
    """Make values of a class show themselves in Jupyter as `planner.show.notebook` draws them."""
    kind._repr_html_ = _html


def _html(value: Any) -> str:
    from planner.show.notebook import html_of  # noqa: PLC0415 - for notebooks alone

    return html_of(value)
