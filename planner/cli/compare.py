"""`gpipe-plan compare`: compare plans."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.cli.options import MARKDOWN, OrMarkdown, Quiet, check_format, formatted, import_numpy_without_threads


def compare(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN PLAN...", help="Two or more plans.")],
    format_: OrMarkdown = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Compare plans, for example plans for different memory limits, devices or schedules."""
    import_numpy_without_threads()
    import planner
    from planner.show.gate import comparison_markdown
    from planner.show.terminal.plans import plan_comparison_text

    check_format(format_, MARKDOWN)
    compared = planner.compare(*plans)
    Console(quiet=quiet).result(formatted(compared, format_, text=plan_comparison_text, markdown=comparison_markdown))
