"""`gpipe-plan compare`: plans beside each other."""

from typing import Annotated

import typer

from planner import api, files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, check_format

__all__ = ["compare"]

_FORMATS = ("text", "json", "markdown")


def compare(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN PLAN...", help="Two plans or more.")],
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Set plans beside each other: other caps, device counts, schedules. Of two, stage by stage as well."""
    check_format(format_, _FORMATS)
    comparison = api.compare(*plans)
    console = Console(quiet=False)
    if format_ == "json":
        console.result(files.dump(comparison, as_json=True))
    elif format_ == "markdown":
        from planner.show.gate import comparison_markdown  # noqa: PLC0415 - only where it is asked for

        console.result(comparison_markdown(comparison))
    else:
        from planner.show.terminal.plans import plans_text  # noqa: PLC0415 - likewise

        console.result(plans_text(comparison, style_for_stdout()))
