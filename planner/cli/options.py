"""Options that several commands share."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.console import style_for_stdout
from planner.core.errors import UsageError

if TYPE_CHECKING:
    from planner.show.terminal.style import Style

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="Plan; `-`: standard input.")]
ProfileFile = Annotated[str, typer.Argument(metavar="PROFILE", help="Profile; `-`: standard input.")]
ProfileFiles = Annotated[
    list[str],
    typer.Argument(metavar="PROFILE…", help="Profile, or one profile per tensor-parallel size; `-`: standard input."),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="Format of what is printed.")]
OrMarkdown = Annotated[str, typer.Option("--format", metavar="text|json|markdown", help="Format of what is printed.")]


MARKDOWN = ("text", "json", "markdown")


def formatted(value: Any, format_: str, *, text: Callable[[Any, "Style"], str], markdown: Callable[[Any], str]) -> str:
    """Return a command's result as text, JSON or Markdown.

    Args:
        value: Result of the command.
        format_: One of the formats `MARKDOWN`.
        text: Function that returns the result as text.
        markdown: Function that returns the result as Markdown.
    """
    from planner import files

    if format_ == "json":
        return files.json_text(value)
    return markdown(value) if format_ == "markdown" else text(value, style_for_stdout())


def check_format(name: str, formats: Collection[str] = ("text", "json")) -> bool:
    """Return True if the format is JSON; raise an error for an unknown format.

    Raises:
        UsageError: The format is not one of `formats`.
    """
    if name not in formats:
        raise UsageError(f"unknown `--format {name}`", hint=f"one of {', '.join(formats)}")
    return name == "json"
