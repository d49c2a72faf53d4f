"""`gpipe-plan show`: look at a profile, a plan, or a run report."""

from pathlib import Path
from typing import Annotated

import typer

from planner import files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, check_format
from planner.cli.plans import events_of, profile_for
from planner.core.balance import Balance
from planner.core.errors import UsageError
from planner.core.links import Links
from planner.core.partial import Partial
from planner.core.plan import Plan
from planner.core.profile import Profile
from planner.core.run_report import RunReport
from planner.emit import decisions_digest
from planner.show import links_text, plan_text, profile_text, run_text

__all__ = ["show"]


def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A profile, a plan, links or a run report.")
    ] = "plan.yaml",
    plan: Annotated[
        str | None, typer.Option(metavar="FILE", help="For a run report: its plan; default: plan.yaml beside it.")
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="The plan's profile, if it was moved.")] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Tables and pictures of a saved file: stages, memory against the cap, the timeline of the schedule."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    value = files.read(file)
    if as_json:
        console.result(files.dump(value, as_json=True))
        return
    style = style_for_stdout()
    if isinstance(value, Profile):
        text = profile_text(value, style)
    elif isinstance(value, Plan):
        text = plan_text(value, events_of(value, profile_for(value, file, profile)), style)
    elif isinstance(value, RunReport):
        text = run_text(value, _plan_of(value, file, plan, console), style)
    elif isinstance(value, Links):
        text = links_text(value, style)
    elif isinstance(value, Partial):
        raise UsageError(f"{file} is an unfinished profile", hint="finish it: run the same `gpipe-plan profile` again")
    else:
        assert isinstance(value, Balance)
        raise UsageError(f"{file} is a balance configuration; show the plan that it was emitted from")
    console.result(text)


def _plan_of(report: RunReport, report_path: str, plan_path: str | None, console: Console) -> Plan | None:
    """The plan that was run, to set its predictions beside what was measured."""
    beside = Path(report_path).with_name("plan.yaml")
    if plan_path is None and (report_path == "-" or not beside.exists()):
        return None
    found = files.read_plan(plan_path or str(beside))
    if decisions_digest(found) != report.plan_digest:
        console.warning(f"{plan_path or beside} is not the plan of this run: nothing to compare with")
        return None
    return found
