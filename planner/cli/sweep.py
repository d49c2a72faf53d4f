"""`gpipe-plan sweep`: what is the smallest cluster that trains this?"""

from dataclasses import replace
from typing import Annotated

import typer

from planner import api, files
from planner.api.options import SweepOptions, values_of
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Quiet, check_format
from planner.cli.records import with_options
from planner.core.errors import ExitCode

__all__ = ["sweep"]

_FORMATS = ("text", "json", "markdown")


@with_options(SweepOptions)
def sweep(
    options: SweepOptions,
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="The profile; `-` is standard input.")
    ] = "profile.yaml",
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Find the best plan for every number of devices and every cap. Exit code 1: none of them trains this model."""
    console = Console(quiet=quiet)
    check_format(format_, _FORMATS)
    with console.progress("solving every cell") as progress:
        answers = api.sweep(profile, **values_of(replace(options, progress=progress)))
    if options.batch is None:
        console.note(f"note: no `--batch`: planning for {answers.batch} samples per step, the largest size profiled")
    if format_ == "json":
        console.result(files.dump(answers, as_json=True))
    elif format_ == "markdown":
        from planner.show.gate import sweep_markdown  # noqa: PLC0415 - only where it is asked for

        console.result(sweep_markdown(answers))
    else:
        from planner.show.terminal.sweep import sweep_text  # noqa: PLC0415 - likewise

        console.result(sweep_text(answers, style_for_stdout()))
    if options.output is not None:
        console.note(f"wrote {sum(cell.plan is not None for cell in answers.cells)} plans to {options.output}")
    raise typer.Exit(ExitCode.NO if answers.smallest is None else ExitCode.OK)
