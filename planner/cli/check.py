"""`gpipe-plan check`: does this plan still fit? For CI: exit code 0 or 1."""

from typing import Annotated

import typer

from planner import api, files
from planner.api.options import CheckOptions, values_of
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, PlanFile, Quiet, check_format
from planner.cli.records import with_options
from planner.core.errors import ExitCode
from planner.show import gate, verdict_text

_FOR_MACHINES = {
    "github": gate.annotations,
    "junit": gate.junit_xml,
    "sarif": gate.sarif_log,
    "markdown": gate.verdict_markdown,
}
_FORMATS = ("text", "json", *_FOR_MACHINES)


@with_options(CheckOptions)
def check(
    options: CheckOptions,
    plan: PlanFile = "plan.yaml",
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Recompute a plan from its profile. Exit code 0: it fits; 1: it does not, or is stale; 2: no answer.

    `gpipe-plan explain GP101` tells what a finding means.
    """
    check_format(format_, _FORMATS)
    verdict = api.check(plan, **values_of(options))
    if format_ in _FOR_MACHINES:
        place = gate.Place(path=plan, stage_lines=files.stage_lines(plan))
        text = _FOR_MACHINES[format_](verdict, place)
    else:
        text = files.json_text(verdict) if format_ == "json" else verdict_text(verdict, style_for_stdout())
    Console(quiet=quiet).result(text)
    raise typer.Exit(ExitCode.OK if verdict.fits else ExitCode.NO)
