"""`gpipe-plan check`: does this plan still fit? For CI: exit code 0 or 1."""

from typing import Annotated

import typer

from planner import api, files
from planner.api.options import CheckOptions, values_of
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Quiet, check_format
from planner.cli.records import with_options
from planner.core.errors import ExitCode
from planner.core.judge.verdict import Verdict
from planner.show import verdict_text

__all__ = ["check"]

_FORMATS = ("text", "json", "github", "junit", "sarif", "markdown")


@with_options(CheckOptions)
def check(
    options: CheckOptions,
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The plan; `-` is standard input.")] = "plan.yaml",
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
    Console(quiet=quiet).result(_shown(verdict, plan, format_))
    raise typer.Exit(ExitCode.OK if verdict.fits else ExitCode.NO)


def _shown(verdict: Verdict, plan: str, format_: str) -> str:
    if format_ == "json":
        return files.dump(verdict, as_json=True)
    if format_ == "text":
        return verdict_text(verdict, style_for_stdout())
    from planner.show import gate  # noqa: PLC0415 - the usual check does without

    place = gate.Place(path=plan, stage_lines=files.stage_lines(plan))
    writers = {
        "github": gate.annotations,
        "junit": gate.junit_xml,
        "sarif": gate.sarif_log,
        "markdown": gate.verdict_markdown,
    }
    return writers[format_](verdict, place)
