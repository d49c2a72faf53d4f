"""Options that several commands share."""

from typing import Annotated

import typer

from planner.core.errors import UsageError

__all__ = ["Debug", "Format", "Quiet", "check_format"]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results, warnings and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="How to print the result.")]


def check_format(name: str, formats: tuple[str, ...] = ("text", "json")) -> bool:
    """Whether JSON is wanted.

    Raises:
        UsageError: Not one of `formats`.
    """
    if name not in formats:
        raise UsageError(f"unknown `--format {name}`", hint=f"one of {', '.join(formats)}")
    return name == "json"
