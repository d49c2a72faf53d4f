"""`gpipe-plan explore`: write an interactive report."""

from dataclasses import replace

from planner.api.option import option_values
from planner.api.options.exploring import ExploreOptions
from planner.cli.console import Console
from planner.cli.options import Format, Output, PlanFile, Quiet, check_format, with_options


@with_options(ExploreOptions)
def explore(
    options: ExploreOptions,
    plan: PlanFile = "plan.yaml",
    output: Output = "explore.html",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Write an interactive report with adjustable cuts, schedule and memory limits."""
    import planner
    from planner import files

    as_json = check_format(format_)
    console = Console(quiet=quiet)
    page = planner.explore(plan, **option_values(replace(options, output=None if output == "-" else output)))
    if output == "-":
        console.result(page)
    else:
        console.result(files.json_text({"written": [output]}) if as_json else output)
        console.note(f"next: open {output} in a browser")
