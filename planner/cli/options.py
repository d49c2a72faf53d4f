"""Options that several commands share."""

from collections.abc import Collection
from typing import Annotated

import typer

from planner.core.errors import UsageError

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="The plan; `-` is standard input.")]
ProfileFile = Annotated[str, typer.Argument(metavar="PROFILE", help="The profile; `-` is standard input.")]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results, warnings and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="How to print the result.")]
OrMarkdown = Annotated[str, typer.Option("--format", metavar="text|json|markdown", help="How to print it.")]


def check_format(name: str, formats: Collection[str] = ("text", "json")) -> bool:
    """Whether JSON is wanted.

    Raises:
        UsageError: Not one of `formats`.
    """
    if name not in formats:
        raise UsageError(f"unknown `--format {name}`", hint=f"one of {', '.join(formats)}")
    return name == "json"
