"""`gpipe-plan check`: check if a plan still fits, for CI."""

from typing import TYPE_CHECKING, Annotated

import typer

from planner.api.option import option_values
from planner.api.options.checking import CheckOptions
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import PlanFile, Quiet, check_format, import_numpy_without_threads, with_options
from planner.core.errors import ExitCode

if TYPE_CHECKING:
    from planner.core.judge.verdict import Verdict

_FORMATS = ("text", "json", "github", "junit", "sarif", "markdown")


@with_options(CheckOptions)
def check(
    options: CheckOptions,
    plan: PlanFile = "plan.yaml",
    format_: Annotated[
        str, typer.Option("--format", metavar="|".join(_FORMATS), help="Format of what is printed.")
    ] = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Check if a plan still fits. Exit code 0: it fits; 1: it does not, or the profile changed; 2: error.

    `gpipe-plan explain GP101` explains a finding.
    """
    import_numpy_without_threads()
    import planner

    check_format(format_, _FORMATS)
    verdict = planner.check(plan, **option_values(options))
    Console(quiet=quiet).result(_text(verdict, plan, format_))
    raise typer.Exit(ExitCode.OK if verdict.fits else ExitCode.NO)


def _text(verdict: "Verdict", plan: str, format_: str) -> str:
    if format_ == "text":
        from planner.show.terminal.verdict import verdict_text

        return verdict_text(verdict, style_for_stdout())
    from planner import files

    if format_ == "json":
        return files.json_text(verdict)
    from planner.show import gate

    writers = {
        "github": gate.github_annotations,
        "junit": gate.junit_xml,
        "sarif": gate.sarif_log,
        "markdown": gate.verdict_markdown,
    }
    return writers[format_](verdict, gate.PlanFile(path=plan, stage_lines=files.stage_lines(plan)))
