"""`gpipe-plan check`: does this plan still fit? For CI: exit code 0 or 1."""

from typing import Annotated

import typer

from planner import api, files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Quiet, check_format
from planner.core.errors import ExitCode
from planner.core.judge.verdict import Verdict
from planner.show import verdict_text

__all__ = ["check"]

_FORMATS = ("text", "json", "github", "junit", "sarif", "markdown")


def check(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The plan; `-` is standard input.")] = "plan.yaml",
    mem: Annotated[
        str | None, typer.Option(metavar="8GB", help="Judge against this cap instead of the plan's.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="h100", help="Judge against the memory of this accelerator instead.")
    ] = None,
    headroom: Annotated[str, typer.Option(metavar="5%", help="Warn if less than this share stays free.")] = "0%",
    balance: Annotated[
        str | None, typer.Option(metavar="6,6,6,6|FILE", help="Judge these cuts instead of the plan's.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL.py[:ENTRY]", help="Tell whether this still is the profiled model; needs torch."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="PLAN|git:REV", help="Tell what differs from this plan, or from this one as committed."),
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="The plan's profile, if it was moved.")] = None,
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings make the answer no as well.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Recompute a plan from its profile. Exit code 0: it fits; 1: it does not, or is stale; 2: no answer.

    `gpipe-plan explain GP101` tells what a finding means.
    """
    check_format(format_, _FORMATS)
    verdict = api.check(
        plan,
        mem=mem,
        device=device,
        headroom=headroom,
        balance=balance,
        model=model,
        strict=strict,
        against=against,
        profile=profile,
    )
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
