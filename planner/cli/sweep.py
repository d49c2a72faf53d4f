"""`gpipe-plan sweep`: find the smallest cluster that trains a model."""

from dataclasses import replace

import typer

from planner.api.option import option_values
from planner.api.options.solving import SweepOptions
from planner.cli.console import Console
from planner.cli.options import MARKDOWN, OrMarkdown, ProfileFile, Quiet, check_format, formatted, with_options
from planner.core.errors import ExitCode


@with_options(SweepOptions)
def sweep(
    options: SweepOptions,
    profile: ProfileFile = "profile.yaml",
    format_: OrMarkdown = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Find the best plan for every device count and memory limit. Exit code 1: no plan fits."""
    import planner
    from planner.show.gate import sweep_markdown
    from planner.show.terminal.plans import sweep_text

    console, notes = Console(quiet=quiet), list[str]()
    check_format(format_, MARKDOWN)
    with console.progress("solving every cell") as progress:
        answers = planner.sweep(profile, **option_values(replace(options, progress=progress, note=notes.append)))
    for note in notes:
        console.note(f"note: {note}")
    console.result(formatted(answers, format_, text=sweep_text, markdown=sweep_markdown))
    if options.output is not None:
        console.note(f"wrote {sum(cell.plan is not None for cell in answers.cells)} plans to {options.output}")
    raise typer.Exit(ExitCode.NO if answers.smallest is None else ExitCode.OK)
