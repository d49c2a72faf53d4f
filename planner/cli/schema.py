"""`gpipe-plan schema`: the JSON Schema of our files."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.core.errors import UsageError

_KINDS = ("profile", "plan", "balance", "run", "links", "calibration", "partial")


def schema(
    kind: Annotated[str, typer.Argument(metavar="|".join(_KINDS), help="Which file.")],
) -> None:
    """Print the JSON Schema of a file, for editors and other tools."""
    import json

    from planner import files

    if kind not in _KINDS:
        raise UsageError(f"no schema called `{kind}`", hint=f"one of {', '.join(_KINDS)}")
    Console().result(json.dumps(files.json_schema(kind), indent=2))
