"""`gpipe-plan show`: show a profile, a plan, or a run report."""

from typing import Annotated, Any

import typer

from planner.cli.options import Format, Quiet, import_numpy_without_threads


def _read(metavar: str, help_: str) -> Any:
    return typer.Option(metavar=metavar, help=help_, rich_help_panel="Other inputs")


def _written(help_: str) -> Any:
    return typer.Option(metavar="FILE", help=help_, rich_help_panel="Pictures")


def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Profile, plan, links of profile-links, or run report.")
    ] = "plan.yaml",
    plan: Annotated[str | None, _read("PLAN", "Plan, if FILE is a run report; default: plan.yaml next to it.")] = None,
    profile: Annotated[str | None, _read("PROFILE", "The plan's profile, if it was moved.")] = None,
    run: Annotated[str | None, _read("RUN", "Run report to compare, if FILE is a plan.")] = None,
    html: Annotated[str | None, _written("Write an HTML report.")] = None,
    svg: Annotated[str | None, _written("Write the timeline as a picture.")] = None,
    trace: Annotated[str | None, _written("Write a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Show tables and pictures of a file: stages, memory, timeline."""
    import_numpy_without_threads()
    from planner.cli.drawing import show_file

    outputs = {"--html": html, "--svg": svg, "--trace": trace}
    show_file(file, plan, profile, run, outputs=outputs, format_=format_, quiet=quiet)
