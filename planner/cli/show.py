"""`gpipe-plan show`: look at a profile, a plan, or a run report."""

from typing import Annotated, Any

import typer

from planner.cli.options import Debug, Format, Quiet


def _read(help_: str) -> Any:
    return typer.Option(metavar="FILE", help=help_, rich_help_panel="What else is read")


def _written(help_: str) -> Any:
    return typer.Option(metavar="FILE", help=help_, rich_help_panel="Pictures")


def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A profile, a plan, links or a run report.")
    ] = "plan.yaml",
    plan: Annotated[str | None, _read("For a run report: its plan; default: plan.yaml beside it.")] = None,
    profile: Annotated[str | None, _read("The plan's profile, if it was moved.")] = None,
    run: Annotated[str | None, _read("For a plan: the report of a run under it, to set beside it.")] = None,
    html: Annotated[str | None, _written("Write a report that a browser shows.")] = None,
    svg: Annotated[str | None, _written("Write the timeline as a picture.")] = None,
    trace: Annotated[str | None, _written("Write the step for ui.perfetto.dev or chrome://tracing.")] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Tables and pictures of a saved file: stages, memory against the cap, the timeline of the schedule."""
    from planner.cli.drawing import draw

    outputs = {"--html": html, "--svg": svg, "--trace": trace}
    draw(file, plan, profile, run, outputs=outputs, format_=format_, quiet=quiet)
