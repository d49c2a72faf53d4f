"""`gpipe-plan compare`: compare plans."""

from typing import Annotated

import typer

from planner.cli.console import Console, style_for_stdout
from planner.cli.options import OrMarkdown, Quiet, check_format


def compare(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN PLAN...", help="Two or more plans.")],
    format_: OrMarkdown = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Compare plans, for example for other memory limits, devices or schedules."""
    from planner import api, files
    from planner.show.gate import comparison_markdown
    from planner.show.terminal.plans import plans_text

    writers = {
        "text": lambda comparison: plans_text(comparison, style_for_stdout()),
        "json": files.json_text,
        "markdown": comparison_markdown,
    }
    check_format(format_, writers)
    Console(quiet=quiet).result(writers[format_](api.compare(*plans)))
