"""`gpipe-plan check`: does this plan still fit? For CI: exit code 0 or 1."""

from typing import Annotated

import typer

from planner import files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, caps, check_format
from planner.cli.plans import cuts, profile_for
from planner.core.errors import ExitCode
from planner.core.recut import with_cuts
from planner.core.units import parse_share
from planner.core.verdict import judge
from planner.show import verdict_text

__all__ = ["check"]


def check(
    plan: Annotated[str, typer.Argument(metavar="[PLAN]", help="The plan; `-` is standard input.")] = "plan.yaml",
    mem: Annotated[
        str | None, typer.Option(metavar="8GB", help="Judge against this cap instead of the plan's.")
    ] = None,
    headroom: Annotated[str, typer.Option(metavar="5%", help="Warn if less than this share stays free.")] = "0%",
    balance: Annotated[
        str | None, typer.Option(metavar="6,6,6,6|FILE", help="Judge these cuts instead of the plan's.")
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="The plan's profile, if it was moved.")] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Recompute a plan from its profile. Exit code 0: it fits; 1: it does not, or is stale; 2: no answer."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    share = parse_share(headroom)
    read = files.read_plan(plan)
    measured = profile_for(read, plan, profile)
    memory_bytes = caps(mem, read.inputs.devices) if mem is not None else None
    if balance is not None:
        read = with_cuts(read, measured, cuts(balance, measured), memory_bytes=memory_bytes)
    verdict = judge(
        read,
        measured,
        profile_digest=files.digest_of(measured),
        memory_bytes=memory_bytes,
        headroom=share,
    )
    console.result(files.dump(verdict, as_json=True) if as_json else verdict_text(verdict, style_for_stdout()))
    raise typer.Exit(ExitCode.OK if verdict.fits else ExitCode.NO)
