"""`gpipe-plan show`: show a profile, a plan, or a run report."""

from typing import Annotated, Any

import typer

from planner.cli.options import Debug, Format, Quiet


def _read(help_: str) -> Any:
    return typer.Option(metavar="FILE", help=help_, rich_help_panel="Other inputs")


def _written(help_: str) -> Any:
    return typer.Option(metavar="FILE", help=help_, rich_help_panel="Pictures")


def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Profile, plan, links of profile-links, or run report.")
    ] = "plan.yaml",
    plan: Annotated[str | None, _read("Plan of the run report FILE; default: plan.yaml next to it.")] = None,
    profile: Annotated[str | None, _read("The plan's profile, if it was moved.")] = None,
    run: Annotated[str | None, _read("Run report to compare with the plan FILE.")] = None,
    html: Annotated[str | None, _written("Write an HTML report.")] = None,
    svg: Annotated[str | None, _written("Write the timeline as a picture.")] = None,
    trace: Annotated[str | None, _written("Write a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Show tables and pictures of a file: stages, memory, timeline."""
    from planner.cli.drawing import show_file

    outputs = {"--html": html, "--svg": svg, "--trace": trace}
    show_file(file, plan, profile, run, outputs=outputs, format_=format_, quiet=quiet)
