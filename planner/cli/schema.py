"""`gpipe-plan schema`: the JSON Schema of our files."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.core.errors import UsageError

_KINDS = ("profile", "plan", "balance", "run", "links", "calibration", "partial")


def schema(
    kind: Annotated[str, typer.Argument(metavar="|".join(_KINDS), help="Which file.")],
    draft: Annotated[
        str, typer.Option(metavar="2020-12|7", help="The draft of JSON Schema; 7 is what most editors know.")
    ] = "2020-12",
) -> None:
    """Print the JSON Schema of a file, for editors and other tools."""
    import json

    from planner import files

    if kind not in _KINDS:
        raise UsageError(f"no schema called `{kind}`", hint=f"one of {', '.join(_KINDS)}")
    if draft not in files.DRAFTS:
        raise UsageError(f"unknown `--draft {draft}`", hint=f"one of {', '.join(files.DRAFTS)}")
    Console().result(json.dumps(files.json_schema(kind, draft), indent=2))
