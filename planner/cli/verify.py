"""`gpipe-plan verify`: compare a run of the plan with its prediction."""

from dataclasses import replace
from typing import Annotated

import typer

from planner.api.option import option_values
from planner.api.options.verifying import VerifyOptions
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Format, PlanFile, Quiet, check_format, with_options
from planner.core.errors import ExitCode


@with_options(VerifyOptions)
def verify(
    options: VerifyOptions,
    plan: PlanFile = "plan.yaml",
    calibration: Annotated[
        str, typer.Option(metavar="FILE", help="File for the measured costs of this machine.")
    ] = "calibration.yaml",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Run a plan and compare it with its prediction. Exit code 0: they agree; 1: they differ; 2: error.

    `verify` starts torchrun with one process for every device of the plan, or reads a finished run (`--run`). It writes
    the measured costs to calibration.yaml, for `gpipe-plan solve --calibration`.
    """
    import planner
    from planner import files
    from planner.show.terminal.run import verification_text

    console = Console(quiet=quiet)
    as_json = check_format(format_)
    with console.progress(f"{'running' if options.run is None else 'judging'} {plan}") as progress:
        verification = planner.verify(
            plan, **option_values(replace(options, calibration=calibration, progress=progress))
        )
    console.result(files.json_text(verification) if as_json else verification_text(verification, style_for_stdout()))
    console.note(f"wrote {calibration}")
    if not verification.agrees:
        console.note(f"next: {verification.again}")
    raise typer.Exit(ExitCode.OK if verification.agrees else ExitCode.NO)
