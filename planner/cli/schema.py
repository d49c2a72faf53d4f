"""`gpipe-plan schema`: print the JSON Schema of our files."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.cli.options import Quiet, check_format
from planner.core.errors import UsageError

_KINDS = ("profile", "plan", "balance", "run", "links", "calibration", "partial")


def schema(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(_KINDS), help="Kind of file; partial: an unfinished profile.")
    ],
    format_: Annotated[str, typer.Option("--format", metavar="json", help="Output format.")] = "json",
    *,
    quiet: Quiet = False,
) -> None:
    """Print the JSON Schema of a kind of file."""
    import json

    from planner import files

    check_format(format_, ("json",))
    if kind not in _KINDS:
        raise UsageError(f"no schema called `{kind}`", hint=f"one of {', '.join(_KINDS)}")
    Console(quiet=quiet).result(json.dumps(files.json_schema(kind), indent=2))
